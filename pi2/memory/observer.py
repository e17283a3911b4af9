"""The one way to look at what a reader of neurons does."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.memory.flash import PendingRead
    from pi2.memory.requests import ReadBatch


class ReadObserver:
    """Is told by the reader that it observes; does nothing itself.

    Times are of `time.perf_counter`.  ``note_part`` and ``note_run`` are called by threads that
    read, all others by the reader's caller.
    """

    def note_start(self, pending: PendingRead, start_s: float) -> None:
        """Reads of neurons were begun, from ``start_s`` on."""

    def note_part(self, batch: ReadBatch, part: int, start_s: float, end_s: float) -> None:
        """A thread has read a part of a batch.  Engines without threads cannot tell."""

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        """The caller has waited for cluster ``number``, and has it."""

    def note_run(self, run: WatchedRun, start_s: float, end_s: float) -> None:
        """A run of neurons has been read since it was begun; `note_run_wait` comes later."""

    def note_run_wait(self, run: WatchedRun, start_s: float, end_s: float) -> None:
        """The caller has waited for a run, and has it."""


class WatchedRun(Future[None]):
    """A long read whose observer is told of its end, and of waiting for it."""

    def __init__(
        self, read: Future[None], layer: int, neurons: int, observer: ReadObserver
    ) -> None:
        super().__init__()
        self.layer = layer
        self.neurons = neurons
        self._read = read
        self._observer = observer
        self._start_s = time.perf_counter()
        read.add_done_callback(self._take)

    def cancel(self) -> bool:
        """Give the read up if it has not begun."""
        return self._read.cancel()

    def _take(self, read: Future[None]) -> None:
        """End as the read has ended, once the observer knows."""
        if read.cancelled():
            super().cancel()
            return
        self._observer.note_run(self, self._start_s, time.perf_counter())
        error = read.exception()
        if error is None:
            self.set_result(None)
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> None:
        """Wait for the read."""
        start_s = time.perf_counter()
        super().result(timeout)
        self._observer.note_run_wait(self, start_s, time.perf_counter())
