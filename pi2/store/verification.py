"""Checks every byte of a neuron store against its manifest."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pi2.caches import check_regular
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.progress import ByteProgress, Progress, ignore_progress
from pi2.store.files import check_pieces, hash_file
from pi2.store.manifest import DENSE_FILE, Column, Manifest, StoredFile, read_manifest


def verify_store(path: Path, progress: Progress = ignore_progress) -> list[Diagnostic]:
    """Hash every file and compare it with the manifest; a finding per bad file (P506, P507, P508,
    P510). `UserError` P501-P504 without a manifest."""
    manifest = read_manifest(path)
    total_bytes = sum(entry.bytes for entry in manifest.files)
    report = ByteProgress(progress, "verifying", total_bytes)
    return [
        finding
        for entry in manifest.files
        for finding in _check_file(path / entry.path, entry, manifest, report.add)
    ]


def check_entries(
    path: Path,
    entries: Iterable[StoredFile],
    advance: Callable[[int], None] = lambda count: None,
    *,
    hashed: bool = True,
) -> None:
    """Compare files with hashes, or, unless ``hashed``, with checks if they have some; `UserError`
    P506, P507 or P508 for all that differ."""
    findings = [
        finding
        for entry in entries
        for finding in _compare_hash(path / entry.path, entry, advance, hashed=hashed)
    ]
    if findings:
        raise UserError(tuple(findings), exit_code=2)


class HashCheck:
    """Compares files that are read as a whole with checks or hashes: small ones at once, large ones
    by a thread, unless their reader does."""

    def __init__(self, path: Path, manifest: Manifest, *, reader_compares: bool = False) -> None:
        """Check small files and begin with others; `UserError` P506-P508.  ``reader_compares``
        leaves out large ones."""
        self._stopped = threading.Event()
        whole = [entry for entry in manifest.files if entry.bundles_offset is None]
        large = [own for own in whole if own.path == DENSE_FILE or own.scales_offset is not None]
        check_entries(path, [own for own in whole if own not in large], hashed=False)
        left = [own for own in large if not reader_compares or own.checks is None]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pi2-hash")
        check = partial(check_entries, path, left, self._advance, hashed=False)
        self._result = self._thread.submit(check)

    def finish(self) -> None:
        """Wait for the rest; raises what the beginning does."""
        self._result.result()
        self.close()

    def close(self) -> None:
        self._stopped.set()
        self._thread.shutdown()

    def _advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise CancelledError


def _check_file(
    file: Path, entry: StoredFile, manifest: Manifest, advance: Callable[[int], None]
) -> Iterator[Diagnostic]:
    findings = list(_compare_hash(file, entry, advance))
    if findings:
        yield from findings
        return
    columns = dict(manifest.list_columns()).get(entry.path)
    if columns is None and entry.path != DENSE_FILE:
        return
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            start = source.read_buffer(1).address
            source.seek(0)
            opened = pa.ipc.open_file(source)
            if columns is None:
                problem = _compare_dense(opened, start, manifest)
            else:
                problem = _compare_columns(opened.get_batch(0), start, entry, columns)
    except (pa.ArrowException, LookupError, ValueError, OSError) as error:
        problem = f"Arrow cannot read it: {error}"
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
    except FileNotFoundError:
        yield report_file("P506", file, "it is missing")
    except OSError as error:
        yield report_file("P508", file, f"it cannot be read: {error.strerror}")


def _compare_columns(
    batch: Any, start: int, entry: StoredFile, wanted: Sequence[Column]
) -> str | None:
    """Compare columns of a file: how wide they are, and where they begin."""
    columns = [batch.column(own.name) for own in wanted]
    widths = [column.type.bit_width for column in columns]
    for own, column, width in zip(wanted, columns, widths, strict=True):
        if batch.num_rows != entry.rows or width != 8 * own.row_bytes:
            return f"its column {own.name} is not {entry.rows} rows of {own.row_bytes} bytes"
        offset = column.buffers()[1].address - start
        if offset != getattr(entry, own.key):
            return f"its column {own.name} begins at {offset}, the manifest says otherwise"
        if own.name == "neuron":
            original = np.sort(column.to_numpy())
            if not np.array_equal(original, np.arange(len(original))):
                return "its original indices do not name every neuron once"
    return None


def _compare_dense(opened: Any, start: int, manifest: Manifest) -> str | None:
    found = []
    for number in range(opened.num_record_batches):
        columns = opened.get_batch(number).columns
        values = [column[0].as_py() for column in columns[:4]]
        # An empty buffer has no address.
        places = [
            column.buffers()[2].address - start if len(column[0].as_buffer()) else None
            for column in columns[4:]
        ]
        found.append((*values, *places))
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
