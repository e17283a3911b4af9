"""The compiled loops of the host do what `pi2.memory` does with numpy and Python."""

import functools
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.backends.host import HostLoops, load_host_loops
from pi2.backends.host.program import emit_compute_checks
from pi2.machine.cpu import detect_cpu
from pi2.memory import uring
from pi2.memory.budget import Budget
from pi2.memory.bundle_files import BundleFile
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, ReadSettings
from pi2.memory.host_loops import HostSpec, RingControl, choose_checks
from pi2.memory.io_engine import RunRead, make_batch, read_in_python
from pi2.memory.policy import expect_uses, unite_named
from pi2.memory.read_sieve import ReadSieve
from pi2.progress import ignore_progress
from tests.helpers.aarch64 import Emulated, generate, needs_emulator
from tests.helpers.kernels import allocate

LAYERS, NEURONS, HOT, COLD = 2, 200, 20, 60


@functools.cache
def make_loops() -> HostLoops:
    return load_host_loops(ignore_progress, frozenset(detect_cpu().features))


def make_cache(filled: bool) -> NeuronCache:
    arena = np.zeros((LAYERS * HOT + COLD, 8), np.uint8)
    expected = expect_uses(LAYERS, NEURONS)
    cache = NeuronCache(arena, [HOT] * LAYERS, NEURONS, policy="lfu", expected=expected)
    for _ in cache.fill() if filled else ():
        pass
    return cache


def make_sieve(limits: tuple[float, float, float] | None) -> ReadSieve | None:
    """A sieve of a share that has come to a limit, a lower one beside reads, and an allowance."""
    if limits is None:
        return None
    least, beside, allowance = limits
    sieve = ReadSieve(0.0, share=0.01, neuron_bytes=8)
    sieve._margin, sieve._beside, sieve._allowance = least, beside, allowance
    sieve.limits = sieve._make_limits()
    return sieve


indices = st.sets(st.integers(0, NEURONS - 1), max_size=COLD).map(sorted)


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, LAYERS - 1), indices), max_size=40),
    filled=st.booleans(),
    forgotten=st.sets(st.integers(0, 39)),
    limits=st.none() | st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 20.0)),
)
def test_a_compiled_look_up_finds_and_evicts_what_numpy_does(
    requests: list[tuple[int, list[int]]],
    filled: bool,
    forgotten: set[int],
    limits: tuple[float, float, float] | None,
) -> None:
    scores = np.random.default_rng(0).random(NEURONS).astype(np.float32)
    plain_sieve, compiled_sieve = make_sieve(limits), make_sieve(limits)
    plain, compiled = make_cache(filled), make_cache(filled)
    compiled.loops = make_loops()
    held = None
    for turn, (layer, wanted) in enumerate(requests):
        array = np.array(wanted, np.int32)
        expected = plain.look_up(layer, array, scores, plain_sieve)
        found = compiled.look_up(layer, array, scores, compiled_sieve)
        if plain_sieve is not None and compiled_sieve is not None:
            assert compiled_sieve.mass == pytest.approx(plain_sieve.mass)
            assert compiled_sieve.left_out == pytest.approx(plain_sieve.left_out)
        for name in ("resident_slots", "missing", "missing_slots", "cold", "rest"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert found.skipped == expected.skipped
        for cache in (plain, compiled):
            # What one request uses is held while the next one is looked up.
            if held is not None:
                cache.release(held)
            if turn in forgotten:
                cache.forget(layer, expected.missing)
            else:
                cache.hold(expected)
        held = None if turn in forgotten else expected
    assert np.array_equal(plain._slot_of, compiled._slot_of)
    assert np.array_equal(plain._owner, compiled._owner)
    assert plain.counters == compiled.counters
    for name in ("counts", "scores", "used_at", "candidates"):
        tables: Any = [cache._policy.tables for cache in (plain, compiled)]  # type: ignore[attr-defined]
        left, right = (getattr(own, name) for own in tables)
        assert np.array_equal(left, right), name


@settings(max_examples=40)
@given(wanted=st.sets(st.integers(0, 120)).map(sorted))
def test_compiled_read_lists_are_those_of_numpy(wanted: list[int]) -> None:
    array = np.array(wanted, np.int32)
    slots = np.arange(len(wanted), dtype=np.int32)[::-1].copy()
    place: dict[str, Any] = {"address": 1 << 40, "base": 4096, "stride": 7168}
    expected = make_batch(3, array, slots, **place)
    batch = make_batch(3, array, slots, **place, loops=make_loops())
    for name in ("vectors", "firsts", "counts", "offsets", "sizes", "requests", "results"):
        left, right = getattr(expected, name), getattr(batch, name)
        assert left.dtype == right.dtype and np.array_equal(left, right), name


def open_ring(tmp_path: Path, count: int, stride: int, loops: HostLoops | None) -> FlashReader:
    """A reader through io_uring of a layer whose neuron i has the bytes i."""
    content = np.repeat(np.arange(count, dtype=np.uint8), stride).reshape(count, stride)
    path = tmp_path / "layer.bin"
    path.write_bytes(bytes(4096) + content.tobytes())
    file = BundleFile(path=path, bundles_offset=4096, stride=stride, count=count)
    arena = Budget({"cold": 128 * stride}).allocate("cold", 128 * stride).reshape(-1, stride)
    reader = FlashReader([file], arena, ReadSettings(engine="io_uring", depth=4, cluster=8), loops)
    if reader.engine != "io_uring":
        pytest.skip(str(reader.engine_fallback))
    return reader


in_both_ways = pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "in Python"])


@in_both_ways
def test_rings_and_pools_go_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    # So small that names pass its end, and one batch needs a larger one.
    monkeypatch.setattr(uring, "_POOL", 64)
    reader = open_ring(tmp_path, 200, 512, make_loops() if is_compiled else None)
    arena, random = reader._arena, np.random.default_rng(0)
    for count in (20, 20, 20, 100, 7, 100, 60, 60, 60):
        wanted = np.sort(random.choice(200, count, replace=False)).astype(np.int32)
        slots = random.permutation(128)[:count].astype(np.int32)
        half = count // 2
        parts = [(wanted[:half], slots[:half]), (wanted[half:], slots[half:])]
        # Two are under way at once, and the later one is waited for first.
        under_way = [reader.start(0, *part) for part in parts]
        for pending in reversed(under_way):
            for number in range(len(pending.clusters)):
                reader.finish(pending, number)
        assert isinstance(reader._engine, uring.UringEngine)
        assert not reader._engine._jobs, "what is over is not looked through again"
        assert (arena[slots] == wanted[:, None]).all()
        arena[:] = 255
    reader.close()


def test_reads_are_planned_and_submitted_in_one_call(tmp_path: Path) -> None:
    reader = open_ring(tmp_path, 200, 512, make_loops())
    # Neighbours make fewer requests than there are bundles.
    wanted = np.array([3, 4, 5, 9, 20, 21, 60, *range(100, 120)], np.int32)
    slots = np.random.default_rng(0).permutation(128)[: len(wanted)].astype(np.int32)
    address = reader._arena.ctypes.data
    expected = make_batch(0, wanted, slots, address=address, base=4096, stride=512)
    for _ in range(2):
        pending = reader.start(0, wanted, slots)
        batch = pending.batch
        assert batch is not None
        for name in ("vectors", "firsts", "counts", "offsets", "sizes", "requests"):
            left, right = getattr(expected, name), getattr(batch, name)
            assert left.dtype == right.dtype and np.array_equal(left, right), name
        for number in range(len(pending.clusters)):
            reader.finish(pending, number)
        assert (reader._arena[slots] == wanted[:, None]).all()
        assert batch.results.tolist() == expected.sizes.tolist()
        reader._arena[:] = 255
    reader.close()


@in_both_ways
def test_what_is_given_up_before_it_was_handed_over_is_never_read(
    tmp_path: Path, is_compiled: bool
) -> None:
    reader = open_ring(tmp_path, 200, 512, make_loops() if is_compiled else None)
    arena = reader._arena
    first, second, third = (
        reader.start(0, np.arange(40, dtype=np.int32) * 2 + start, slots)
        for start, slots in enumerate(np.arange(120, dtype=np.int32).reshape(3, 40))
    )
    arena[40:80] = 255
    reader.abandon(second)
    # At most the depth of the queue was under way.
    assert (arena[40:80, 0] != 255).sum() <= 4
    for pending in (third, first):
        for number in range(len(pending.clusters)):
            reader.finish(pending, number)
    assert (arena[:40, 0] == np.arange(40) * 2).all()
    assert (arena[80:120, 0] == np.arange(40) * 2 + 2).all()
    assert (arena[40:80, 0] != 255).sum() <= 4
    reader.close()


def test_a_system_call_that_fails_is_told_by_its_error(tmp_path: Path) -> None:
    reader = open_ring(tmp_path, 10, 512, make_loops())
    ring = reader._engine._ring  # type: ignore[attr-defined]
    good = int(ring.control[RingControl.DESCRIPTOR])
    ring.control[RingControl.DESCRIPTOR] = ring._fd = os.open(tmp_path / "layer.bin", os.O_RDONLY)
    with pytest.raises(OSError, match=r"not supported|Bad file|Invalid"):
        reader.start(0, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
    os.close(ring._fd)
    ring.control[RingControl.DESCRIPTOR] = ring._fd = good
    reader.close()


@pytest.mark.parametrize(
    "read_runs",
    [lambda *arguments: make_loops().read_runs(*arguments), read_in_python],
    ids=["compiled", "in Python"],
)
def test_runs_are_read_by_several_threads_at_once(tmp_path: Path, read_runs: RunRead) -> None:
    stride = 448
    content = np.random.default_rng(0).integers(0, 256, (64, stride), np.uint8)
    path = tmp_path / "bundles"
    path.write_bytes(content.tobytes())
    arena = allocate("uint8", 60, stride)
    # Twenty requests, each for two neighbours that go to places far from each other.
    wanted = np.random.default_rng(1).permutation(62)[:20]
    slots = np.random.default_rng(2).permutation(60)[:40].reshape(20, 2)
    vectors = np.empty((40, 2), np.int64)
    vectors[:, 0] = arena.ctypes.data + slots.reshape(-1) * stride
    vectors[:, 1] = stride
    firsts = np.arange(0, 40, 2, dtype=np.int32)
    counts = np.full(20, 2, np.int32)
    offsets = (wanted * stride).astype(np.int64)
    # The last read begins inside the file and ends beyond it.
    offsets[-1] = 63 * stride + 100
    results = np.zeros(20, np.int64)
    fd = os.open(path, os.O_RDONLY)
    workers = [
        threading.Thread(
            target=read_runs,
            args=(fd, vectors, *(own[part] for own in (firsts, counts, offsets, results))),
        )
        for part in (slice(0, 7), slice(7, 14), slice(14, 20))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(fd)
    assert np.array_equal(arena[slots[:-1, 0]], content[wanted[:-1]])
    assert np.array_equal(arena[slots[:-1, 1]], content[wanted[:-1] + 1])
    assert (results[:-1] == 2 * stride).all()
    assert results[-1] == stride - 100
    read_runs(-1, vectors, firsts, counts, offsets, results)
    assert (results == -1).all()


@settings(max_examples=60)
@given(
    lists=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=64),
    neurons=st.integers(31, 40),
)
def test_named_neurons_are_united_as_numpy_does(lists: list[set[int]], neurons: int) -> None:
    own = [np.array(sorted(found), np.int32) for found in lists]
    united, named = unite_named(own, neurons, make_loops())
    expected, bits = unite_named(own, neurons, None)
    assert np.array_equal(united, expected) and united.dtype == np.int32
    assert np.array_equal(named, bits)
    assert united.tolist() == sorted(set().union(*lists))
    for number, found in enumerate(lists):
        assert {int(neuron) for neuron in np.flatnonzero((named >> number) & 1)} == found


@settings(max_examples=40)
@given(blocks=st.integers(1, 20), slots=st.lists(st.integers(0, 9), max_size=9), data=st.data())
def test_checks_are_those_of_zlib(blocks: int, slots: list[int], data: st.DataObject) -> None:
    stride = 64 * blocks
    content = data.draw(st.binary(min_size=64, max_size=64)) * blocks * 10
    arena = np.frombuffer(content, np.uint8).copy().reshape(10, stride)
    arena[:, -1] += np.arange(10, dtype=np.uint8)
    found = make_loops().compute_checks(arena, np.array(slots, np.int32))
    if choose_checks(frozenset(detect_cpu().features)) is None:
        assert found is None
    else:
        assert found is not None and found.tolist() == [zlib.crc32(arena[slot]) for slot in slots]


def test_strides_that_the_instructions_do_not_take_are_left_to_zlib() -> None:
    arena, slots = np.zeros((2, 72), np.uint8), np.zeros(1, np.int32)
    assert make_loops().compute_checks(arena, slots) is None
    assert load_host_loops(ignore_progress).compute_checks(arena[:, :64].copy(), slots) is None


def test_instructions_for_checks_are_chosen_where_they_are_certain() -> None:
    assert choose_checks({"sse4.2"}) is None
    assert choose_checks({"avx2", "fma"}) == "pclmulqdq"
    assert choose_checks({"neon"}) is None
    assert choose_checks({"neon", "dotprod"}) == "crc32x"
    assert HostSpec.from_json(HostSpec(checks="crc32x").to_json()).mattr == ("+crc",)


@needs_emulator
def test_checks_under_emulation_are_those_of_zlib(tmp_path: Path) -> None:
    arena = np.random.default_rng(0).integers(0, 256, (5, 192)).astype(np.uint8)
    slots, found = np.array([4, 0, 2], np.int32), np.zeros(3, np.uint32)
    emit = functools.partial(emit_compute_checks, "crc32x")
    spec = HostSpec(checks="crc32x")
    emulated = Emulated(
        generate(spec, "aarch64", "compute_checks", emit), "compute_checks", tmp_path
    )
    emulated(3, np.int64(192), arena, slots, np.zeros(256, np.uint32), found)
    assert found.tolist() == [zlib.crc32(arena[slot]) for slot in slots]
