"""Fills a run's memory by reads of a MiB, checked while cached; memory is touched ahead."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from pi2.arrays import U8
from pi2.memory.io_engine import make_readers
from pi2.progress import ByteProgress, Progress

PIECE_BYTES = 1 << 20
"""About so many bytes are one read: fewer cost more processor time, more are not quicker."""
READERS = 4
"""Threads that read and compare."""
TOUCHERS = 2
"""Threads that touch memory, at most."""
WINDOW_BYTES = 8 << 20
"""Bytes that are touched at a time; a multiple of a huge page."""
LEAST_TOUCHED_BYTES = 64 << 20
"""Less is touched by the reads themselves."""
_PATIENCE_S = 0.1
"""Between two reports of progress."""
_PAGE = 4096
_POPULATE_WRITE = 23
"""Advice of madvise(2), since Linux 5.14: touch pages as a write does."""


@dataclass(frozen=True, slots=True)
class Job:
    """A read."""

    run: Callable[[], None]
    """Reads and compares, in any thread."""
    bytes: int
    target: U8 | None = None
    """Its target, if that is memory that has not been touched yet."""


@dataclass(slots=True, eq=False)
class _Window:
    first: int
    last: int
    """Addresses."""
    is_touched: threading.Event = field(default_factory=threading.Event)


class Batch:
    """Reads of a load that are waited for together."""

    def __init__(self, load: BulkLoad) -> None:
        self._load = load
        self.left = 0
        """Reads that are not over."""

    def keep(self, close: Callable[[], None]) -> None:
        """Call ``close`` when no read is under way any more."""
        self._load.keep(close)

    def add(self, jobs: Sequence[Job]) -> None:
        """Begin with reads, behind the earlier ones of any batch."""
        self._load.add(self, jobs)

    def finish(self) -> None:
        """Wait for the batch; raises what the first read of all that failed has raised."""
        self._load.finish(self)


class BulkLoad:
    """Reads of a load; one caller at a time."""

    def __init__(self, progress: Progress) -> None:
        """``progress`` is told the bytes and the rate of all reads, in the caller's thread."""
        self._progress = ByteProgress(progress, "loading weights")
        self._threads = make_readers(READERS, "pi2-load")
        self._touchers = make_readers(count_touchers(), "pi2-touch")
        self._change = threading.Condition()
        self._waiting: deque[tuple[Job, Batch]] = deque()
        self._working = 0
        self._error: BaseException | None = None
        self._is_closed = False
        self._windows: dict[int, _Window] = {}
        """By number: windows that are touched now, or have been."""
        self._untouched: deque[_Window] = deque()
        self._kept = ExitStack()
        self.total_bytes = 0
        """Bytes of all reads so far."""
        self._done_bytes = 0

    def keep(self, close: Callable[[], None]) -> None:
        """Call ``close`` when no read is under way any more."""
        self._kept.callback(close)

    def add(self, batch: Batch, jobs: Sequence[Job]) -> None:
        self._touch(job.target for job in jobs if job.target is not None)
        with self._change:
            batch.left += len(jobs)
            self._waiting.extend((job, batch) for job in jobs)
            self.total_bytes += sum(job.bytes for job in jobs)
            more = min(READERS - self._working, len(jobs))
            self._working += more
        for _ in range(more):
            self._threads.submit(self._work)

    def finish(self, batch: Batch) -> None:
        while True:
            with self._change:
                if batch.left and self._error is None:
                    self._change.wait(_PATIENCE_S)
                left, error = batch.left, self._error
            if error is not None:
                raise error
            self._report()
            if not left:
                return

    def _report(self) -> None:
        self._progress.total_bytes = self.total_bytes
        self._progress(self._done_bytes)

    def _work(self) -> None:
        while True:
            with self._change:
                if not self._waiting:
                    self._working -= 1
                    return
                job, batch = self._waiting.popleft()
            try:
                if job.target is not None:
                    self._await_touch(job.target)
                job.run()
            except BaseException as error:
                with self._change:
                    self._error = self._error or error
                    self._waiting.clear()
                    self._change.notify_all()
                continue
            with self._change:
                batch.left -= 1
                self._done_bytes += job.bytes
                if not batch.left:
                    self._change.notify_all()

    def _touch(self, targets: Iterable[U8]) -> None:
        stretches = join_neighbours(targets)
        if sum(last - first for first, last in stretches) < LEAST_TOUCHED_BYTES:
            return
        windows = []
        for first, last in stretches:
            for number in range(first // WINDOW_BYTES, -(-last // WINDOW_BYTES)):
                begin = max(first, number * WINDOW_BYTES) // _PAGE * _PAGE
                end = min(last, (number + 1) * WINDOW_BYTES)
                if number not in self._windows:
                    self._windows[number] = _Window(begin, end)
                    windows.append(self._windows[number])
        self._untouched.extend(windows)
        for _ in range(min(len(windows), count_touchers())):
            self._touchers.submit(self._touch_windows)

    def _touch_windows(self) -> None:
        while True:
            try:
                window = self._untouched.popleft()
            except IndexError:
                return
            if not self._is_closed:
                touch_memory(window.first, window.last - window.first)
            window.is_touched.set()

    def _await_touch(self, target: U8) -> None:
        first = target.ctypes.data
        for number in range(first // WINDOW_BYTES, -(-(first + target.nbytes) // WINDOW_BYTES)):
            window = self._windows.get(number)
            if window is not None:
                window.is_touched.wait()

    def close(self) -> None:
        """Forget reads that have not begun, wait for the rest, close the files; may be repeated."""
        self._is_closed = True
        with self._change:
            self._waiting.clear()
        self._touchers.shutdown()
        self._threads.shutdown()
        self._kept.close()


def count_touchers() -> int:
    """Threads that touch memory: no more than there are processors."""
    return min(TOUCHERS, os.cpu_count() or 1)


def join_neighbours(targets: Iterable[U8]) -> list[tuple[int, int]]:
    """Ranges of addresses, first and behind the last, with no gap between neighbouring targets."""
    stretches: list[tuple[int, int]] = []
    for target in targets:
        first, last = target.ctypes.data, target.ctypes.data + target.nbytes
        if stretches and stretches[-1][1] == first:
            stretches[-1] = (stretches[-1][0], last)
        else:
            stretches.append((first, last))
    return stretches


def touch_memory(address: int, size: int) -> None:
    """Touch pages from an address at the beginning of one, as a write does; if the system cannot,
    the first write touches them."""
    library = ctypes.CDLL(None)
    if hasattr(library, "madvise"):
        # ctypes lets go of Python's lock: reads go on.
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE)


def cut_rows(rows: int, row_bytes: int) -> Iterable[slice]:
    """Pieces of whole rows, of about `PIECE_BYTES` each."""
    step = max(1, PIECE_BYTES // row_bytes)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))
