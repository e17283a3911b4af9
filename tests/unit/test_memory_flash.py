"""Reads of bundles: the right bytes, or an error that says where."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from pi2.backends.reference import ReferenceExecutor
from pi2.diagnostics import UserError
from pi2.memory.budget import Budget
from pi2.memory.flash import BundleFile, FlashReader, PendingRead, divide_clusters

STRIDE, COUNT, OFFSET = 512, 100, 4096


def read_bundles(fd, arena, slots, offsets, results, start, step) -> None:  # type: ignore[no-untyped-def]
    ReferenceExecutor.read_bundles(None, fd, arena, slots, offsets, results, start, step)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> BundleFile:
    path = tmp_path / "ffn-000.arrow"
    bundles = np.repeat(np.arange(COUNT, dtype=np.uint8)[:, None], STRIDE, axis=1)
    path.write_bytes(bytes(OFFSET) + bundles.tobytes())
    return BundleFile(path=path, bundles_offset=OFFSET, stride=STRIDE, count=COUNT)


def open_reader(
    file: BundleFile, *, direct: bool = True, threads: int = 4, cluster: int = 8
) -> FlashReader:
    arena = Budget({"cold": 64 * STRIDE}).allocate("cold", 64 * STRIDE).reshape(-1, STRIDE)
    return FlashReader(
        [file],
        arena,
        direct=direct,
        threads=threads,
        cluster=cluster,
        read_bundles=read_bundles,
    )


def finish(reader: FlashReader, pending: PendingRead) -> list[int]:
    """Slots in the order in which they may be computed."""
    clusters = [reader.finish(pending, number) for number in range(len(pending.clusters))]
    return [int(slot) for slots in clusters for slot in slots]


@pytest.mark.parametrize("direct", [True, False])
def test_each_bundle_lands_in_its_slot(file: BundleFile, direct: bool) -> None:
    reader = open_reader(file, direct=direct)
    indices = np.arange(3, 99, 3, dtype=np.int32)
    slots = np.random.default_rng(1).permutation(64)[: len(indices)].astype(np.int32)
    assert finish(reader, reader.start(0, indices, slots)) == slots.tolist()
    assert (reader._arena[slots] == indices[:, None]).all()
    assert reader.read_bytes == len(indices) * STRIDE
    reader.close()


@pytest.mark.parametrize(
    ("count", "size", "most", "lengths"),
    [
        (0, 8, 4, [0]),
        (7, 8, 4, [7]),
        (16, 8, 4, [8, 8]),
        (23, 8, 4, [11, 12]),
        (99, 8, 2, [49, 50]),
    ],
)
def test_clusters_are_even_and_no_smaller_than_asked(
    count: int, size: int, most: int, lengths: list[int]
) -> None:
    clusters = divide_clusters(count, size, most)
    assert [cluster.stop - cluster.start for cluster in clusters] == lengths
    assert [i for cluster in clusters for i in range(count)[cluster]] == list(range(count))


def test_nothing_of_an_abandoned_read_is_under_way(file: BundleFile) -> None:
    started, release, ended = threading.Event(), threading.Event(), []

    def slow(fd, arena, slots, offsets, results, start, step) -> None:  # type: ignore[no-untyped-def]
        started.set()
        release.wait(10)
        ended.append(len(slots))

    reader = open_reader(file, threads=1, cluster=2)
    reader._read_bundles = slow
    pending = reader.start(0, np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    assert started.wait(10)
    threading.Timer(0.05, release.set).start()
    reader.abandon(pending)
    assert ended == [2], "the second cluster had not begun and never does"
    reader.close()
    assert ended == [2]


def test_a_run_is_read_in_one_go(file: BundleFile) -> None:
    reader = open_reader(file)
    buffer = reader._arena[:40]
    reader.start_run(0, 50, buffer).result()
    assert (buffer[:, 0] == np.arange(50, 90)).all()
    reader.close()


def test_a_file_cut_while_open_is_an_error_and_not_old_bytes(file: BundleFile) -> None:
    reader = open_reader(file)
    os.truncate(file.path, OFFSET + 10 * STRIDE)
    pending = reader.start(0, np.array([5, 20], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(UserError, match="ends too early") as caught:
        finish(reader, pending)
    assert caught.value.diagnostics[0].code == "P620"
    reader.close()


def test_a_failing_read_is_tried_again(file: BundleFile) -> None:
    calls = []

    def flaky(fd, arena, slots, offsets, results, start, step) -> None:  # type: ignore[no-untyped-def]
        calls.append(start)
        results[start::step] = -1

    reader = open_reader(file)
    reader._read_bundles = flaky
    finish(reader, reader.start(0, np.array([7], np.int32), np.array([2], np.int32)))
    assert calls == [0]
    assert (reader._arena[2] == 7).all()
    reader.close()


def test_where_direct_reads_do_not_fit_the_reader_says_so(tmp_path: Path) -> None:
    path = tmp_path / "odd.arrow"
    path.write_bytes(bytes(range(200)) * 10)
    arena = Budget({"cold": 400}).allocate("cold", 400).reshape(-1, 100)
    odd = BundleFile(path=path, bundles_offset=0, stride=100, count=20)
    reader = FlashReader([odd], arena, direct=True, threads=1, cluster=1, read_bundles=read_bundles)
    assert reader.fallback is not None
    finish(reader, reader.start(0, np.array([1], np.int32), np.array([0], np.int32)))
    assert reader._arena[0, 0] == 100
    reader.close()


def test_a_missing_file_is_a_diagnostic(tmp_path: Path) -> None:
    gone = BundleFile(path=tmp_path / "none", bundles_offset=0, stride=512, count=1)
    with pytest.raises(UserError, match="cannot read neurons"):
        open_reader(gone)
