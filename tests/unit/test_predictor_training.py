"""`pi2 predictor train`: predictors learn what neurons do, keep their word on recall, and ship."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.measuring.predictors import (
    FEWEST_PASSES,
    MOST_PASSES,
    STEPS,
    Fit,
    LayerSamples,
    Recipe,
    calibrate,
    fit_layer,
)
from pi2.measuring.texts import Passages
from pi2.measuring.training import count_token_bytes, fit_experts, name_all, train_predictors
from pi2.plan.arithmetic.sizes import count_ffn_bytes
from pi2.store.reader import NeuronStore
from pi2.store.verification import verify_store
from tests.helpers.mixtures import SHAPE, make_mixture_plan
from tests.helpers.models import MIXTURE, make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.programs import Ask

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs.\n" * 6


def draw_samples(tokens: int = 3000, hidden: int = 32, neurons: int = 64) -> LayerSamples:
    """Neurons that fire where a few directions of the input say so: about one in ten."""
    random = np.random.default_rng(3)
    inputs = random.standard_normal((tokens, hidden), np.float32)
    directions = random.standard_normal((8, hidden), np.float32) / np.float32(hidden**0.5)
    mixing = random.standard_normal((neurons, 8), np.float32)
    active = (inputs @ directions.T) @ mixing.T > 3.5
    return LayerSamples(inputs.astype(np.float16), np.packbits(active, axis=1), neurons)


def test_a_predictor_finds_what_it_promises_and_names_few() -> None:
    samples = draw_samples()
    fit = fit_layer(samples, 32, Recipe(recall=0.95, passes=20, batch=128), "int8")
    assert fit.recall == pytest.approx(0.95, abs=0.01) and 0.03 < fit.active < 0.2
    assert fit.active < fit.predicted < 2.5 * fit.active
    inputs, active = samples.read(slice(2700, 3000))
    named = fit.weights.score(inputs) >= 0
    assert named.mean() == pytest.approx(fit.predicted)
    assert (named & active).sum() / active.sum() == pytest.approx(fit.recall)


def test_short_texts_are_learned_from_more_often_but_not_by_heart() -> None:
    recipe = Recipe()
    passes = [recipe.count_passes(tokens, 96) for tokens in (1_000, 64_000, 10_000_000)]
    assert passes == [MOST_PASSES, STEPS * 128 / 64_000, FEWEST_PASSES]
    assert recipe.count_batch(1024) > recipe.count_batch(96)
    assert Recipe(passes=2).count_passes(1_000, 96) == 2


def test_recall_is_a_knob() -> None:
    samples = draw_samples()
    fit = fit_layer(samples, 32, Recipe(recall=0.9, passes=5, batch=128), "int8")
    shares = [share for _, share in fit.curve]
    assert shares == sorted(shares)
    more = calibrate(samples, slice(2700, 3000), fit.weights, Recipe(recall=0.99))
    assert more.recall >= 0.985 and more.predicted > fit.predicted
    assert dict(fit.curve)[0.99] == pytest.approx(more.predicted, abs=0.01)


def test_the_seed_decides_everything() -> None:
    recipe = Recipe(passes=1, batch=128)
    first, second = (fit_layer(draw_samples(), 32, recipe, "int8") for _ in range(2))
    np.testing.assert_array_equal(first.weights.outer, second.weights.outer)


def test_a_store_without_predictors_gets_them(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"predictor": None})
    plan = write_plan(tmp_path, tiny, {"decode": {"predictor": "none"}})
    before = (tiny.store / "manifest.json").read_bytes()
    recipe = Recipe(recall=0.9, passes=10, batch=64)
    found = train_predictors(
        plan, Passages([TEXT], context=48, held_out=1), tmp_path / "new", recipe=recipe, rank=32
    )
    assert found.plan == tmp_path / "new/default.plan.toml"
    # Random weights fire half of the time; what was learned is still more than chance.
    low_rank = found.evaluation.runs[1]
    assert (low_rank.name, low_rank.predictor) == ("low-rank", "low-rank")
    for layer in found.evaluation.layers:
        assert layer.recall is not None and layer.recall > layer.predicted
    with NeuronStore.open(tmp_path / "new/store") as new, NeuronStore.open(tiny.store) as old:
        assert new.manifest.predictor is not None and new.manifest.predictor.rank == (32, 32, 32)
        for name, tensor in old.tensors.items():
            np.testing.assert_array_equal(new.tensors[name].weights, tensor.weights)
        assert os.path.samefile(new.layers[0].path, old.layers[0].path)
    assert verify_store(tmp_path / "new/store") == []
    assert (tiny.store / "manifest.json").read_bytes() == before
    model = load_plan(found.plan).model
    assert model.predictor is not None and model.predictor.rank == 32
    with pi2.load(found.plan) as loaded:
        assert len(loaded.generate("The", max_tokens=4, ignore_eos=True).result.token_ids) == 4
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"store", "tiny.model.toml", "tiny.plan.toml", "new"}


def test_every_expert_of_a_mixture_gets_a_predictor(tmp_path: Path) -> None:
    names = {key: name for key, name in MIXTURE["tensors"].items() if "predictor" not in key}
    (tmp_path / "mixture").mkdir()
    changes = {"predictor": None, "tensors": names, "shape": {**SHAPE, "layers": 1}}
    plan = make_mixture_plan(tmp_path / "mixture", "drelu", changes)
    found = train_predictors(
        plan, Passages([TEXT], context=40, held_out=1), tmp_path / "new",
        overrides={"backends.cpu": "reference"}, recipe=Recipe(recall=0.9, passes=2), rank=32,
    )  # fmt: skip
    with NeuronStore.open(plan.parent / "store") as store:
        for fit in found.fits:
            assert len(fit.experts) == 4
            # Nine tenths of the text, a byte each, in whole windows; two experts compute a token.
            assert sum(fit.tokens) == 2 * 400
            biases = [len(item.weights.bias) for item in fit.experts]
            assert store.layers[0].neurons == sum(biases) == 800
    assert load_plan(found.plan).model.tensors.predictor_in.count("{expert}") == 1
    low_rank = found.evaluation.runs[1]
    assert low_rank.predicted is not None and low_rank.active is not None
    assert 0.2 < low_rank.active <= low_rank.predicted < 0.6
    # Which neurons are active, and which are named, is counted among a token's experts.
    for layer, fit in zip(found.evaluation.layers, found.fits, strict=True):
        assert layer.active == pytest.approx(0.33, abs=0.05)
        assert fit.recall == pytest.approx(0.9, abs=0.05)
        assert layer.recall == pytest.approx(0.9, abs=0.1)
        assert layer.recall is not None and layer.recall > layer.predicted


def test_an_expert_that_no_token_came_to_names_all_of_its_neurons() -> None:
    samples = draw_samples()
    found = fit_experts([samples, samples.cut(0)], 32, Recipe(passes=1), "int8")
    trained, unknown = found.experts
    assert (unknown.recall, unknown.predicted, unknown.active) == (1.0, 1.0, 0.0)
    assert (unknown.weights.score(np.ones((2, 32), np.float32)) >= 0).all()
    assert found.predicted == trained.predicted
    assert unknown.weights.inner.shape == trained.weights.inner.shape == (32, 32)
    assert unknown.weights.outer.shape == trained.weights.outer.shape == (64, 32)


def test_named_neurons_weigh_more_where_they_come_from_flash(tmp_path: Path) -> None:
    resolved = load_plan(write_plan(tmp_path, make_tiny(tmp_path)))
    whole = count_ffn_bytes(resolved)
    few, many = (replace(name_all(draw_samples(), 32), predicted=share) for share in (0.1, 0.2))

    def count(resident: float, fit: Fit) -> float:
        memory = resolved.plan.memory
        segments = memory.segments.model_copy(update={"hot": round(resident * whole), "cold": 0})
        memory = memory.model_copy(update={"segments": segments})
        plan = resolved.plan.model_copy(update={"memory": memory})
        return count_token_bytes(fit, replace(resolved, plan=plan), "int8")

    neurons = 0.1 * 96 * resolved.bundle.used_bytes
    assert count(1.0, many) - count(1.0, few) == pytest.approx(neurons)
    assert count(0.0, many) - count(0.0, few) == pytest.approx(10 * neurons)


def test_what_exists_is_not_overwritten(tmp_path: Path, plan: Path) -> None:
    with pytest.raises(UserError, match="P667"):
        train_predictors(plan, Passages([TEXT]), tmp_path)


def test_models_whose_neurons_never_rest_are_refused(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {"predictor": None, "ffn": {"activation": "silu"}})
    plan = write_plan(tmp_path, tiny, {"decode": {"predictor": "none"}})
    with pytest.raises(UserError) as caught:
        train_predictors(plan, Passages([TEXT]), tmp_path / "new")
    assert caught.value.diagnostics[0].code == "P665"
    assert not (tmp_path / "new").exists()


def test_the_command_reports_ranks_recall_and_perplexity(tmp_path: Path, ask: Ask) -> None:
    tiny = make_tiny(tmp_path, {"predictor": None, "shape": {"layers": 1}})
    plan = write_plan(tmp_path, tiny, {"decode": {"predictor": "none"}})
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["predictor", "train", str(plan), "--text", str(tmp_path / "text.txt")]
    command += ["--context", "32", "--windows", "4", "--json", "-o", str(tmp_path / "new")]
    found = json.loads(ask(command).out)
    (layer,) = found["layers"]
    assert layer["rank"] in (32, 64)
    assert [item["name"] for item in found["evaluation"]["runs"]] == ["dense", "low-rank"]
    assert run(["predictor", "train", str(plan), "--text", "x", "-o", "y", "--rank", "much"]) == 2
