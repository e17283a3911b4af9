"""Neurons in two reads: the gate first, up and down only where the gate is open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.memory.policy import PolicyName
from tests.helpers.models import TinyModel, make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.tables import in_table
from tests.unit.test_engine_forward import FP16, KV_ROUNDING, TOKENS, compute_error
from tests.unit.test_memory_flash import OBSTACLE
from tests.unit.test_trace import list_lanes, trace

STRIDE, GATE = 1536, 512
SHAPE = {"hidden": 256}
FEW = TOKENS[:6]


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    """Gate, up and down take a block of 512 bytes each; 96 neurons a layer, 64 cold slots."""
    return make_tiny(tmp_path, {**FP16, "shape": SHAPE})


def load(folder: Path, tiny: TinyModel, phases: int, **settings: Any) -> LoadedModel:
    """Nothing in memory at first; about half of the neurons are named."""
    plan = write_plan(folder, tiny, {"layers": {"hot": 0.0}, "pipeline": {"cluster": 8}})
    changes: Mapping[str, Any] = {"cache.fill": False, "io.engine": "pread", **settings}
    return pi2.load(plan, set={"pipeline.phases": phases, **changes})


def count_bytes(model: LoadedModel) -> int:
    return sum(layer.read_bytes for layer in model._parts.cache.counters)


@pytest.mark.parametrize(
    ("engine", "look_ahead"), [("pread", "none"), ("pread", "attention"), ("io_uring", "layer")]
)
def test_two_phases_compute_what_one_does_and_read_less(
    tmp_path: Path, tiny: TinyModel, engine: str, look_ahead: str
) -> None:
    if engine == "io_uring" and OBSTACLE:
        pytest.skip(OBSTACLE)
    settings = {"io.engine": engine, "decode.look_ahead": look_ahead}
    with load(tmp_path, tiny, 1, **settings) as model:
        expected = model.logits(FEW, mode="decode")
        one = model.stats
        assert one.gate_reads == one.flash_saved_bytes == 0
    with load(tmp_path, tiny, 2, **settings) as model:
        found = model.logits(FEW, mode="decode")
        two, cache = model.stats, model._parts.cache
        assert compute_error(found, expected) < KV_ROUNDING
        assert (two.predicted_neurons, two.active_neurons) == (
            one.predicted_neurons,
            one.active_neurons,
        )
        assert 0 < two.gate_reads <= two.cache_misses and two.flash_saved_bytes > 0
        assert two.flash_saved_bytes % (STRIDE - GATE) == 0
        # Every miss is one bundle, less what was not read of it.
        assert two.flash_read_bytes + two.flash_saved_bytes == two.cache_misses * STRIDE
        assert count_bytes(model) == two.flash_read_bytes
        assert cache.free_capacity == cache.cold_capacity, "nothing is held in the end"
    if look_ahead == "none":
        assert two.flash_read_bytes < one.flash_read_bytes


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_only_whole_neurons_stay_in_the_cache(
    tmp_path: Path, tiny: TinyModel, policy: PolicyName
) -> None:
    with load(tmp_path, tiny, 2, **{"cache.policy": policy}) as model:
        model.logits(FEW, mode="decode")
        cache, store, kept = model._parts.cache, model.store, 0
        for layer, stored in enumerate(store.layers):
            slots = cache.find_slots(layer, 0, cache.neurons)
            here = np.flatnonzero(slots >= 0)
            kept += len(here)
            data = np.fromfile(stored.path, np.uint8, offset=stored.bundles_offset)
            bundles = data[: cache.neurons * STRIDE].reshape(-1, STRIDE)
            assert np.array_equal(cache.arena[slots[here]], bundles[here])
        assert kept > 0


def test_with_checks_a_neuron_is_read_whole_the_first_time(tmp_path: Path, tiny: TinyModel) -> None:
    with load(tmp_path, tiny, 1) as model:
        expected = model.logits(FEW, mode="decode")
    with load(tmp_path, tiny, 2, **{"io.verify": "first-read"}) as model:
        assert compute_error(model.logits(FEW[:1], mode="decode"), expected[:1]) < KV_ROUNDING
        assert model.stats.gate_reads == 0
        assert compute_error(model.logits(FEW, mode="decode"), expected) < KV_ROUNDING
        assert model.stats.gate_reads > 0
        stored = model.store.layers[1]
    with stored.path.open("r+b") as file:
        for index in range(96):
            # In every gate of the layer: those that are closed are found out too.
            file.seek(stored.bundles_offset + index * STRIDE + 7)
            file.write(b"\xff")
    with load(tmp_path, tiny, 2, **{"io.verify": "first-read"}) as model:
        with pytest.raises(pi2.UserError, match="P511"):
            model.logits(FEW, mode="decode")


@pytest.mark.parametrize("look_ahead", ["none", "layer"])
def test_a_failure_between_the_phases_leaves_no_neuron_half_read(
    tmp_path: Path, tiny: TinyModel, look_ahead: str
) -> None:
    settings = {"decode.look_ahead": look_ahead}
    with load(tmp_path, tiny, 2, **settings) as model:
        expected = model.logits(FEW, mode="decode")
    with load(tmp_path, tiny, 2, **settings) as model:
        cache, engine = model._parts.cache, model._parts.reader._engine  # type: ignore[union-attr]
        submit, rests = engine.submit, []

        def fail_once(batch: Any) -> None:
            if batch.content == "rest":
                rests.append(batch)
                if len(rests) == 3:
                    raise KeyboardInterrupt
            submit(batch)

        engine.submit = fail_once
        with pytest.raises(KeyboardInterrupt):
            model.logits(FEW, mode="decode")
        assert cache.free_capacity == cache.cold_capacity, "nothing is held"
        assert compute_error(model.logits(FEW, mode="decode"), expected) < KV_ROUNDING


def test_reads_that_fail_are_repeated_in_either_phase(
    tmp_path: Path, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(tmp_path, tiny, 2) as model:
        expected = model.logits(FEW, mode="decode")
    with load(tmp_path, tiny, 2) as model:
        engine: Any = model._parts.reader._engine  # type: ignore[union-attr]
        read_runs, calls = engine._read_runs, []

        def fail_often(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) % 2:
                read_runs(*arguments)
            else:
                arguments[5][:] = -1

        monkeypatch.setattr(engine, "_read_runs", fail_often)
        assert compute_error(model.logits(FEW, mode="decode"), expected) < KV_ROUNDING
        assert len(calls) > 20


@in_table
def test_neurons_are_read_whole_where_a_gate_decides_nothing(
    tmp_path: Path, changes: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    tiny = make_tiny(tmp_path, {**FP16, "shape": SHAPE, **changes})
    with load(tmp_path, tiny, 2, **settings) as model:
        model.logits(FEW[:2], mode="decode")
        stats = model.stats
        assert stats.cache_misses > 0 and stats.gate_reads == stats.flash_saved_bytes == 0


def test_a_trace_shows_both_phases(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path, {**FP16, "shape": SHAPE})
    document = trace(
        tmp_path, "pipeline.phases=2", 'io.engine="pread"', "pipeline.cluster=8", tiny=tiny
    )
    lanes = list_lanes(document)
    calls = {name for _, _, name in lanes["driver"]}
    assert {"find_open 0", "find_open 2", "add_neurons 1"} <= calls
    reads = [name for lane in lanes if lane.startswith("read ") for _, _, name in lanes[lane]]
    assert any(name.endswith(" gates") for name in reads)
    assert any(name.endswith(" rest") for name in reads)
    saved = [e["args"]["left out"] for e in document["traceEvents"] if e["name"] == "bytes read"]
    assert 0 < saved[-1] == max(saved)
