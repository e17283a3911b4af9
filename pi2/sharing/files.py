"""Files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pi2.diagnostics import UserError


def hash_bytes(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: a reader finds the old file or the new one, never a part.

    Raises `UserError` P003 where the system refuses.
    """
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError.of("P003", f"cannot be written: {reason}", file=str(path)) from None


def write_report(path: Path, text: str) -> None:
    """Write ``text`` to the file that ``path`` leads to, or into the pipe or terminal."""
    data = text.encode("utf-8", errors="surrogateescape")
    if os.path.isfile(path) or not os.path.exists(path):
        write_atomically(Path(os.path.realpath(path)), data)
        return
    try:
        with path.open("wb") as file:
            file.write(data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError.of("P003", f"cannot be written: {reason}", file=str(path)) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
