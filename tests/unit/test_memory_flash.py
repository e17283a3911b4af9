"""Reads of bundles: the right bytes, or an error that says where; the same with every engine."""

import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from pi2.backends.host.ring import HAS_COMPLETIONS
from pi2.diagnostics import UserError
from pi2.memory import uring
from pi2.memory.budget import Budget
from pi2.memory.bundle_files import BundleFile
from pi2.memory.flash import FlashReader, PendingRead, ReadSettings
from pi2.memory.host_loops import RingControl
from pi2.memory.io_engine import PENDING, EngineName
from pi2.memory.uring import UringEngine
from tests.helpers.kernels import make_loops
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tables import in_table

STRIDE, COUNT, OFFSET = 512, 100, 4096


OBSTACLE = uring.find_refusal()
needs_ring = pytest.mark.skipif(OBSTACLE is not None, reason=f"io_uring: {OBSTACLE}")
ENGINES = [
    pytest.param(name, marks=needs_ring if name == "io_uring" else ())
    for name in get_args(EngineName)
]


@pytest.fixture
def file(tmp_path: Path) -> BundleFile:
    path = tmp_path / "ffn-000.arrow"
    bundles = np.repeat(np.arange(COUNT, dtype=np.uint8)[:, None], STRIDE, axis=1)
    path.write_bytes(bytes(OFFSET) + bundles.tobytes())
    checks = np.array([zlib.crc32(bundle) for bundle in bundles], np.uint32)
    return BundleFile(
        path=path, bundles_offset=OFFSET, stride=STRIDE, count=COUNT, bytes=OFFSET + COUNT * STRIDE,
        read_checks=lambda: checks,
    )  # fmt: skip


def open_reader(file: BundleFile, **settings: Any) -> FlashReader:
    arena = Budget({"cold": 64 * STRIDE}).allocate("cold", 64 * STRIDE).reshape(-1, STRIDE)
    return FlashReader([file], arena, ReadSettings(**{"cluster": 8, **settings}), make_loops())


def finish(reader: FlashReader, pending: PendingRead) -> list[int]:
    clusters = [reader.finish(pending, number) for number in range(len(pending.clusters))]
    return [int(slot) for slots in clusters for slot in slots]


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_each_bundle_lands_in_its_slot(
    file: BundleFile, engine: EngineName, gap: int, direct: bool
) -> None:
    reader = open_reader(file, engine=engine, merge_gap=gap, direct=direct, depth=4)
    assert reader.engine == engine
    random = np.random.default_rng(1)
    for _ in range(5):
        indices = np.sort(random.choice(COUNT, 48, replace=False)).astype(np.int32)
        slots = random.permutation(64)[: len(indices)].astype(np.int32)
        reader._arena[:] = 255
        assert finish(reader, reader.start(0, indices, slots)) == slots.tolist()
        assert (reader._arena[slots] == indices[:, None]).all()
        assert (reader._arena[np.setdiff1d(np.arange(64), slots)] == 255).all()
    reader.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_several_reads_may_be_under_way(file: BundleFile, engine: EngineName) -> None:
    reader = open_reader(file, engine=engine, depth=2, threads=2)
    first = reader.start(0, ids(1, 5, 9), ids(0, 1, 2))
    finish(reader, reader.start(0, ids(20, 30, 40, 50), ids(10, 11, 12, 13)))
    assert reader._arena[[10, 11, 12, 13], 0].tolist() == [20, 30, 40, 50]
    finish(reader, first)
    assert reader._arena[[0, 1, 2], 0].tolist() == [1, 5, 9]
    reader.close()


@needs_ring
@in_table
def test_reads_ahead_are_one_cluster_unless_something_waits_for_each(
    file: BundleFile, settings: dict[str, Any], clusters: int
) -> None:
    reader = open_reader(file, **{"engine": "io_uring", **settings})
    pending = reader.start(0, np.arange(0, 48, 2, dtype=np.int32), np.arange(24, dtype=np.int32))
    assert len(pending.clusters) == clusters
    assert finish(reader, pending) == list(range(24))
    reader.close()


@needs_ring
def test_reads_go_on_between_computations_without_anybody_waiting(file: BundleFile) -> None:
    reader = open_reader(file, engine="io_uring", depth=2)
    pending = reader.start(0, np.arange(0, 60, 2, dtype=np.int32), np.arange(30, dtype=np.int32))
    assert pending.batch is not None
    results, deadline = pending.batch.results, time.monotonic() + PATIENCE_S
    while np.count_nonzero(results == PENDING) > 2 and time.monotonic() < deadline:
        reader.advance()
    # Two at a time, and the last two are on their way.
    assert np.count_nonzero(results == PENDING) <= 2
    finish(reader, pending)
    assert reader._arena[:30, 0].tolist() == list(range(0, 60, 2))
    reader.close()


def test_nothing_of_an_abandoned_read_is_under_way(file: BundleFile) -> None:
    started, release, ended = threading.Event(), threading.Event(), []

    def slow(fd: int, vectors: Any, firsts: Any, *rest: Any) -> None:
        started.set()
        release.wait(PATIENCE_S)
        ended.append(len(firsts))

    reader = open_reader(file, threads=1, cluster=2)
    reader._engine._read_runs = slow  # type: ignore[attr-defined]
    pending = reader.start(0, np.arange(0, 80, 20, dtype=np.int32), np.arange(4, dtype=np.int32))
    assert started.wait(PATIENCE_S)
    threading.Timer(0.05, release.set).start()
    reader.abandon(pending)
    assert ended == [2], "the second cluster had not begun and never does"
    reader.close()
    assert ended == [2]


@needs_ring
@pytest.mark.parametrize("deferred", [True, False])
def test_another_thread_may_read_when_nothing_is_under_way(
    file: BundleFile, monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    if not deferred:
        # A kernel before Linux 6.1 refuses the flags.
        monkeypatch.setattr(uring, "_DEFERRED", 1 << 31)
    reader = open_reader(file, engine="io_uring", depth=2)
    assert reader.engine == "io_uring"

    def read(index: int) -> list[int]:
        finish(reader, reader.start(0, ids(index, index + 9), ids(1, 2)))
        return reader._arena[[1, 2], 0].tolist()

    with ThreadPoolExecutor(1) as other:
        for index in (5, 50):
            assert other.submit(read, index).result() == [index, index + 9]
            assert read(index + 1) == [index + 1, index + 10]
    reader.close()


@needs_ring
def test_a_flag_of_hidden_completions_that_stays_set_is_looked_at_once() -> None:
    # The kernel may set it after it has noted the last one: asking again would go on for ever.
    engine = UringEngine([], 4, make_loops())
    ring = engine._ring
    if not ring._is_deferred:
        pytest.skip("the kernel does not defer completions")
    ring.words[ring.control[RingControl.FLAGS]] |= HAS_COMPLETIONS
    engine._drive(0, 0)
    engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_abandoned_read_leaves_the_reader_usable(file: BundleFile, engine: EngineName) -> None:
    reader = open_reader(file, engine=engine, depth=2)
    reader.abandon(
        reader.start(0, np.arange(0, 60, 2, dtype=np.int32), np.arange(30, dtype=np.int32))
    )
    reader._arena[:] = 0
    finish(reader, reader.start(0, ids(77), ids(3)))
    assert reader._arena[:, 0].nonzero()[0].tolist() == [3]
    reader.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_cut_while_open_is_an_error_and_not_old_bytes(
    file: BundleFile, engine: EngineName
) -> None:
    reader = open_reader(file, engine=engine)
    os.truncate(file.path, OFFSET + 10 * STRIDE)
    pending = reader.start(0, ids(5, 20), ids(0, 1))
    with pytest.raises(UserError, match="ends too early") as caught:
        finish(reader, pending)
    assert caught.value.diagnostics[0].code == "P620"
    reader.close()


def test_a_file_replaced_while_open_is_read_to_its_end(file: BundleFile, tmp_path: Path) -> None:
    reader = open_reader(file)
    other = tmp_path / "other"
    other.write_bytes(bytes(OFFSET + COUNT * STRIDE))
    other.replace(file.path)
    finish(reader, reader.start(0, ids(5, 20), ids(0, 1)))
    assert reader._arena[:2, 0].tolist() == [5, 20]
    reader.close()


def test_a_failing_read_is_tried_again(file: BundleFile) -> None:
    calls = []

    def flaky(*arguments: Any) -> None:
        calls.append(arguments[0])
        arguments[5][:] = -1

    reader = open_reader(file)
    reader._engine._read_runs = flaky  # type: ignore[attr-defined]
    finish(reader, reader.start(0, ids(7), ids(2)))
    assert len(calls) == 1
    assert (reader._arena[2] == 7).all()
    reader.close()


def test_a_short_read_is_completed(file: BundleFile) -> None:
    def short(fd: int, vectors: Any, *rest: Any) -> None:
        rest[3][:] = 100

    reader = open_reader(file)
    reader._engine._read_runs = short  # type: ignore[attr-defined]
    finish(reader, reader.start(0, ids(7, 8), ids(2, 5)))
    assert (reader._arena[2] == 7).all()
    assert (reader._arena[5] == 8).all()
    reader.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_damage_is_found_at_the_first_read(file: BundleFile, engine: EngineName) -> None:
    with file.path.open("r+b") as opened:
        opened.seek(OFFSET + 20 * STRIDE + 100)
        opened.write(b"\xff")
    for verify in (False, True):
        reader = open_reader(file, engine=engine, verify=verify)
        finish(reader, reader.start(0, ids(5, 19), ids(0, 1)))
        if not verify:
            finish(reader, reader.start(0, ids(20), ids(2)))
        else:
            with pytest.raises(UserError, match=r"place 20 .* damaged") as caught:
                finish(reader, reader.start(0, ids(20), ids(2)))
            assert caught.value.diagnostics[0].code == "P511"
            with pytest.raises(UserError, match=r"place 20 .* damaged"):
                reader.load_run(0, 10, reader._arena[:20])
        reader.close()


def test_a_bundle_is_checked_once(file: BundleFile, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, loops = [], make_loops()
    check = loops.compute_checks

    def count(arena: np.ndarray, slots: np.ndarray) -> object:
        checked.extend(slots.tolist())
        return check(arena, slots)

    monkeypatch.setattr(loops, "compute_checks", count)
    reader = open_reader(file, verify=True)
    for _ in range(3):
        finish(reader, reader.start(0, ids(5, 19), ids(0, 1)))
        reader.load_run(0, 10, reader._arena[10:20])
    assert len(checked) == 2 + 9
    reader.close()


def test_damage_is_found_with_compiled_checks_and_read_again(file: BundleFile) -> None:
    asked = []

    class Loops:
        """Says of every neuron that it is another at first."""

        def compute_checks(self, arena: Any, slots: Any) -> Any:
            asked.append(len(slots))
            true = [zlib.crc32(arena[slot]) for slot in slots.tolist()]
            return np.array(true, np.uint32) + (1 if len(asked) == 1 else 0)

    reader = open_reader(file, verify=True)
    reader._checks._loops = Loops()  # type: ignore[union-attr]
    finish(reader, reader.start(0, ids(5, 19), ids(0, 1)))
    assert asked == [2, 2]
    finish(reader, reader.start(0, ids(5, 19), ids(0, 1)))
    assert asked == [2, 2], "compared once"
    reader.close()


def test_where_direct_reads_do_not_fit_the_reader_says_so(tmp_path: Path) -> None:
    path = tmp_path / "odd.arrow"
    path.write_bytes(bytes(range(200)) * 10)
    arena = Budget({"cold": 400}).allocate("cold", 400).reshape(-1, 100)
    odd = BundleFile(path=path, bundles_offset=0, stride=100, count=20)
    reader = FlashReader([odd], arena, ReadSettings(), make_loops())
    assert reader.fallback is not None
    finish(reader, reader.start(0, ids(1), ids(0)))
    assert reader._arena[0, 0] == 100
    reader.close()


def test_where_there_is_no_io_uring_the_reader_says_so(
    file: BundleFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A system call that no kernel has.
    monkeypatch.setattr(uring, "_SETUP", 4000)
    reader = open_reader(file, engine="io_uring")
    assert reader.engine == "pread"
    assert reader.engine_fallback == "the kernel has no io_uring"
    finish(reader, reader.start(0, ids(7), ids(2)))
    assert (reader._arena[2] == 7).all()
    reader.close()
