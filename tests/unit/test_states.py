"""Layers that keep a state: the same however the tokens came, and never another sequence's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.diagnostics import UserError
from tests.helpers.goldens import CPU, ROUNDING, make_golden_plan, measure_error
from tests.helpers.slow import keep_quick, mark_slow

NAMES = (
    *("qwen3-next", "granite-hybrid", "lfm2", "jamba", "nemotron-h-moe", "nemotron-h-blocks"),
    "kimi-linear",
)
"""A golden model of every kind of state, one with layers that have attention, too, or two states,
and one with layers that have three, no mixer, or no FFN."""


@pytest.fixture(scope="module", params=keep_quick(NAMES, NAMES[::2]))
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def delta_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden_plan("qwen3-next", tmp_path_factory.mktemp("delta"))


@pytest.fixture(scope="module", params=["qwen3-next", "nemotron-h-moe", "jamba"])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A golden model with experts, and its plan."""
    return request.param, make_golden_plan(request.param, tmp_path_factory.mktemp(request.param))


def draw_prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 96, count).tolist()


def compute(plan: Path, ids: list[int], changes: dict[str, Any], mode: Any = "prefill") -> F32:
    with pi2.load(plan, set=changes) as model:
        return model.logits(ids, mode=mode)


@pytest.mark.parametrize("backend", [mark_slow({}), CPU], ids=["reference", "cpu"])
def test_sequences_keep_states_of_their_own(
    mixture: tuple[str, Path], backend: dict[str, Any]
) -> None:
    """Three together, the second of which ends and makes room for another."""
    _, plan = mixture
    prompts = [draw_prompt(count, count) for count in (7, 3, 11, 5)]
    found: dict[int, list[F32]] = {number: [] for number in range(4)}
    with pi2.load(plan, set={**backend, "decode.batch": 3}) as model:
        forward = model._parts.forward
        places = {0: 0, 1: 1, 2: 2}
        for number, place in places.items():
            forward.prefill(np.array(prompts[number], np.int32), sequence=place)
        for step in range(6):
            if step == 3:
                places = {0: 0, 3: 1, 2: 2}
                forward.reset(1)
                forward.prefill(np.array(prompts[3], np.int32), sequence=1)
            tokens = [10 * number + 3 + step for number in places]
            rows = forward.step(tokens, list(places.values()))
            for number, row in zip(places, rows, strict=True):
                found[number].append(row.copy())
    for number, logits in found.items():
        first = 3 if number == 3 else 0
        tokens = [10 * number + 3 + first + step for step in range(len(logits))]
        alone = compute(plan, [*prompts[number], *tokens], backend, "decode")
        assert measure_error(np.array(logits), alone[-len(logits) :]) <= ROUNDING, number


def test_an_interrupted_sequence_does_not_go_on(
    delta_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pi2.load(delta_plan) as model:
        forward, ids = model._parts.forward, np.array(draw_prompt(5, 5), np.int32)
        expected = forward.prefill(ids)
        with monkeypatch.context() as patch:
            patch.setattr(model._parts.executor, "end_ffn", interrupt)
            with pytest.raises(KeyboardInterrupt):
                forward.decode(4)
        with pytest.raises(UserError, match="P616"):
            forward.decode(4)
        forward.reset()
        np.testing.assert_array_equal(forward.prefill(ids), expected)


def interrupt(layer: int) -> None:
    if layer == 1:
        raise KeyboardInterrupt


@pytest.mark.parametrize("changes", [{"decode.batch": 2}, CPU], ids=["reference", "cpu"])
def test_the_segment_state_holds_what_is_counted(plan: Path, changes: dict[str, Any]) -> None:
    with pi2.load(plan, set=changes) as model:
        prompts = [[3, 4, 5], [6, 7]]
        assert model.generate_batch(
            prompts, max_tokens=3, ignore_eos=True
        ).result.rounds.whole.steps
        needs, used = model.plan.needs, model._parts.budget.used_bytes
        assert needs.state.bytes > 0
        assert used["state"] == needs.state.bytes
        for name, need in needs.items():
            assert name == "cold" or used[name] <= need.bytes, name
        assert used["attention"] >= 0.99 * needs.attention.bytes


def test_a_plan_without_room_for_states_is_refused(delta_plan: Path) -> None:
    with pytest.raises(UserError, match="segment state has 4 KiB and needs"):
        pi2.load(delta_plan, set={"memory.segments.state": "4 KiB"})
