"""Files that are written once, in order, hashed on the way and brought to the disk."""

import ctypes
import errno
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from pi2.arrays import Raw
from pi2.caches import open_stream
from pi2.store.manifest import CHECKED_BYTES

_READ_BYTES = 2**20


class HashedFile:
    """A new file: ``write`` in order, ``seek_forward`` over gaps, ``close`` syncs; `OSError`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=2**20)
        self._hash = hashlib.sha256()
        self._checks: list[int] = []
        self.position = 0

    def write(self, data: bytes | Raw) -> None:
        """Append bytes, or an array's contents in C order."""
        flat = data if isinstance(data, bytes) else _flatten(data)
        self._file.write(flat)
        self._hash.update(flat)
        view, done = memoryview(flat), 0
        while done < len(flat):
            behind = self.position % CHECKED_BYTES
            if behind == 0:
                self._checks.append(0)
            piece = view[done : done + CHECKED_BYTES - behind]
            self._checks[-1] = zlib.crc32(piece, self._checks[-1])
            self.position += len(piece)
            done += len(piece)

    @property
    def checks(self) -> tuple[int, ...]:
        """CRC-32 of every `CHECKED_BYTES` that were written; the last one is of the rest."""
        return tuple(self._checks)

    def seek_forward(self, offset: int) -> None:
        """Append zeros up to ``offset``."""
        assert offset >= self.position, (offset, self.position)
        self.write(bytes(offset - self.position))

    def finish(self) -> str:
        """Bring everything to the disk; return the SHA-256 in hex."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _flatten(data: Raw) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def hash_file(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """SHA-256 of a file in hex; ``advance`` is called with the bytes of every piece read."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_READ_BYTES))
    with open_stream(path) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            advance(count)
    return digest.hexdigest()


def check_pieces(
    path: Path, checks: Sequence[int], advance: Callable[[int], None] = lambda count: None
) -> bool:
    """Whether all pieces have the CRC-32 in ``checks``; three times as fast as SHA-256."""
    piece = memoryview(bytearray(CHECKED_BYTES))
    with open_stream(path) as file:
        for check in checks:
            count = file.readinto(piece)
            if zlib.crc32(piece[:count]) != check:
                return False
            advance(count)
    return True


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two folders at once: neither is ever missing; False where the system or
    the file system cannot (renameat2 of Linux)."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(second))


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
