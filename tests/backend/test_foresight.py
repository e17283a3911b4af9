"""Neurons of a layer to come are predicted, and the present layer is begun, in one call."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32, I32
from pi2.backends.cpu import backend as cpu
from pi2.backends.executor import Executor
from pi2.engine.feed_forward import FeedForward
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import count_reads
from pi2.orchestrator import load
from pi2.plan.documents.plan import Decode
from pi2.plan.weights.layout import Precision
from tests.helpers.kernels import DEMO_LIKE, RandomModel, make_loops
from tests.helpers.observed import count_calls
from tests.helpers.slow import keep_quick

pytestmark = pytest.mark.usefixtures("quick_kernels")


class InParts:
    """An executor that shows nobody that it foresees."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    foresees = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@pytest.mark.parametrize(
    ("tokens", "predictor"), keep_quick([(1, "int8"), (3, "int8"), (3, "fp16")], [(3, "fp16")])
)
def test_foreseeing_gives_the_bits_of_the_calls_that_it_stands_for(
    tokens: int, predictor: Precision
) -> None:
    model = RandomModel(**DEMO_LIKE, precision={"predictor": predictor})
    request = dataclasses.replace(
        model.request, looks_ahead=True, sequences=tokens, step_tokens=tokens
    )
    executor = cpu.build(request)
    assert executor.foresees
    every = np.arange(len(model.bundles[0]), dtype=np.int32)

    arena = np.zeros((8, 64), np.uint8)
    cache = NeuronCache(arena, [range(0)] * 2, len(every), make_loops())
    decode = Decode(predictor="low-rank", threshold=0.2, missing_threshold=0.2)
    reader = count_reads(arena, 2, cache.loops)

    def run(seen: Any) -> tuple[list[tuple[I32, F32]], F32]:
        assert seen.foresees == (seen is executor)
        own = FeedForward(seen, cache, reader, arena.reshape(2, 4, 64), layers=2, decode=decode)
        own.begin_step(tokens)
        ids = np.arange(5, 5 + tokens, dtype=np.int32)
        if tokens == 1:
            executor.embed(ids)
        else:
            executor.begin_step(ids, range(tokens), [0] * tokens)
        executor.attend(0, 0)
        own._predict_ahead(1, 0)
        found = []
        for token in own._waves.select_tokens():
            named, scores = own._read_foreseen(token)
            assert scores is not None
            found.append((named.copy(), scores[: len(every)].copy()))
        for _ in own._waves.select_tokens():
            executor.add_neurons(0, model.bundles[0], every)
        executor.end_ffn(0)
        return found, executor.logits(0).copy()

    (found, logits), (expected, expected_logits) = run(executor), run(InParts(executor))
    for (named, scores), (own, own_scores) in zip(found, expected, strict=True):
        assert 0 < len(named) < len(every)
        np.testing.assert_array_equal(named, own)
        np.testing.assert_array_equal(scores, own_scores)
    np.testing.assert_array_equal(logits, expected_logits)
    assert (logits != 0).any()
    executor.close()


@pytest.mark.parametrize("look_ahead", ["attention", "layer"])
def test_a_layer_beyond_memory_takes_few_calls(plan: Path, look_ahead: str) -> None:
    settings: dict[str, Any] = {"layers.hot": 0.25, "backends.cpu": "cpu", "cache.fill": False}
    # There is room for all of them; reads that begin a layer ahead are one cluster anyway.
    cluster = 2 if look_ahead == "layer" else 1 << 20
    settings |= {"pipeline.cluster": cluster, "memory.segments.cold": "1 MiB"}
    with load(plan, set={**settings, "decode.look_ahead": look_ahead}) as model:
        if model.io_engine != "io_uring" and look_ahead == "layer":
            pytest.skip("no io_uring: threads take a cluster each")
        parts = model._parts
        parts.forward.prefill(np.array([5, 6, 7], np.int32))
        calls = count_calls(parts.executor, lambda: parts.forward.decode(8))
        layers = len(model.plan.layers)
        assert all(own.misses > 0 for own in parts.cache.counters)
    # What is in memory, and what has arrived.
    assert calls["add_neurons"] == 2 * layers
    assert calls["predict_low_rank"] == layers
    # Before attention, the input of an FFN and the end of the layer before are calls of their own.
    # In addition to layers, embedding and head, the end of the last layer, and an early input.
    assert calls.total() - 5 <= {"attention": 10, "layer": 8}[look_ahead] * layers
