"""The compiled loops of the host: the neuron cache, plans of reads, reads, checks."""

import functools
import os
import threading
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.backends.host import load_host_loops
from pi2.backends.host.program import emit_compute_checks, emit_loop
from pi2.machine.cpu import detect_cpu
from pi2.memory import uring
from pi2.memory.budget import Budget
from pi2.memory.bundle_files import BundleFile
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, ReadSettings
from pi2.memory.host_loops import HostSpec, RingControl, choose_checks
from pi2.memory.io_engine import MOST_BUNDLES, BundlePlaces, make_batch
from pi2.memory.policy import expect_uses
from pi2.memory.read_sieve import ReadSieve
from pi2.progress import ignore_progress
from tests.helpers.aarch64 import Emulated, generate, needs_emulator
from tests.helpers.kernels import allocate, make_loops

LAYERS, NEURONS, HOT, COLD = 2, 200, 20, 60


def make_cache(filled: bool = False) -> NeuronCache:
    arena = np.zeros((LAYERS * HOT + COLD, 8), np.uint8)
    expected = expect_uses(LAYERS, NEURONS)
    cache = NeuronCache(arena, [range(HOT)] * LAYERS, NEURONS, make_loops(), expected=expected)
    for _ in cache.fill() if filled else ():
        pass
    return cache


def make_sieve(limits: tuple[float, float, float]) -> ReadSieve:
    """A sieve of a share that has come to a limit, a lower one beside reads, and an allowance."""
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
    limits=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 20.0)),
)
def test_a_compiled_look_up_leaves_out_what_the_sieve_does(
    requests: list[tuple[int, list[int]]], filled: bool, limits: tuple[float, float, float]
) -> None:
    scores = np.random.default_rng(0).random(NEURONS).astype(np.float32)
    plain_sieve, compiled_sieve = make_sieve(limits), make_sieve(limits)
    plain, compiled = make_cache(filled), make_cache(filled)
    for layer, wanted in requests:
        array = np.array(wanted, np.int32)
        kept = plain.leave_out(layer, array, scores, plain_sieve)
        expected = plain.look_up(layer, kept)
        found = compiled.look_up(layer, array, scores, compiled_sieve)
        assert compiled_sieve.mass == pytest.approx(plain_sieve.mass)
        assert compiled_sieve.left_out == pytest.approx(plain_sieve.left_out)
        for name in ("resident_slots", "missing", "missing_slots", "cold", "rest"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
        assert found.skipped == len(array) - len(kept)
    assert plain.counters == compiled.counters


@settings(max_examples=40)
@given(wanted=st.sets(st.integers(0, 120)).map(sorted))
def test_neighbours_are_one_request(wanted: list[int]) -> None:
    slots = np.arange(len(wanted), dtype=np.int32)[::-1].copy()
    place: dict[str, Any] = {"address": 1 << 40, "base": 4096, "stride": 7168}
    batch = make_batch(3, np.array(wanted, np.int32), slots, make_loops(), BundlePlaces(**place))
    assert (batch.vectors[:, 0] == (1 << 40) + 7168 * slots.astype(np.int64)).all()
    assert (batch.vectors[:, 1] == 7168).all() and batch.counts.sum() == len(wanted)
    runs = [
        wanted[first : first + count]
        for first, count in zip(batch.firsts.tolist(), batch.counts.tolist(), strict=True)
    ]
    assert [key for run in runs for key in run] == wanted
    assert batch.requests.tolist() == [n for n, run in enumerate(runs) for _ in run]
    assert batch.offsets.tolist() == [4096 + 7168 * run[0] for run in runs]
    assert batch.sizes.tolist() == [7168 * len(run) for run in runs]
    for run, following in pairwise([*runs, [999]]):
        assert run == list(range(run[0], run[0] + len(run)))
        assert len(run) == MOST_BUNDLES or following[0] > run[-1] + 1


@settings(max_examples=40)
@given(wanted=st.sets(st.integers(0, 120)).map(sorted), gap=st.integers(0, 4))
def test_neurons_between_two_wanted_ones_are_read_and_thrown_away(
    wanted: list[int], gap: int
) -> None:
    slots = np.arange(len(wanted), dtype=np.int32)[::-1].copy()
    places = BundlePlaces(base=4096, stride=512, address=1 << 40, gap=gap, scratch=7)
    batch = make_batch(0, np.array(wanted, np.int32), slots, make_loops(), places)
    kept = []
    for request, first in enumerate(batch.firsts.tolist()):
        count, place = int(batch.counts[request]), (int(batch.offsets[request]) - 4096) // 512
        vectors = batch.vectors[first : first + count]
        assert count <= MOST_BUNDLES and batch.sizes[request] == vectors[:, 1].sum() == 512 * count
        for number, address in enumerate(vectors[:, 0].tolist()):
            if address != 7:
                kept.append((place + number, (address - (1 << 40)) // 512, request))
    assert kept == list(zip(wanted, slots.tolist(), batch.requests.tolist(), strict=True))


def open_ring(tmp_path: Path, count: int, stride: int) -> FlashReader:
    """A reader through io_uring of a layer whose neuron i has the bytes i."""
    content = np.repeat(np.arange(count, dtype=np.uint8), stride).reshape(count, stride)
    path = tmp_path / "layer.bin"
    path.write_bytes(bytes(4096) + content.tobytes())
    file = BundleFile(path=path, bundles_offset=4096, stride=stride, count=count)
    arena = Budget({"cold": 128 * stride}).allocate("cold", 128 * stride).reshape(-1, stride)
    reader = FlashReader(
        [file], arena, ReadSettings(engine="io_uring", depth=4, cluster=8), make_loops()
    )
    if reader.engine != "io_uring":
        pytest.skip(str(reader.engine_fallback))
    return reader


def test_rings_and_pools_go_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that names pass its end, and one batch needs a larger one.
    monkeypatch.setattr(uring, "_POOL", 64)
    reader = open_ring(tmp_path, 200, 512)
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
    reader = open_ring(tmp_path, 200, 512)
    # Neighbours make fewer requests than there are bundles.
    wanted = np.array([3, 4, 5, 9, 20, 21, 60, *range(100, 120)], np.int32)
    slots = np.random.default_rng(0).permutation(128)[: len(wanted)].astype(np.int32)
    address = reader._arena.ctypes.data
    place: dict[str, Any] = {"address": address, "base": 4096, "stride": 512}
    expected = make_batch(0, wanted, slots, make_loops(), BundlePlaces(**place))
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


def test_what_is_given_up_before_it_was_handed_over_is_never_read(tmp_path: Path) -> None:
    reader = open_ring(tmp_path, 200, 512)
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
    reader = open_ring(tmp_path, 10, 512)
    ring = reader._engine._ring  # type: ignore[attr-defined]
    good = int(ring.control[RingControl.DESCRIPTOR])
    ring.control[RingControl.DESCRIPTOR] = ring._fd = os.open(tmp_path / "layer.bin", os.O_RDONLY)
    with pytest.raises(OSError, match=r"not supported|Bad file|Invalid"):
        reader.start(0, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
    os.close(ring._fd)
    ring.control[RingControl.DESCRIPTOR] = ring._fd = good
    reader.close()


def test_runs_are_read_by_several_threads_at_once(tmp_path: Path) -> None:
    stride, read_runs = 448, make_loops().read_runs
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
def test_named_neurons_are_united(lists: list[set[int]], neurons: int) -> None:
    own = [np.array(sorted(found), np.int32) for found in lists]
    united, named = make_loops().unite_named(own, neurons)
    assert united.dtype == np.int32 and len(named) == neurons
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
    emit = functools.partial(
        emit_loop, "compute_checks", functools.partial(emit_compute_checks, "crc32x")
    )
    spec = HostSpec(checks="crc32x")
    emulated = Emulated(
        generate(spec, "aarch64", "compute_checks", emit), "compute_checks", tmp_path
    )
    emulated(3, np.int64(192), arena, slots, found, np.zeros(256, np.uint32))
    assert found.tolist() == [zlib.crc32(arena[slot]) for slot in slots]
