"""The cache: files by the SHA-256 of their bytes.

``blobs/<digest>/<file name>``: the digest says what the bytes are, the name says to pi2 and to
editors which kind of document it is.  Nothing in it is believed: every use hashes the bytes again.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pi2.diagnostics import UserError
from pi2.plan.toml.source import MAX_BYTES
from pi2.sharing.files import hash_bytes, write_atomically


@dataclass(frozen=True)
class Cache:
    """A folder of files that were fetched."""

    folder: Path

    def find_path(self, sha256: str, name: str) -> Path:
        """Path of the file in the cache, whether it exists or not."""
        assert len(sha256) == 64 and "/" not in name, (sha256, name)
        return self.folder / "blobs" / sha256 / name

    def add(self, data: bytes, name: str) -> Path:
        """Keep ``data``; a file that is there already stays if it is sound."""
        path = self.find_path(hash_bytes(data), name)
        if read_regular(path) != data:
            write_atomically(path, data)
        return path

    def read(self, sha256: str, name: str) -> bytes | None:
        """The bytes with this digest; None where they are not here.

        Raises `UserError` P713 where there are other bytes.
        """
        path = self.find_path(sha256, name)
        data = read_regular(path)
        if data is not None and hash_bytes(data) != sha256:
            raise report_tampering(path, sha256)
        return data


def report_tampering(path: Path, sha256: str) -> UserError:
    """A file whose bytes are not those that were locked."""
    return UserError.of(
        "P713",
        f"{path} is not the file that was locked: its SHA-256 is not {sha256[:12]}…",
        help=f"delete {path}, then `pi2 profile add` fetches it again",
        file=str(path),
    )


def read_regular(path: Path) -> bytes | None:
    """Bytes of a regular file of bearable size; None where there is none, or another thing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            return file.read(MAX_BYTES + 1)
        except OSError:
            return None
