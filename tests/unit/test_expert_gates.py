"""Thresholds for the experts of a mixture: gates are read first, and then open neurons alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.cli.main import run as cli
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.plan.arithmetic.fitting import fit_plan
from pi2.plan.reading.thresholds import Thresholds, read_thresholds
from pi2.store.gates import add_gates
from pi2.store.manifest import GATES_FILE, MANIFEST, read_manifest
from pi2.store.reader import NeuronStore
from pi2.store.reordering import reorder_store
from pi2.store.verification import verify_store
from tests.helpers.mixtures import make_mixture_plan
from tests.helpers.models import make_tiny
from tests.helpers.preparing import watch_kernels

TOKENS = [7, 100, 8, 290, 3, 3, 41, 250, 12, 77, 5]
TEXT = "Some words, and other words; numbers like 12 and 345, and more of them. " * 24
LAYERS, EXPERTS, CHOSEN, FFN = 2, 4, 2, 200
CACHES: Mapping[str, Mapping[str, Any]] = {
    "everything": {},
    "a token's experts of a layer": {"layers.hot": 0.0, "slots": CHOSEN * FFN, "records": 2},
    "some of them hot": {"layers.hot": 0.3, "slots": CHOSEN * FFN + 100, "records": 3},
    "least recently used": {
        "layers.hot": 0.05,
        "slots": 3 * FFN,
        "records": 5,
        "cache.policy": "lru",
    },
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with thresholds for half of the neurons, whose store has gates in a second order
    of neurons."""
    return make_plan(tmp_path_factory.mktemp("gates"), {})


def make_plan(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Such a mixture with ``changes``."""
    plan = make_mixture_plan(folder, "silu", {"predictor": None, **changes})
    store = plan.parent / "store"
    add_gates(store)
    with NeuronStore.open(store) as old:
        orders = np.stack([np.sort(layer.copy_original()) for layer in old.layers])
    reorder_store(store, orders, "index")
    text = plan.parent / "text.txt"
    text.write_text(TEXT)
    file = plan.parent / "half.thresholds.toml"
    command = ["sparsity", "calibrate", str(plan), "--text", str(text), "--target", "0.5"]
    options = ["--context", "64", "--set", "backends.cpu=reference", "-o", str(file)]
    assert cli([*command, *options]) == 0
    return plan


def load(
    plan: Path,
    *settings: Mapping[str, Any],
    limit: float | None = None,
) -> LoadedModel:
    """The plan with a router and thresholds, or with ``limit`` for every expert; ``slots`` stands
    for as many cold neurons and ``records`` for the gates of as many experts."""
    chosen: dict[str, Any] = {"decode.predictor": "router", "backends.cpu": "reference"}
    chosen |= {"memory.budget": "2 GiB", "memory.segments.predictor": "1 MiB"}
    chosen["sparsity"] = {"method": "cats", "target": 0.5, "thresholds": "half.thresholds.toml"}
    for some in settings:
        chosen |= some
    manifest = read_manifest(plan.parent / "store")
    slots, records = chosen.pop("slots", None), chosen.pop("records", None)
    if slots is not None:
        chosen["memory.segments.cold"] = f"{slots * manifest.bundle.stride} B"
    if records is not None:
        assert manifest.gates is not None
        neurons = manifest.describe_model().layer_neurons
        room = records * manifest.gates.stride + LAYERS * (4 * neurons + 64)
        chosen["memory.segments.predictor"] = f"{room} B"
    thresholds: Thresholds | None = None
    if limit is not None:
        thresholds = read_thresholds(plan.parent / "half.thresholds.toml")
        layers = [
            layer.model_copy(update={"gate": limit, "experts": (limit,) * len(layer.experts)})
            for layer in thresholds.layers
        ]
        thresholds = thresholds.model_copy(update={"layers": tuple(layers)})
    if chosen["sparsity"] is None:
        del chosen["sparsity"]
    return pi2.load(plan, set=chosen, thresholds=thresholds)


def compute(model: LoadedModel) -> F32:
    """Logits of tokens one by one."""
    found = model.logits(TOKENS, mode="decode")
    cache = model._parts.cache
    assert not cache._held.any() and cache.free_capacity == cache.cold_capacity
    return found


def measure_change(found: F32, exact: F32) -> float:
    """Root mean square of the difference, over that of the exact."""
    return float(np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()))


@pytest.mark.parametrize("cache", CACHES)
def test_thresholds_of_zero_change_no_bit(plan: Path, cache: str) -> None:
    with load(plan, CACHES[cache], {"sparsity": None}) as model:
        exact = compute(model)
    with load(plan, CACHES[cache], limit=0.0) as model:
        np.testing.assert_array_equal(compute(model), exact)
        assert model.stats.predicted_share == 1.0 and model.stats.flash_saved_bytes == 0


@pytest.mark.parametrize("look_ahead", ["none", "attention", "layer"])
def test_what_is_in_memory_changes_no_bit(plan: Path, look_ahead: str) -> None:
    with load(plan) as model:
        whole = compute(model)
        assert model.stats.predicted_share == pytest.approx(0.5, abs=0.1)
    for cache in CACHES.values():
        with load(plan, cache, {"decode.look_ahead": look_ahead}) as model:
            np.testing.assert_array_equal(compute(model), whole)


def test_gates_in_memory_name_the_same_neurons(plan: Path) -> None:
    with load(plan, {"decode.predictor": "gate", "memory.segments.predictor": "1 MiB"}) as model:
        expected, counted = compute(model), model.stats.predicted_neurons
    with load(plan) as model:
        found = compute(model)
        assert model.stats.predicted_neurons == counted
    # Neurons are added in other parts.
    assert measure_change(found, expected) < 1e-6


def test_kernels_do_as_the_reference(plan: Path) -> None:
    small = CACHES["a token's experts of a layer"]
    with load(plan, small) as model:
        expected, counted = compute(model), model.stats.predicted_neurons
    compiled = {"backends.cpu": "cpu", **small}
    with load(plan, compiled) as model:
        assert measure_change(compute(model), expected) < 0.02
        # A gate at its threshold may fall to either side.
        assert model.stats.predicted_neurons == pytest.approx(counted, rel=0.01)
    with load(plan, compiled, {"sparsity": None}) as model:
        exact = compute(model)
    with load(plan, compiled, limit=0.0) as model:
        np.testing.assert_array_equal(compute(model), exact)


def test_gates_with_biases_are_read_with_them(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, {"ffn": {"activation": "silu", "bias": True}})
    with load(plan, {"decode.predictor": "gate"}) as model:
        expected, counted = compute(model), model.stats.predicted_neurons
    with load(plan, CACHES["a token's experts of a layer"]) as model:
        assert measure_change(compute(model), expected) < 1e-6
        assert model.stats.predicted_neurons == counted


def test_shared_experts_have_thresholds_too(tmp_path: Path) -> None:
    moe = {"experts": 4, "active_experts": 2, "shared_experts": 1}
    plan = make_plan(tmp_path, {"moe": moe})
    assert len(read_thresholds(plan.parent / "half.thresholds.toml").layers[0].experts) == 5
    with load(plan) as model:
        whole = compute(model)
        assert model.stats.predicted_share == pytest.approx(0.5, abs=0.1)
    with load(plan, {"slots": 3 * FFN, "records": 3, "layers.hot": 0.0}) as model:
        np.testing.assert_array_equal(compute(model), whole)


def test_gates_and_open_neurons_are_read_and_nothing_else(plan: Path) -> None:
    cache = {"layers.hot": 0.0, "slots": CHOSEN * FFN, "records": 2, "cache.fill": False}
    with load(plan, cache) as model:
        model.logits(TOKENS[:1], mode="decode")
        stats, manifest = model.stats, read_manifest(plan.parent / "store")
    assert manifest.gates is not None
    chosen = LAYERS * CHOSEN
    neurons = stats.predicted_neurons * manifest.bundle.stride
    assert stats.flash_read_bytes == chosen * manifest.gates.stride + neurons
    assert stats.gate_reads == stats.possible_neurons == chosen * FFN
    closed = chosen * FFN - stats.predicted_neurons
    assert stats.flash_saved_bytes == closed * manifest.bundle.stride > 0


def test_gates_that_were_read_are_kept(plan: Path) -> None:
    cache = {"layers.hot": 0.0, "slots": LAYERS * CHOSEN * FFN, "records": LAYERS * CHOSEN}
    with load(plan, cache, {"cache.fill": False}) as model:
        model.logits(TOKENS[:1], mode="decode")
        before = model.stats.flash_read_bytes
        model.logits(TOKENS[:1], mode="decode")
        assert model.stats.flash_read_bytes == before > 0


def test_several_sequences_have_open_neurons_of_their_own(plan: Path) -> None:
    small: dict[str, Any] = {"layers.hot": 0.0, "slots": 4 * FFN, "records": 2, "cache.fill": False}
    small |= {"memory.segments.kv": "64 KiB", "memory.segments.workspace": "8 MiB"}
    prompts = ["some words", "and others", "a third"]
    with load(plan, small, {"decode.batch": 3}) as model:
        together = [list(item.token_ids) for item in batch(model, prompts)]
    with load(plan, small) as model:
        alone = [list(item.token_ids) for own in prompts for item in batch(model, [own])]
    assert together == alone


def batch(model: LoadedModel, prompts: list[str]) -> Any:
    generation = model.generate_batch(prompts, max_tokens=4, temperature=0.0)
    list(generation)
    return generation.result.sequences


def test_dials_take_an_expert_for_present_whose_open_neurons_are(plan: Path) -> None:
    dial: dict[str, Any] = {
        "layers.hot": 0.0,
        "records": 4,
        "experts.most_reads": 0,
        "cache.fill": False,
    }
    with load(plan, dial, {"slots": LAYERS * EXPERTS * FFN}) as model:
        model.logits(TOKENS, mode="decode")
        first = model.stats
        assert 0.0 < (first.left_out_share or 0.0) < 0.6
        model.logits(TOKENS, mode="decode")
        later = model.stats - first
        assert (later.left_out_share or 0.0) <= (first.left_out_share or 0.0)


def test_a_summary_and_an_evaluation_say_what_was_left_out(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"decode.predictor": "router", "layers.hot": 0.0, "memory.segments.cold": "600 KiB"}
    settings |= {"backends.cpu": "reference", "memory.segments.predictor": "1 MiB"}
    settings |= {"memory.budget": "1 GiB", "sparsity.method": "cats", "sparsity.target": "0.5"}
    settings["sparsity.thresholds"] = "half.thresholds.toml"
    options = [part for item in settings.items() for part in ("--set", "=".join(map(str, item)))]
    text = tmp_path / "text.txt"
    text.write_text("some words " * 12)
    assert cli(["evaluate", str(plan), "--text", str(text), "--context", "32", *options]) == 0
    assert "of neurons with closed gates not read, " in capsys.readouterr().out
    assert cli(["run", str(plan), "--prompt", "some", "--max-tokens", "3", *options]) == 0
    assert "% of the experts' neurons, " in capsys.readouterr().err


def test_a_store_gets_gates_and_keeps_the_rest(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(plan.parent / "store", store)
    before = {entry.path: entry.sha256 for entry in read_manifest(store).files}
    assert cli(["store", "gates", str(store)]) == 0
    assert "gates of 8 experts" in capsys.readouterr().err
    assert {entry.path: entry.sha256 for entry in read_manifest(store).files} == before
    assert verify_store(store) == []
    cli(["store", "info", str(store)])
    assert "gates of 8 experts" in capsys.readouterr().out
    content = bytearray((store / GATES_FILE).read_bytes())
    content[4096] ^= 1
    (store / GATES_FILE).write_bytes(content)
    assert [item.code for item in verify_store(store)] == ["P507"]


def test_damaged_gates_are_found_when_they_are_read(plan: Path, tmp_path: Path) -> None:
    shutil.copytree(plan.parent, tmp_path / "copy")
    own = tmp_path / "copy" / plan.name
    file = own.parent / "store" / GATES_FILE
    content = bytearray(file.read_bytes())
    entry = read_manifest(own.parent / "store").find_file(GATES_FILE)
    assert entry is not None and entry.bundles_offset is not None
    for place in range(entry.bundles_offset, entry.neurons_offset or 0, 4096):
        content[place] ^= 1
    file.write_bytes(content)
    small = {"layers.hot": 0.0, "records": 2, "slots": CHOSEN * FFN}
    with load(own, small) as model, pytest.raises(UserError) as caught:
        model.logits(TOKENS, mode="decode")
    assert caught.value.diagnostics[0].code == "P511"


def test_a_plan_wants_the_gates_that_its_store_has(plan: Path) -> None:
    store = plan.parent / "store"
    text = (store / MANIFEST).read_text()
    try:
        (store / MANIFEST).write_text(json.dumps({**json.loads(text), "gates": None}))
        with pytest.raises(UserError, match="does not have the experts' gates apart") as caught:
            load(plan)
        assert caught.value.diagnostics[0].code == "P520"
    finally:
        (store / MANIFEST).write_text(text)


def test_a_fitted_budget_keeps_a_cache_of_gates(plan: Path) -> None:
    with load(plan) as model:
        resolved = model.plan
    kept = fit_plan(resolved, 1 << 30).plan.memory.segments.predictor
    assert kept == 1 << 20
    tight = fit_plan(resolved, 100 << 20)
    assert tight.needs.predictor.bytes <= tight.plan.memory.segments.predictor <= 1 << 20


def test_kernels_for_gates_are_compiled_before_there_is_room_for_gates(plan: Path) -> None:
    early, needed = watch_kernels(lambda: load(plan, {"backends.cpu": "cpu"}))
    assert early == [needed]
    assert needed.gate_rows is not None


def test_a_model_without_experts_has_no_gates_to_keep_apart(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path)
    with pytest.raises(UserError, match="no mixture") as caught:
        add_gates(tiny.store)
    assert caught.value.diagnostics[0].code == "P105"
    assert not (tiny.store / GATES_FILE).exists()
