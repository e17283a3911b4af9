"""Small models of Gemma 3n: several residual streams, LAuReL, and cutoffs of gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import pi2
from pi2.fitting.check import load_plan
from pi2.importing.checkpoint import list_tensors, open_checkpoint
from pi2.importing.dense_rows import CutoffMaker
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.rows import Rows
from pi2.measuring.conversion import CheckpointWeights, StoreWeights, score_layerwise
from pi2.measuring.texts import Window
from pi2.store.reader import NeuronStore
from tests.helpers.goldens import (
    CPU,
    FOLDER,
    ROUNDING,
    change_config,
    compute_decoded,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
)

TWO = {"decode.batch": 2}
CPU_TWO = {**CPU, **TWO}
NAME = "gemma3n"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(NAME, tmp_path_factory.mktemp(NAME))


@pytest.mark.parametrize(("count", "alike"), [(50, 0), (50, 20), (20, 0), (9000, 0)])
def test_a_matrix_tells_the_cutoff_without_gates(tmp_path: Path, count: int, alike: int) -> None:
    drawn = np.random.default_rng(1)
    gates = drawn.normal(0.1, 1.0, (count, 32)).astype(np.float32)
    # Inputs that add the same to all gates leave no triangle of full rank.
    gates[:, :alike] = 0.5
    save_file({"gates": gates}, tmp_path / "gates.safetensors")
    stored = list_tensors(tmp_path / "gates.safetensors")["gates"]
    mean, *rows = CutoffMaker(Rows(tensor=stored), -1.5, False).make()
    assert len(rows) == min(count, 32)
    for inputs in drawn.normal(size=(4, 32)).astype(np.float32):
        values = gates @ inputs
        found = mean @ inputs - np.linalg.norm(rows @ inputs)
        assert found == pytest.approx(values.mean() - 1.5 * values.std(), rel=1e-5)


@pytest.mark.parametrize("backend", [TWO, CPU_TWO])
def test_neurons_may_come_from_flash(plan: Path, backend: dict[str, Any]) -> None:
    golden = read_golden(NAME)
    expected = compute_decoded(plan, golden.prompt, backend | {"layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    little = backend | {"layers.hot": 0.0, "prefill.chunk": 8, "pipeline.prefill": "layers-first"}
    with pi2.load(plan, set=little) as model:
        np.testing.assert_allclose(
            model.logits(golden.prompt, mode="decode"), expected, atol=1e-6, rtol=1e-5
        )
        assert model.stats.flash_read_bytes > 0
        prompt = model.logits(golden.prompt, mode="prefill")
        assert measure_error(prompt, golden.logits) <= ROUNDING


def test_text_is_scored_layer_by_layer_as_the_engine_computes_it(
    plan: Path, tmp_path: Path
) -> None:
    ids = read_golden(NAME).prompt
    window = Window(tokens=tuple(ids), first_scored=1)
    logits = compute_decoded(plan, ids, {})[:-1].astype(np.float64)
    sums = np.log(np.exp(logits).sum(axis=1))
    expected = sums - logits[np.arange(len(ids) - 1), ids[1:]]
    model = load_plan(plan).model
    store = NeuronStore.open(plan.parent / "store")
    checkpoint = open_checkpoint(FOLDER / NAME)
    for weights in (StoreWeights(store), CheckpointWeights(checkpoint, model)):
        found = score_layerwise(weights, model, [window])
        np.testing.assert_allclose(found.losses, expected, rtol=1e-3)


def test_a_short_model_without_a_pattern_has_no_cutoffs(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(NAME, tmp_path / "checkpoint")
    change_config(checkpoint, activation_sparsity_pattern=None)
    assert describe_checkpoint(checkpoint).model.cut_layers == ()
