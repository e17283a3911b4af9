"""Loads in bulk: reads of about a MiB, several at a time, straight into place."""

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.memory import bulk_load
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch, BulkLoad, Job
from pi2.progress import ignore_progress
from pi2.store.file_read import FileRead
from pi2.store.manifest import CHECKED_BYTES, StoredFile
from tests.helpers.patience import PATIENCE_S

MIB = CHECKED_BYTES


@pytest.fixture
def content() -> bytes:
    """A file whose last piece is a part of one, and of no whole block."""
    return np.random.default_rng(5).integers(0, 256, 5 * MIB + 1234, np.uint8).tobytes()


def describe(content: bytes) -> StoredFile:
    pieces = [content[start : start + MIB] for start in range(0, len(content), MIB)]
    checks = tuple(zlib.crc32(piece) for piece in pieces)
    return StoredFile(path="x.arrow", bytes=len(content), sha256="0" * 64, checks=checks)


def read(file: FileRead) -> None:
    load = BulkLoad(ignore_progress)
    batch = Batch(load)
    batch.keep(file.close)
    try:
        batch.add([Job(piece.run, piece.bytes, piece.target) for piece in file.list_pieces()])
        batch.finish()
    finally:
        load.close()


def allocate(size: int, spare: int) -> U8:
    return Budget({"attention": size}).allocate_spanning({"attention": size}, reserved_bytes=spare)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("least_touched", [0, 1 << 40])
def test_ranges_of_a_file_come_to_their_places(
    tmp_path: Path, content: bytes, direct: bool, least_touched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(bulk_load, "LEAST_TOUCHED_BYTES", least_touched)
    (tmp_path / "x.arrow").write_bytes(content)
    file = FileRead(tmp_path, describe(content), direct=direct)
    first = [(64, 2 * MIB), (2 * MIB + 640, 1000), (4 * MIB, MIB + 1234)]
    second = [(3 * MIB + 128, 300_000)]
    places = file.place(first, allocate, sum(size for _, size in first))
    places += file.place(second, allocate, 300_000)
    read(file)
    for (start, size), place in zip([*first, *second], places, strict=True):
        assert place.tobytes() == content[start : start + size]
        assert place.ctypes.data % 64 == start % 64


@pytest.mark.parametrize("place", [100, 2 * MIB + 5, 5 * MIB + 1200])
def test_a_damaged_byte_is_found_wherever_it_is(tmp_path: Path, content: bytes, place: int) -> None:
    damaged = bytearray(content)
    damaged[place] ^= 1
    (tmp_path / "x.arrow").write_bytes(damaged)
    file = FileRead(tmp_path, describe(content))
    file.place([(64, 1000)], allocate, 1000)
    with pytest.raises(UserError, match=r"P507.*x\.arrow.*checksum"):
        read(file)


def test_without_checks_only_what_is_wanted_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.arrow").write_bytes(content)
    file = FileRead(tmp_path, describe(content), verify=False)
    file.place([(MIB + 64, 1000)], allocate, 1000)
    assert [piece.bytes for piece in file.list_pieces()] == [MIB]
    file.close()


def test_a_file_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.arrow").write_bytes(content[:-1])
    with pytest.raises(UserError, match="P506"):
        FileRead(tmp_path, describe(content))


def test_the_first_failure_ends_a_load() -> None:
    load, begun = BulkLoad(ignore_progress), list[int]()

    def fail() -> None:
        begun.append(1)
        raise OSError("the disk is gone")

    batch = Batch(load)
    batch.add([Job(fail, 1)] * 1000)
    with pytest.raises(OSError, match="the disk is gone"):
        batch.finish()
    load.close()
    assert len(begun) <= bulk_load.READERS


def test_a_closed_load_waits_for_its_reads_and_then_closes_files() -> None:
    load, order = BulkLoad(ignore_progress), list[str]()
    begun = threading.Event()

    def run() -> None:
        begun.set()
        order.append("read")

    batch = Batch(load)
    batch.keep(lambda: order.append("closed"))
    batch.add([Job(run, 1)])
    begun.wait(PATIENCE_S)
    load.close()
    load.close()
    assert order == ["read", "closed"]
