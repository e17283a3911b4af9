"""Stores whose scales lie beside the bundles: the same numbers, fewer bytes to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.store.reader import NeuronStore
from pi2.store.reordering import repack_store
from pi2.store.verification import verify_store
from tests.helpers.models import TinyModel, make_tiny
from tests.helpers.plans import write_plan
from tests.unit.test_engine_forward import TOKENS

INLINE, RESIDENT = 1536, 1024
"""Bytes of a bundle of int4 of width 672: 3 x (336 + 42), and 3 x 336, in whole blocks; two of them
hold the gate and the rest."""
SHAPE = {"hidden": 672, "ffn": 96, "layers": 2}
FEW = TOKENS[:6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A store ``tiny`` and beside it the same one with resident scales, ``apart``."""
    folder = tmp_path_factory.mktemp("scales")
    tiny = make_tiny(folder, {"shape": SHAPE, "ffn": {"activation": "relu"}})
    repack_store(tiny.store, scales="resident", output=folder / "apart")
    return tiny


def load(tiny: TinyModel, scales: str, settings: Mapping[str, Any]) -> LoadedModel:
    """Half of the neurons have no room; none is hot."""
    folder = tiny.store.parent
    plan = write_plan(folder, tiny, {"layers": {"hot": 0.0}, "pipeline": {"cluster": 8}})
    changes = {"memory.segments.cold": f"{96 * (INLINE if scales == 'inline' else RESIDENT)} B"}
    if scales == "resident":
        changes |= {"store": "apart", "bundle.stride": f"{RESIDENT} B", "bundle.scales": scales}
    return pi2.load(plan, set={**changes, **settings})


def test_bundles_are_smaller_by_their_scales(tiny: TinyModel) -> None:
    apart = tiny.store.parent / "apart"
    assert verify_store(apart) == []
    with NeuronStore.open(tiny.store) as inline, NeuronStore.open(apart) as resident:
        assert (inline.bundle.stride, resident.bundle.stride) == (INLINE, RESIDENT)
        for one, two in zip(inline.layers, resident.layers, strict=True):
            assert two.scales is not None and one.scales is None
            assert two.bytes < one.bytes
            joined = two.read_inline(slice(None))
            assert np.array_equal(
                joined[:, : inline.bundle.used_bytes], one.bundles[:, : inline.bundle.used_bytes]
            )


@pytest.mark.parametrize(
    ("predictor", "hot", "phases"),
    [("none", 0.5, 1), ("gate", 0.25, 1), ("low-rank", 0.125, 1), ("low-rank", 0.0, 2)],
)
def test_the_numbers_are_the_same(tiny: TinyModel, predictor: str, hot: float, phases: int) -> None:
    settings = {
        "decode.predictor": predictor,
        "layers.hot": hot,
        "pipeline.phases": phases,
        "cache.fill": phases == 1,
    }
    found = {}
    for scales in ("inline", "resident"):
        with load(tiny, scales, settings) as model:
            logits = [model.logits(FEW, mode="prefill"), model.logits(FEW, mode="decode")]
            found[scales] = np.stack(logits), model.stats
    assert np.array_equal(found["inline"][0], found["resident"][0])
    assert found["resident"][1].flash_read_bytes < found["inline"][1].flash_read_bytes
