"""Checks every byte of a neuron store against its manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.progress import Progress, ignore_progress
from pi2.regular_file import check_regular
from pi2.store.files import check_pieces, hash_file
from pi2.store.manifest import (
    DENSE_FILE,
    Manifest,
    StoredFile,
    read_manifest,
)


def verify_store(path: Path, progress: Progress = ignore_progress) -> list[Diagnostic]:
    """Hash every file and compare what an Arrow reader sees with the manifest.

    Returns one finding per bad file: P506 missing or of the wrong size, P507 other contents,
    P508 unreadable, P510 not the Arrow file that the manifest describes.  Raises `UserError`
    P501-P504 if there is no manifest to compare with.
    """
    manifest = read_manifest(path)
    total_bytes = max(1, sum(entry.bytes for entry in manifest.files))
    done_bytes = 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        progress("verifying", min(1.0, done_bytes / total_bytes))

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
    """Compares files that are read as a whole with their checks, or else their hashes: all but
    those of layers, whose neurons have checks of their own.

    Small ones at once, so that nobody reads a damaged one; tensors and scales, which are hundreds
    of MiB, by a thread, while they and the neurons are loaded, unless whoever reads them compares
    what has been read.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        reader_compares: bool = False,
    ) -> None:
        """Hash the small files and begin with the others; `UserError` P506, P507 or P508 with a
        finding for every bad small file.

        ``reader_compares``: large files that have checks are left to whoever reads them
        (`pi2.store.file_read`).
        """
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
        """Stop where it is."""
        self._stopped.set()
        self._thread.shutdown()

    def _check(self, entries: Sequence[StoredFile]) -> None:
        findings = [
            finding
            for entry in entries
            for finding in _compare_contents(self._path / entry.path, entry, self._advance)
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
    elif entry.bundles_offset is not None:
        problem = _compare_layer(file, entry, manifest.bundle.stride)
    elif entry.scales_offset is not None:
        size = manifest.bundle.layout.scales_stride
        problem = _compare_rows(file, entry, "scales", size, entry.scales_offset)
    if problem is not None:
        yield report_file("P510", file, problem)


def _compare_contents(
    file: Path, entry: StoredFile, advance: Callable[[int], None]
) -> Iterator[Diagnostic]:
    """Compare a file with its checks, with its hash where it has none."""
    yield from _compare_hash(file, entry, advance, hashed=entry.checks is None)


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


def _compare_layer(file: Path, entry: StoredFile, stride: int) -> str | None:
    """Compare the columns that Arrow finds with the manifest's offsets."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            start = source.read_buffer(1).address
            source.seek(0)
            batch = pa.ipc.open_file(source).get_batch(0)
            columns = {name: batch.column(name) for name in ("bundle", "neuron", "check")}
    except (pa.ArrowException, KeyError, OSError) as error:
        return f"Arrow cannot read it: {error}"
    if columns["bundle"].type != pa.binary(stride) or batch.num_rows != entry.rows:
        return f"it is not {entry.rows} bundles of {stride} bytes"
    offsets = tuple(column.buffers()[1].address - start for column in columns.values())
    if offsets != (entry.bundles_offset, entry.neurons_offset, entry.checks_offset):
        return f"its columns begin at {offsets}, the manifest says otherwise"
    original = np.sort(columns["neuron"].to_numpy())
    if not np.array_equal(original, np.arange(len(original))):
        return "its original indices do not name every neuron once"
    return None


def _compare_rows(
    file: Path, entry: StoredFile, name: str, row_bytes: int, place: int
) -> str | None:
    """Compare the column that Arrow finds with the manifest's offset."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            start = source.read_buffer(1).address
            source.seek(0)
            batch = pa.ipc.open_file(source).get_batch(0)
            column = batch.column(name)
    except (pa.ArrowException, KeyError, OSError) as error:
        return f"Arrow cannot read it: {error}"
    if column.type != pa.binary(row_bytes) or batch.num_rows != entry.rows:
        return f"it is not {entry.rows} rows of {row_bytes} bytes"
    offset = column.buffers()[1].address - start
    if offset != place:
        return f"its rows begin at {offset}, the manifest says otherwise"
    return None


def _compare_dense(file: Path, manifest: Manifest) -> str | None:
    """Compare the tensors that Arrow finds with the manifest's."""
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
    return None if found == listed else "its tensors are not those of the manifest"


def report_file(code: str, file: Path, problem: str) -> Diagnostic:
    """Return the finding that a file of a store is not what it should be."""
    return Diagnostic(
        code=code,
        message=f"{file.name}: {problem}",
        help="make the store again, or copy it again as a whole",
        span=Span(str(file), 1, 1, 1, 1),
    )
