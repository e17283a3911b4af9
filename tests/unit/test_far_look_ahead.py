"""Routers look two layers ahead while the drive has nothing to do, and no bit depends on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.arrays import F32, I32
from pi2.engine.statistics import RunStatistics
from tests.helpers.mixtures import SHAPE, make_mixture_plan
from tests.helpers.slow import keep_quick

TOKENS = [7, 100, 8, 290, 3, 3, 41, 250]
LAYERS, CHOSEN, FFN = 5, 2, 200
SETTINGS = {
    "decode.predictor": "router", "decode.look_ahead": "layer", "backends.cpu": "reference",
    "memory.budget": "2 GiB", "layers.hot": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"predictor": None, "shape": {**SHAPE, "layers": LAYERS}}
    return make_mixture_plan(tmp_path_factory.mktemp("deep"), "silu", changes)


def decode(plan: Path, experts: int, *, is_idle: bool) -> tuple[F32, list[set[int]], RunStatistics]:
    """Logits of single tokens, and which layers had been begun when a layer's FFN ended."""
    with pi2.load(plan) as model:
        stride = model._parts.resolved.bundle.stride
    cold = {"memory.segments.cold": f"{experts * FFN * stride} B"}
    begun: list[set[int]] = []
    with pi2.load(plan, set=SETTINGS | cold) as model:
        feed_forward: Any = model._parts.feed_forward
        reader: Any = model._parts.reader
        reader.is_idle = lambda: is_idle
        run = feed_forward.run_sparse

        def note(layer: int) -> None:
            run(layer)
            begun.append({later - layer for later in feed_forward._begun})

        feed_forward.run_sparse = note
        logits = model.logits(TOKENS, mode="decode")
        cache = model._parts.cache
        assert not cache._held.any() and cache.free_capacity == cache.cold_capacity
        return logits, begun, model.stats


@pytest.fixture(scope="module")
def whole(deep: Path) -> F32:
    """The logits with everything in memory."""
    with pi2.load(
        deep, set={key: SETTINGS[key] for key in ("decode.predictor", "backends.cpu")}
    ) as model:
        return model.logits(TOKENS, mode="decode")


@pytest.mark.parametrize("experts", [CHOSEN, CHOSEN + 1, 3 * CHOSEN, 8 * CHOSEN])
@pytest.mark.parametrize("is_idle", keep_quick([False, True], [False]))
def test_no_bit_depends_on_how_far_it_looks(
    deep: Path, whole: F32, experts: int, is_idle: bool
) -> None:
    logits, _, stats = decode(deep, experts, is_idle=is_idle)
    assert stats.cache_misses > 0
    np.testing.assert_array_equal(logits, whole)


def test_an_idle_drive_reads_for_two_layers(deep: Path) -> None:
    _, begun, _ = decode(deep, 8 * CHOSEN, is_idle=True)
    assert begun[:LAYERS] == [{1, 2}, {1, 2}, {1, 2}, {1}, set()]


def test_what_was_begun_for_a_layer_is_not_begun_again(deep: Path) -> None:
    with pi2.load(deep) as model:
        stride = model._parts.resolved.bundle.stride
    cold = {"memory.segments.cold": f"{8 * CHOSEN * FFN * stride} B"}
    read: list[tuple[int, int]] = []
    with pi2.load(deep, set=SETTINGS | cold | {"cache.fill": False}) as model:
        reader: Any = model._parts.reader
        start = reader.start

        def note(layer: int, indices: I32, slots: I32) -> Any:
            read.extend((layer, index) for index in indices.tolist())
            return start(layer, indices, slots)

        reader.start, reader.is_idle = note, lambda: True
        model.logits(TOKENS[:1], mode="decode")
    assert len(read) == len(set(read)) and len(read) >= LAYERS * CHOSEN
