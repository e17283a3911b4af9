"""Checks every byte of a neuron store against its manifest."""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pi2.caches import RECORD, check_regular
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.progress import ByteProgress, Progress, ignore_progress
from pi2.store.files import check_pieces, exchange_names, hash_file, sync_folder
from pi2.store.manifest import DENSE_FILE, MANIFEST, Manifest, StoredFile, read_manifest

JOURNAL = "journal.jsonl"
PART = ".part"
"""Ends the names of files that go on where they were, as the whole job does."""


class UnfinishedStore:
    """The partial folder of ``target``, held only by this process."""

    def __init__(self, target: Path, *, job: str, replace: bool) -> None:
        """Lock or make the folder; equal work shares the key ``job``.  `UserError` P521 to P523."""
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
            goes_on = bool(job) and self._read_job() == {"job": job}
            self.finished = self._read_journal() if goes_on else {}
            self._clear(keep=set(self.finished), parts=goes_on)
            self._write_journal(job)
        except OSError as error:
            self.abandon(keep=False)
            raise explain_os_error(error, self.folder) from None
        except UserError:
            self.abandon(keep=False)
            raise

    def record(self, entry: StoredFile) -> None:
        self.finished[entry.path] = entry
        self._append(entry.model_dump(mode="json"))

    def drop(self, beginning: str) -> None:
        """Delete the finished files whose paths have this ``beginning``, up to a folder's end."""
        for path in [path for path in self.finished if path.startswith(beginning)]:
            del self.finished[path]
        if (self.folder / beginning).exists():
            shutil.rmtree(self.folder / beginning)

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

    def _read_job(self) -> object:
        try:
            return json.loads((self.folder / JOURNAL).read_text().partition("\n")[0])
        except (FileNotFoundError, ValueError):
            return None

    def _read_journal(self) -> dict[str, StoredFile]:
        finished = {}
        for line in (self.folder / JOURNAL).read_text().splitlines()[1:]:
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


def explain_os_error(error: OSError, place: Path) -> UserError:
    """`UserError` P523: the system refuses to write (disk full, no permission, read-only)."""
    return UserError.of(
        "P523",
        f"cannot write {error.filename or place}: {error.strerror or error}",
        help="free disk space, or choose another output, which can be written",
    )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def verify_store(path: Path, progress: Progress = ignore_progress) -> list[Diagnostic]:
    """Hash every file and compare it with the manifest; a finding per bad file (P506, P507, P508,
    P510). `UserError` P501-P504 without a manifest."""
    manifest = read_manifest(path)
    total_bytes = sum(entry.bytes for entry in manifest.files)
    report, done_bytes = ByteProgress(progress, "verifying", total_bytes), 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        report(done_bytes)

    return [
        finding
        for entry in manifest.files
        for finding in _check_file(path / entry.path, entry, manifest, advance)
    ]


def check_file(path: Path, entry: StoredFile) -> None:
    """Hash one file; `UserError` P506, P507 or P508."""
    findings = list(_compare_hash(path / entry.path, entry, lambda count: None))
    if findings:
        raise UserError(tuple(findings), exit_code=2)


class HashCheck:
    """Compares files that are read as a whole with checks or hashes: small ones at once, large ones
    by a thread, unless their reader does."""

    def __init__(self, path: Path, manifest: Manifest, *, reader_compares: bool = False) -> None:
        """Check small files and begin with others; `UserError` P506-P508.  ``reader_compares``
        leaves out large ones."""
        self._path = path
        self._stopped = threading.Event()
        whole = [entry for entry in manifest.files if entry.bundles_offset is None]
        self._check([entry for entry in whole if not _is_large(entry)])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pi2-hash")
        large = [
            entry
            for entry in whole
            if _is_large(entry) and not (reader_compares and entry.checks is not None)
        ]
        self._result = self._thread.submit(self._check, large)

    def finish(self) -> None:
        """Wait for the rest; raises what the beginning does."""
        self._result.result()
        self.close()

    def close(self) -> None:
        self._stopped.set()
        self._thread.shutdown()

    def _check(self, entries: Sequence[StoredFile]) -> None:
        findings = [
            finding
            for entry in entries
            for finding in _compare_hash(
                self._path / entry.path, entry, self._advance, hashed=entry.checks is None
            )
        ]
        if findings:
            raise UserError(tuple(findings), exit_code=2)

    def _advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise CancelledError


def _is_large(entry: StoredFile) -> bool:
    return entry.path == DENSE_FILE or entry.scales_offset is not None


def _check_file(
    file: Path, entry: StoredFile, manifest: Manifest, advance: Callable[[int], None]
) -> Iterator[Diagnostic]:
    findings = list(_compare_hash(file, entry, advance))
    if findings:
        yield from findings
        return
    problem = None
    if entry.path == DENSE_FILE:
        problem = _compare_dense(file, manifest)
    elif entry.bundles_offset is not None or entry.scales_offset is not None:
        columns = {
            "bundle": (manifest.bundle.stride, entry.bundles_offset),
            "neuron": (None, entry.neurons_offset),
            "check": (None, entry.checks_offset),
            "scales": (manifest.bundle.layout.scales_stride, entry.scales_offset),
        }
        own = {name: column for name, column in columns.items() if column[1] is not None}
        problem = _compare_columns(file, entry.rows, own)
    if problem is not None:
        yield report_file("P510", file, problem)


def _compare_hash(
    file: Path, entry: StoredFile, advance: Callable[[int], None], *, hashed: bool = True
) -> Iterator[Diagnostic]:
    try:
        size = check_regular(file).st_size
        if size != entry.bytes:
            yield report_file("P506", file, f"it has {size} bytes instead of {entry.bytes}")
            return
        if not hashed and entry.checks is not None:
            if not check_pieces(file, entry.checks, advance):
                yield report_file("P507", file, "its contents have changed: a checksum differs")
        elif hash_file(file, advance) != entry.sha256:
            yield report_file("P507", file, "its contents have changed: the SHA-256 differs")
            return
    except FileNotFoundError:
        yield report_file("P506", file, "it is missing")
        return
    except OSError as error:
        yield report_file("P508", file, f"it cannot be read: {error.strerror}")


def _compare_columns(
    file: Path, rows: int | None, wanted: Mapping[str, tuple[int | None, int | None]]
) -> str | None:
    """Compare columns of a file: how wide they are, if they are bytes, and where they begin."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            start = source.read_buffer(1).address
            source.seek(0)
            batch = pa.ipc.open_file(source).get_batch(0)
            columns = {name: batch.column(name) for name in wanted}
    except (pa.ArrowException, KeyError, OSError) as error:
        return f"Arrow cannot read it: {error}"
    for name, (size, place) in wanted.items():
        kind = columns[name].type
        if batch.num_rows != rows or (size is not None and kind != pa.binary(size)):
            return f"its column {name} is not {rows} rows of {size} bytes"
        offset = columns[name].buffers()[1].address - start
        if offset != place:
            return f"its column {name} begins at {offset}, the manifest says otherwise"
    if "neuron" in columns:
        original = np.sort(columns["neuron"].to_numpy())
        if not np.array_equal(original, np.arange(len(original))):
            return "its original indices do not name every neuron once"
    return None


def _compare_dense(file: Path, manifest: Manifest) -> str | None:
    import pyarrow as pa

    found = []
    try:
        with pa.memory_map(str(file)) as source:
            start = source.read_buffer(1).address
            source.seek(0)
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                columns = reader.get_batch(number).columns
                values = [column[0].as_py() for column in columns[:4]]
                # An empty buffer has no address.
                places = [
                    column.buffers()[2].address - start if len(column[0].as_buffer()) else None
                    for column in columns[4:]
                ]
                found.append((*values, *places))
    except (pa.ArrowException, IndexError, OSError) as error:
        return f"Arrow cannot read it: {error}"
    listed = [
        (
            tensor.name,
            tensor.precision,
            tensor.rows,
            tensor.length,
            tensor.weights_offset,
            tensor.scales_offset if tensor.dense.row_scale_bytes else None,
        )
        for tensor in manifest.tensors
    ]
    return None if found == listed else "its tensors are not the manifest's"


def report_file(code: str, file: Path, problem: str) -> Diagnostic:
    return Diagnostic(
        code=code,
        message=f"{file.name}: {problem}",
        help="make the store again, or copy it again as a whole",
        span=Span(str(file), 1, 1, 1, 1),
    )
