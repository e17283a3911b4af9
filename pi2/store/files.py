"""Files and folders that appear whole or not at all, and hashes of their contents."""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from pydantic import ValidationError

from pi2.arrays import Raw
from pi2.caches import RECORD, open_stream
from pi2.diagnostics import UserError
from pi2.store.manifest import CHECKED_BYTES, MANIFEST, StoredFile

JOURNAL = "journal.jsonl"
PART = ".part"
"""Ends the names of files that go on where they were, as the whole job does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are known when the file is laid out."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Places in a file, in bytes."""

    pieces: tuple[Piece, ...]
    size: int
    holes: tuple[tuple[int, ...], ...] = ()
    """Offsets of the contents that come later, by record batch or tensor."""


class PlacedFile:
    """A file whose contents come in any order; it gets its name when all of them are there."""

    def __init__(self, path: Path, plan: FilePlan, *, keeps: bool = False) -> None:
        """Begin the file, or go on with one of the same plan.  ``keeps``: settled contents stay
        for another attempt.  Raises `OSError`, as the methods do."""
        self._path, self._keeps = path, keeps
        self._part = path.with_name(f".{path.name}{PART}")
        self._journal = path.with_name(f".{path.name}.done{PART}")
        known = b"".join((str(plan.size).encode(), *(piece.data for piece in plan.pieces)))
        key = hashlib.sha256(known).hexdigest()
        self._done = self._read_journal(key) if keeps else set[int]()
        self._new: list[int] = []
        self._position = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._part.open("r+b" if self._done else "wb", 2**20)
        if self._done:
            return
        self._first = f"{key}\n"
        try:
            self._journal.unlink(missing_ok=True)
            for piece in plan.pieces:
                self.write(piece.offset, piece.data)
            self._stream.truncate(plan.size)
        except OSError:
            self.close()
            raise

    def _read_journal(self, key: str) -> set[int]:
        """Numbers of the contents that are there; what a crash has cut off has no line's end."""
        self._first = ""
        if not (self._part.is_file() and self._journal.is_file()):
            return set()
        first, *others = self._journal.read_text("utf-8").split("\n")[:-1] or [""]
        return {int(number) for number in others} if first == key else set()

    def has(self, number: int) -> bool:
        """Whether contents are there and settled, or marked since."""
        return number in self._done

    def write(self, offset: int, data: bytes | Raw) -> int:
        """Write bytes, or an array in C order; return the byte behind them."""
        if offset != self._position:
            self._stream.seek(offset)
        flat = data if isinstance(data, bytes) else np.ascontiguousarray(data).data
        self._position = offset + self._stream.write(flat)
        return self._position

    def mark(self, number: int) -> None:
        """Contents are written, and stay from the next `settle` on."""
        self._done.add(number)
        self._new.append(number)

    def settle(self) -> None:
        """Bring marked contents to the disk, for another attempt to go on from."""
        if not self._new:
            return
        self._sync()
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write(self._first + "".join(f"{number}\n" for number in self._new))
            journal.flush()
            os.fsync(journal.fileno())
        self._first = ""
        self._new.clear()

    def finish(self) -> None:
        """Bring the file to the disk, and give it its name."""
        self._sync()
        self._stream.close()
        os.replace(self._part, self._path)
        self._journal.unlink(missing_ok=True)

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """End here; without `finish` nothing but settled contents stay."""
        with suppress(OSError):  # a full disk has no room for contents that are given up
            self._stream.close()
        if not self._keeps:
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it to another disk, or one without links."""
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as given, target.open("wb") as made:
            shutil.copyfileobj(given, made, 1 << 24)
            made.flush()
            os.fsync(made.fileno())


def _read_pieces(path: Path) -> Iterator[memoryview]:
    """The contents of a file by `CHECKED_BYTES`, each in the place of the one before."""
    piece = memoryview(bytearray(CHECKED_BYTES))
    with open_stream(path) as file:
        while count := file.readinto(piece):
            yield piece[:count]


def hash_file(
    path: Path, advance: Callable[[int], None] = lambda count: None, checks: list[int] | None = None
) -> str:
    """SHA-256 of a file in hex; ``advance`` is called with the bytes of every piece read, and
    ``checks`` get its CRC-32."""
    digest = hashlib.sha256()
    for piece in _read_pieces(path):
        digest.update(piece)
        if checks is not None:
            checks.append(zlib.crc32(piece))
        advance(len(piece))
    return digest.hexdigest()


def check_pieces(
    path: Path, checks: Sequence[int], advance: Callable[[int], None] = lambda count: None
) -> bool:
    """Whether all pieces have the CRC-32 in ``checks``; three times as fast as SHA-256."""
    pieces = _read_pieces(path)
    for check in checks:
        piece = next(pieces, b"")
        if zlib.crc32(piece) != check:
            return False
        advance(len(piece))
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


class UnfinishedStore:
    """The partial folder of ``target``, held only by this process."""

    def __init__(
        self, target: Path, *, job: str, replace: bool, keeps_failed: bool = False
    ) -> None:
        """Lock or make the folder; equal work shares the key ``job``, and goes on after a kill or
        Ctrl-C, with ``keeps_failed`` after failures too.  `UserError` P521 to P523."""
        # A link to a folder stands for the folder.
        self.target = Path(os.path.realpath(target))
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self._old = _name_old(self.target)
        self._replace, self._keeps_failed = replace, keeps_failed
        self._is_open = True
        self._check_target()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise explain_os_error(error, self.folder) from None
        try:
            recover_replaced(self.target)
            # Another process may have finished this store while the lock was waited for.
            self._check_target()
            first, *others = self._read_journal()
            goes_on = bool(job) and first == json.dumps({"job": job})
            self.finished = self._list_finished(others) if goes_on else {}
            self._clear(keep=set(self.finished), parts=goes_on)
            self._append({"job": job})
            for entry in self.finished.values():
                self._append(entry.model_dump(mode="json"))
        except (OSError, UserError) as error:
            self._abandon(keep=False)
            if isinstance(error, OSError):
                raise explain_os_error(error, self.folder) from None
            raise

    def record(self, entry: StoredFile) -> None:
        self.finished[entry.path] = entry
        self._append(entry.model_dump(mode="json"))

    def publish(self) -> None:
        """Make the folder, manifest included, the store."""
        (self.folder / JOURNAL).unlink()
        for folder in (*filter(Path.is_dir, self.folder.iterdir()), self.folder):
            sync_folder(folder)
        if not self.target.exists() or _is_empty_folder(self.target):
            os.rename(self.folder, self.target)
        elif exchange_names(self.folder, self.target):
            # At no moment was there no store.
            os.rename(self.folder, self._old)
        else:
            os.rename(self.target, self._old)
            os.rename(self.folder, self.target)
        sync_folder(self.target.parent)
        os.close(self._lock)
        self._is_open = False
        if self._old.exists():
            shutil.rmtree(self._old)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_open:
            # An interrupted job can go on later; a failed one would, as a rule, fail again.
            keep = kind is not None and (self._keeps_failed or not issubclass(kind, Exception))
            has_parts = any(self.folder.rglob(f"*{PART}"))
            self._abandon(keep=keep and (bool(self.finished) or has_parts))
        if isinstance(error, OSError):
            raise explain_os_error(error, self.folder) from error

    def _abandon(self, *, keep: bool) -> None:
        """Give up: remove the folder, or leave it for the next attempt."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._is_open = False

    def _check_target(self) -> None:
        if not os.path.lexists(self.target) or _is_empty_folder(self.target):
            return
        if not any((self.target / name).is_file() for name in (MANIFEST, RECORD)):
            raise UserError.of(
                "P521",
                f"{self.target} exists and is not a neuron store",
                help="choose another output folder",
            )
        if not self._replace:
            raise UserError.of(
                "P521",
                f"there is a neuron store at {self.target} already",
                help="choose another output folder, remove it, or use --force",
            )

    def _take_lock(self) -> int:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        else:
            locked = self.folder.exists() and os.path.samestat(
                os.fstat(descriptor), self.folder.stat()
            )
        if not locked:
            os.close(descriptor)
            raise UserError.of("P522", f"another process is writing the neuron store {self.target}")
        return descriptor

    def _read_journal(self) -> list[str]:
        try:
            return (self.folder / JOURNAL).read_text().splitlines() or [""]
        except (FileNotFoundError, ValueError):
            return [""]

    def _list_finished(self, lines: list[str]) -> dict[str, StoredFile]:
        finished = {}
        for line in lines:
            try:
                entry = StoredFile.model_validate_json(line)
            except ValidationError:
                break  # the line that a crash cut off
            path = self.folder / entry.path
            whole = path.is_file() and path.stat().st_size == entry.bytes
            if whole and hash_file(path) == entry.sha256:
                finished[entry.path] = entry
        return finished

    def _clear(self, *, keep: set[str], parts: bool) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.folder).as_posix() not in keep and not (
                parts and path.suffix == PART
            ):
                path.unlink()

    def _append(self, fields: dict[str, Any]) -> None:
        with (self.folder / JOURNAL).open("a") as file:
            file.write(json.dumps(fields) + "\n")
            file.flush()
            os.fsync(file.fileno())


def recover_replaced(target: Path) -> None:
    """Finish or undo a replacement of the store ``target`` that a crash cut in two."""
    old = _name_old(target)
    if not old.exists():
        return
    if target.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, target)


def _name_old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def explain_os_error(error: OSError, place: Path) -> UserError:
    """`UserError` P523: the system refuses to write (disk full, no permission, read-only)."""
    return UserError.of(
        "P523",
        f"cannot write {error.filename or place}: {error.strerror or error}",
        help="free disk space, or choose another output, which can be written",
    )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
