"""The folder in which a store is made: locked, journalled, renamed when complete.

``.NAME.partial`` lies beside the future store.  ``journal.jsonl`` in it begins with the key of
the job and then lists every finished file with its hash, so that the same job, started again
after a crash or Ctrl-C, keeps what is whole.  A folder of another job is thrown away.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi2.diagnostics import UserError
from pi2.store.files import exchange_names, hash_file, sync_folder
from pi2.store.manifest import MANIFEST, StoredFile

JOURNAL = "journal.jsonl"


class UnfinishedStore:
    """The partial folder of ``target``, held by this process alone."""

    def __init__(self, target: Path, *, job: str, replace: bool) -> None:
        """Lock (and make) the folder; ``job`` is a key that equal work shares, "" is never kept.

        Raises `UserError` P521 if ``target`` exists and may not be replaced, P522 if another
        process is writing the same store, P523 if the folder cannot be written.
        """
        # A link to a folder stands for the folder.
        self.target = Path(os.path.realpath(target))
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self._old = _name_old(self.target)
        self._replace = replace
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
            self.finished = self._read_journal(job) if job else {}
            self._clear(keep=set(self.finished))
            (self.folder / "layers").mkdir(exist_ok=True)
            self._write_journal(job)
        except OSError as error:
            self.abandon(keep=False)
            raise explain_os_error(error, self.folder) from None
        except UserError:
            self.abandon(keep=False)
            raise

    def record(self, entry: StoredFile) -> None:
        """Note that a file is complete and on the disk."""
        self.finished[entry.path] = entry
        self._append(entry.model_dump(mode="json"))

    def drop(self, beginning: str) -> None:
        """Delete the finished files whose paths have this ``beginning``, which ends a folder's
        name."""
        for path in [path for path in self.finished if path.startswith(beginning)]:
            del self.finished[path]
        if (self.folder / beginning).exists():
            shutil.rmtree(self.folder / beginning)

    def publish(self) -> None:
        """Make the folder, manifest included, the store."""
        (self.folder / JOURNAL).unlink()
        sync_folder(self.folder / "layers")
        sync_folder(self.folder)
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
        if self._old.exists():
            shutil.rmtree(self._old)

    def abandon(self, *, keep: bool) -> None:
        """Give up: remove the folder, or leave it for the next attempt."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _check_target(self) -> None:
        if not os.path.lexists(self.target) or _is_empty_folder(self.target):
            return
        if not (self.target / MANIFEST).is_file():
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

    def _read_journal(self, job: str) -> dict[str, StoredFile]:
        """Return the files of an earlier attempt at the same job that are still whole."""
        try:
            lines = (self.folder / JOURNAL).read_text().splitlines()
            if not lines or json.loads(lines[0]) != {"job": job}:
                return {}
        except (FileNotFoundError, ValueError):
            return {}
        finished = {}
        for line in lines[1:]:
            try:
                entry = StoredFile.model_validate_json(line)
            except ValidationError:
                break  # the line that a crash cut off
            path = self.folder / entry.path
            whole = path.is_file() and path.stat().st_size == entry.bytes
            if whole and hash_file(path) == entry.sha256:
                finished[entry.path] = entry
        return finished

    def _clear(self, *, keep: set[str]) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path.relative_to(self.folder).as_posix() not in keep:
                path.unlink()

    def _write_journal(self, job: str) -> None:
        self._append({"job": job})
        for entry in self.finished.values():
            self._append(entry.model_dump(mode="json"))

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


def explain_os_error(error: OSError, folder: Path) -> UserError:
    """`UserError` P523: the system refuses to write (disk full, no permission, read-only)."""
    return UserError.of(
        "P523",
        f"cannot write {error.filename or folder}: {error.strerror or error}",
        help="free disk space, or choose an output folder that can be written",
    )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
