"""The probe's tokens go through the engine as a run's do, and every call is noted."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pi2.probing import tokens as synthetic
from pi2.probing.steps import EXACT, GATES, USUAL, Probed, TokenSteps, Variety
from pi2.probing.tokens import TokenSample, TokenWork, average_most
from tests.helpers.kernels import make_loops

SIZES = synthetic.SMALL


class FakeExecutor:
    foresees = False

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.program = SimpleNamespace(expect=lambda end: None, ring=None)

    def select_chunk(self, number: int) -> None:
        pass

    def embed(self, tokens: Any) -> None:
        self.asked.append(("embed", len(tokens)))

    def attend(self, layer: int, position: int) -> None:
        self.asked.append(("attend", position))

    def begin_ffn(self, layer: int) -> None:
        self.asked.append(("begin_ffn", layer))

    def predict_low_rank(self, *arguments: Any) -> Any:
        self.asked.append(("predict", arguments[0]))
        return np.zeros(0, np.int32)

    predict_gate = predict_low_rank

    def add_neurons(self, layer: int, arena: Any, slots: Any, *rest: Any) -> None:
        self.asked.append(("add_neurons", (len(slots), bool(rest) and rest[0] is not None)))

    def end_ffn(self, layer: int) -> None:
        pass

    def logits(self, first: int) -> Any:
        self.asked.append(("logits", first))
        return np.zeros((1, SIZES.vocab), np.float32)

    def count_active(self) -> int:
        return 0


@pytest.fixture(scope="module")
def arena() -> Any:
    return np.zeros((SIZES.arena_neurons, 64), np.uint8)


def count(executor: FakeExecutor, name: str) -> dict[Any, int]:
    values = [value for call, value in executor.asked if call == name]
    return {value: values.count(value) for value in values}


def test_tokens_compute_what_each_work_says(arena: Any) -> None:
    executor = FakeExecutor()
    works = [TokenWork(position=0, named=16), TokenWork(position=256, named=64)]
    model = synthetic.make_model(SIZES)
    named: dict[str, Any] = {"predictor": "low-rank", "works": works, "loops": make_loops()}
    sample = TokenSample(executor, arena, model, **named)  # type: ignore[arg-type]
    times = sample.measure(0.0)
    layers = model.shape.layers
    tokens = count(executor, "logits")[0]
    assert tokens % 2 == 0, "every work as often as the others"
    assert count(executor, "attend") == {0: layers * tokens // 2, 256: layers * tokens // 2}
    assert count(executor, "add_neurons") == {
        (16, False): layers * tokens // 2,
        (64, False): layers * tokens // 2,
    }
    assert {name for name, _ in times.calls} >= {"attend", "add_neurons", "logits", "embed"}
    assert times.average("attend", position=256) != times.average("attend", position=0)


def test_gates_are_found_by_their_slots(arena: Any) -> None:
    executor = FakeExecutor()
    work = TokenWork(position=0, named=64)
    model = synthetic.make_model(SIZES)
    named: dict[str, Any] = {"predictor": "gate", "works": [work], "loops": make_loops()}
    sample = TokenSample(executor, arena, model, hot=0.5, **named)  # type: ignore[arg-type]
    times = sample.measure(0.0)
    assert set(count(executor, "add_neurons")) == {(64, True)}
    assert times.average("find") > 0.0
    assert 20 < sample.count_cached(64) < 44, "about half of them come from the cache"


@pytest.mark.parametrize("variety", [USUAL, GATES, EXACT])
def test_every_step_that_is_announced_is_measured(
    arena: Any, variety: Variety, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SERIES_S", "CACHED_S"):
        monkeypatch.setattr(f"pi2.probing.steps.{name}", 0.0)
    model = synthetic.make_model(SIZES)
    probed = Probed(model=model, sizes=SIZES, arena=arena, used_bytes=432, loops=make_loops())
    steps = TokenSteps(FakeExecutor(), probed, variety)  # type: ignore[arg-type]
    facts = steps.steps
    assert set(facts) == set(steps.measure())
    assert {(item.kv, item.activations) for item in facts} == {(variety.kv, variety.activations)}
    assert ("predict-gate" in {item.kernel for item in facts}) is variety.has_gates


def test_the_longest_times_are_others_work() -> None:
    assert average_most([1.0] * 19 + [1000.0]) == 1.0
    assert average_most([2.0]) == 2.0
