"""Synthetic stores have the statistics that were asked for, and are the same every time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.diagnostics import UserError
from pi2.plan.documents.model import Model
from pi2.store.manifest import read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from synthesis.additions import add_files
from synthesis.calibration import tune_blueprint
from synthesis.generation import write_synthetic_store
from synthesis.measurement import Measurement, choose_tokens, measure_store
from synthesis.recipe import Recipe, check_recipe
from synthesis.statistics import average_layers
from tests.helpers.models import make_model, make_tiny
from tests.helpers.synthetic_stores import SHAPE, hash_store
from tests.helpers.tables import in_table


def make(activation: str = "drelu", **changes: Any) -> Model:
    settings = {"shape": SHAPE, "ffn": {"activation": activation}, "predictor": {"rank": 128}}
    return make_model({**settings, "tied_head": False, **changes})


def synthesize(folder: Path, model: Model, recipe: Recipe) -> Path:
    path = folder / "store"
    write_synthetic_store(path, tune_blueprint(model, recipe))
    return path


def measure(folder: Path, model: Model, recipe: Recipe) -> Measurement:
    return measure_store(synthesize(folder, model, recipe), model, tokens=192)


@in_table
def test_what_is_measured_is_what_was_asked_for(
    tmp_path: Path, activation: str, active: float, skew: float
) -> None:
    ffn = {"activation": activation, "threshold": 0.1 if activation == "fatrelu" else 0.0}
    model = make(ffn=ffn)
    for layer in measure(tmp_path, model, Recipe(active=active, skew=skew)).layers:
        assert layer.active == pytest.approx(active, rel=0.10)
        assert layer.skew == pytest.approx(skew, abs=0.04)
        assert layer.recall is not None and layer.predicted is not None
        assert layer.recall == pytest.approx(0.98, abs=0.015)
        assert layer.active < layer.predicted < 1.7 * active


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_every_precision_keeps_the_statistics(tmp_path: Path, precision: str) -> None:
    kinds = dict.fromkeys(("ffn", "attention", "embedding", "head", "predictor"), precision)
    mean = average_layers(measure(tmp_path, make(quantization=kinds), Recipe()).layers)
    assert mean["active"] == pytest.approx(0.10, rel=0.1)
    assert mean["recall"] == pytest.approx(0.98, abs=0.015)


PLAIN = {"activation": "relu", "gated": False, "bias": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"ffn": {"activation": "silu"}, "predictor": None},
        {"tied_head": True},
        {"attention": {"qkv_bias": True, "sliding_window": 32}},
        {"rope": {"kind": "llama3", "factor": 8.0}},
        {"predictor": {"rank": 32}},
        {"predictor": {"rank": 352}},
        {"shape": {**SHAPE, "ffn": 1000, "vocab": 300}},
    ],
)
def test_other_models_become_sound_stores_that_make_text(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = make(**changes)
    store = synthesize(tmp_path, model, Recipe())
    assert verify_store(store) == []
    with NeuronStore.open(store, model=model) as opened:
        assert opened.manifest.synthetic and opened.manifest.order == "hotness"
    measured = measure_store(store, model, tokens=96)
    assert all(layer.active == pytest.approx(0.1, rel=0.25) for layer in measured.layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"ffn": PLAIN, "norm": {"kind": "layernorm", "bias": True}, "positions": {"offset": 2}},
        {"ffn": PLAIN, "predictor": None, "attention": {"qkv_bias": True, "output_bias": True}},
        {"attention": {"head_norm": True}},
    ],
    ids=["plain, layernorm, learned positions", "plain, biases", "norms of heads"],
)
def test_other_families_have_the_statistics_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    recipe = Recipe(active=0.1, skew=0.3)
    layer = average_layers(measure(tmp_path, make(**changes), recipe).layers)
    assert layer["active"] == pytest.approx(0.1, abs=0.01)
    assert layer["skew"] == pytest.approx(0.3, abs=0.03)


def test_a_mixture_beside_a_dense_ffn_becomes_a_sound_store(tmp_path: Path) -> None:
    """As Gemma 4 is, whose routers multiply what they read by a small factor."""
    moe = {"experts": 4, "active_experts": 2, "router_input": "stream", "expert_scale": True}
    model = make(
        "gelu_tanh", predictor=None, shape={**SHAPE, "ffn": 128}, norm={"outputs": True},
        moe=moe | {"input_scale": 256**-0.5}, side_ffn={"width": 192},
        other_heads={"layers": [1], "kv_heads": 1, "head_dim": 96, "keys_are_values": True},
        attention={"value_norm": True}, layer_scale=True,
    )  # fmt: skip
    store = synthesize(tmp_path, model, Recipe())
    assert verify_store(store) == []
    measured = measure_store(store, model, tokens=96)
    assert all(layer.active == pytest.approx(0.1, rel=0.25) for layer in measured.layers)


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    model = make()
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        hashes.append(hash_store(synthesize(tmp_path / name, model, Recipe(seed=seed))))
    assert hashes[0] == hashes[1] and hashes[0]["dense.arrow"] != hashes[2]["dense.arrow"]
    assert hashes[0]["layers/ffn-001.arrow"] != hashes[2]["layers/ffn-001.arrow"]


def test_a_recipe_that_cannot_be_had_is_refused_with_all_its_faults() -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(Recipe(active=0.4, skew=0.26, recall=2.0, seed=-1), make())
    text = " ".join(item.message for item in caught.value.diagnostics)
    assert "recall is 2.0" in text and "seed is -1" in text
    assert "26% of the neurons cannot make 80%" in text


def test_sample_tokens_are_neighbours_and_never_end_a_text() -> None:
    tokens = choose_tokens(make(tokenizer={"eos": [260]}), 2000)
    assert 260 not in tokens
    assert int(np.sum(np.diff(tokens) == 1)) > 1900


def test_files_are_added_to_a_store_and_replaced(tmp_path: Path) -> None:
    store = make_tiny(tmp_path).store
    add_files(store, {"notes.txt": b"one"})
    manifest = add_files(store, {"notes.txt": b"two", "more.txt": b""})
    assert (store / "notes.txt").read_bytes() == b"two"
    assert {"notes.txt", "more.txt"} <= {entry.path for entry in manifest.files}
    assert manifest == read_manifest(store)
    assert verify_store(store) == []
    assert not list(store.glob(".*"))
    with pytest.raises(UserError, match="P501"):
        add_files(tmp_path / "nowhere", {"notes.txt": b"one"})
