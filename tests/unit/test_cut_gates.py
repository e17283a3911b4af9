"""Layers whose gates have a cutoff compute the neurons that it leaves open, and no others."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
import pi2.engine.assembly
from pi2.arrays import F32
from pi2.costs.cost import describe_plan
from pi2.diagnostics import UserError
from pi2.engine.waves import Wave, Waves
from pi2.fitting.check import load_plan
from pi2.planning.planner import PlannedPlan
from pi2.planning.planner import plan as make_plan
from pi2.planning.wish import Wish
from pi2.simulate import simulate
from tests.helpers.goldens import (
    CPU,
    EXACT,
    ROUNDING,
    change_config,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    measure_error,
    write_plan,
)
from tests.helpers.shipped_plans import read_device, read_model

NEURONS, LAYERS = 700, 5
CUT = {0: 0.8, 2: 0.3, 3: 0.6}
"""Share of the gates that are closed, by layer."""
TOKENS = [5, 9, 33, 60, 12, 7, 41, 8]
REFERENCE: dict[str, Any] = {"backends.cpu": "reference"}
PROCESSOR = {"backends.cpu": "cpu"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden Gemma 3n with more neurons, so that a layer's are computed in several parts."""
    folder = tmp_path_factory.mktemp("cut")
    checkpoint = copy_checkpoint("gemma3n", folder / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    drawn = np.random.default_rng(5)
    for name, values in tensors.items():
        if ".mlp." in name:
            rows, columns = values.shape
            shape = (rows, NEURONS) if "down_proj" in name else (NEURONS, columns)
            tensors[name] = (drawn.normal(size=shape) * values.std(dtype="f4")).astype(values.dtype)
    save_file(tensors, checkpoint / "model.safetensors")
    change_config(checkpoint, intermediate_size=[NEURONS] * LAYERS)
    model = convert_golden(checkpoint, folder, EXACT)
    return write_plan(folder, model, {"decode": {"predictor": "gate"}})


def choose_cold(plan: Path, neurons: int) -> dict[str, str]:
    return {"memory.segments.cold": f"{load_plan(plan).bundle.stride * neurons} B"}


@pytest.mark.parametrize("backend", [REFERENCE, PROCESSOR])
def test_gates_lose_nothing_and_what_is_in_memory_changes_no_bit(
    plan: Path, backend: dict[str, Any]
) -> None:
    whole = backend | {"layers.hot": 1.0}
    expected = compute_decoded(plan, TOKENS, whole)
    dense = compute_decoded(plan, TOKENS, whole | {"decode.predictor": "none"})
    assert measure_error(expected, dense) <= ROUNDING
    for others in (
        {"layers.hot": 0.0, **choose_cold(plan, 490)},
        {"layers.hot": 0.0, "cache.fill": False, "cache.policy": "lru", "io.merge_gap": 3},
        {"layers.hot": 0.4, "pipeline.cluster": 16, "kv.lend": True, **choose_cold(plan, 600)},
    ):
        with pi2.load(plan, set=backend | others) as model:
            found = model.logits(TOKENS, mode="decode")
            assert model.stats.flash_read_bytes > 0
        np.testing.assert_array_equal(found, expected)


def test_a_cache_that_is_too_small_for_a_token_changes_no_bit_either(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute_decoded(plan, TOKENS, PROCESSOR | {"layers.hot": 1.0})
    least = PROCESSOR | {"layers.hot": 0.0, **choose_cold(plan, 490)}
    resolved = load_plan(plan, overrides=least)
    assert resolved.needs.cold.bytes == resolved.plan.memory.segments.cold
    asked = []

    class Asked(Waves):
        def begin(self, *arguments: Any, **named: Any) -> Wave:
            wave = super().begin(*arguments, **named)
            asked.append(len(wave.rest))
            return wave

    monkeypatch.setattr("pi2.engine.feed_forward.Waves", Asked)
    np.testing.assert_array_equal(compute_decoded(plan, TOKENS, least), expected)
    assert any(asked), "gates of more neurons than the cache has room for were open"


@pytest.mark.parametrize("backend", [REFERENCE, CPU])
def test_sequences_together_have_the_same_bits_whatever_is_in_memory(
    plan: Path, backend: dict[str, Any]
) -> None:
    def compute(others: dict[str, Any]) -> F32:
        with pi2.load(plan, set={**backend, "decode.batch": 2, **others}) as model:
            forward = model._parts.forward
            for place, prompt in enumerate(([5, 9, 33], [8, 3, 77, 60])):
                forward.prefill(np.array(prompt, np.int32), sequence=place)
            rows = [forward.step([10 + step, 20 + step], [0, 1]).copy() for step in range(3)]
        return np.array(rows)

    little = {"layers.hot": 0.0, **choose_cold(plan, 700)}
    np.testing.assert_array_equal(compute(little), compute({"layers.hot": 1.0}))


def test_closed_neurons_are_neither_computed_nor_read(plan: Path) -> None:
    settings = {
        **PROCESSOR,
        "layers.hot": 0.0,
        "cache.fill": False,
        "memory.segments.cold": "256 KiB",
    }
    read = {}
    for predictor in ("none", "gate"):
        with pi2.load(plan, set={**settings, "decode.predictor": predictor}) as model:
            loaded = model.stats
            model.logits(TOKENS[:1], mode="decode")
            done = model.stats - loaded
            read[predictor] = done.flash_read_bytes
        if predictor == "gate":
            open_share = 1.0 - sum(CUT.values()) / LAYERS
            assert done.predicted_share == pytest.approx(open_share, abs=0.05)
            assert done.active_share == done.predicted_share
    stride = load_plan(plan).bundle.stride
    assert read["none"] == LAYERS * NEURONS * stride
    assert read["gate"] == pytest.approx(open_share * read["none"], rel=0.08)


def test_gate_rows_of_layers_with_a_cutoff_are_kept_and_no_others(plan: Path) -> None:
    resolved = load_plan(plan)
    hidden = resolved.model.shape.stored_hidden
    assert resolved.named_layers == tuple(CUT) and resolved.whole_layers == (1, 4)
    assert resolved.needs.predictor.bytes == len(CUT) * NEURONS * hidden * 2


def test_guesses_cannot_leave_out_what_layers_without_a_cutoff_compute(plan: Path) -> None:
    with pytest.raises(UserError, match="P281") as caught:
        load_plan(plan, overrides={"decode.speculation": {"drafts": "resident"}})
    assert "every neuron computes in 2 layers" in str(caught.value)


@pytest.fixture(scope="module")
def planned() -> PlannedPlan:
    """The plan for the real shape, within two thirds of what all of it takes."""
    return make_plan(make_wish())


def make_wish(**changes: Any) -> Wish:
    """A limit for the shape of Gemma 3n E4B; ``changes`` of its FFN."""
    model = read_model("gemma-3n-e4b")
    device = read_device("cloud-vm-zen5")
    ffn = model.ffn.model_copy(update=changes)
    return Wish(
        device=device,
        model=model.model_copy(update={"ffn": ffn}),
        memory_bytes=2500 << 20,
        context=1024,
        exact=True,
    )


def test_planner_keeps_layers_first_that_compute_all_their_neurons(planned: PlannedPlan) -> None:
    resolved = planned.resolved
    assert resolved.plan.decode.predictor == "gate"
    hots = [layer.hot for layer in resolved.layers]
    assert max(hots[:10]) < min(hots[10:])
    without = make_plan(make_wish(gate_sparsity=()))
    assert without.resolved.plan.decode.predictor == "none"
    assert planned.cost.tokens_s > 1.1 * without.cost.tokens_s


def test_planner_and_simulator_know_which_share_is_open(planned: PlannedPlan) -> None:
    resolved = planned.resolved
    neurons = resolved.model.layer_neurons
    for number, (layer, cost) in enumerate(zip(resolved.layers, planned.cost.layers, strict=True)):
        if number < 10:
            assert cost.used == pytest.approx(0.05 * neurons, rel=1e-3)
            assert cost.missing < (1.0 - layer.hot) * cost.used
        else:
            assert cost.used == neurons
            assert cost.missing == pytest.approx((1.0 - layer.hot) * neurons)
            assert cost.predict_s == 0.0
    run = simulate(describe_plan(resolved), prompt_tokens=16, tokens=64, seed=1).decode
    used = sum(cost.used for cost in planned.cost.layers)
    missing = sum(cost.missing for cost in planned.cost.layers)
    assert run.active_neurons.mean() == pytest.approx(used, rel=0.02)
    assert run.missing_neurons.mean() == pytest.approx(missing, rel=0.05)
    assert run.token_s.mean() == pytest.approx(planned.cost.token_s, rel=0.1)
