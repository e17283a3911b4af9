"""Programs under test, and the read bandwidth of the memory that is measured in between."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pi2.backends.executor import ExecutorObserver
from pi2.diagnostics import UserError
from pi2.engine.accounts import TokenBytes
from pi2.engine.dense_shares import ShareObserver
from pi2.engine.opening import Parts
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.measuring.report import Bandwidth, Description, Sample, Workload
from pi2.memory.bundle_files import ReadObserver
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.memory.flash import PendingRead
    from pi2.memory.io_engine import ReadBatch


@dataclass(kw_only=True)
class Profile(ExecutorObserver, ReadObserver, ShareObserver):
    """Seconds of one run, in the thread that drives it; an observer that adds them up."""

    tokens: int = 0
    total_s: float = 0.0
    io_wait_s: float = 0.0
    """Waiting for weights to arrive."""
    unit_wait_s: float = 0.0
    """Waiting for units next to the executor."""
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Number and seconds of calls of compiled functions, or of the executor where it has none."""

    @property
    def kernels_s(self) -> float:
        return sum(seconds for _, seconds in self.calls.values())

    @property
    def python_s(self) -> float:
        return self.total_s - self.kernels_s - self.io_wait_s - self.unit_wait_s

    def note_kernel(self, name: str, layer: int | None, start_s: float, end_s: float) -> None:
        count, seconds = self.calls.get(name, (0, 0.0))
        self.calls[name] = (count + 1, seconds + end_s - start_s)

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        self.io_wait_s += end_s - start_s

    def note_reads(self, batch: ReadBatch, size: int, start_s: float, end_s: float) -> None:
        self.io_wait_s += end_s - start_s

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        self.unit_wait_s += end_s - start_s


@contextmanager
def observe_parts(
    parts: Parts,
    executor_observer: ExecutorObserver,
    read_observer: ReadObserver,
    share_observer: ShareObserver | None = None,
) -> Iterator[None]:
    """Observe executor, reader and units meanwhile; ordinary runs have no observers."""
    try:
        parts.model.observe(executor_observer)
        parts.reader.observe(read_observer)
        for unit in parts.units.values():
            unit.observe(share_observer)
        yield
    finally:
        parts.model.observe(None)
        parts.reader.observe(None)
        for unit in parts.units.values():
            unit.observe(None)


_STOP, _PEAK = "<stop>", "<peak>"
_PATIENCE_S = 20.0


Recipe = Callable[[Progress], Any]
"""Makes an object with a ``close`` in the new process, to which it is sent as a pickle."""


class Worker:
    """The caller's end.  Use it as a context manager; the process ends with it."""

    def __init__(
        self,
        recipe: Recipe,
        progress: Progress = ignore_progress,
        subject: str = "the measured process",
    ) -> None:
        """Start the process and make the object; raises its `UserError`, or RuntimeError."""
        context = multiprocessing.get_context("spawn")
        self._subject = subject
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, recipe), daemon=True)
        self._process.start()
        other.close()
        try:
            self._receive(progress)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the object, or of what is named before it; its errors, and its
        constructor's, are raised here."""
        self._pipe.send((name, *arguments))
        return self._receive(ignore_progress)

    def read_peak_rss_bytes(self) -> int:
        peak: int = self.call(_PEAK)
        return peak

    def close(self) -> None:
        if self._process.is_alive():
            try:
                self._pipe.send((_STOP,))
                self._process.join(timeout=_PATIENCE_S)
            except OSError:
                pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _receive(self, progress: Progress) -> Any:
        while True:
            try:
                kind, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                raise _explain_end(self._subject, self._process.exitcode) from None
            if kind == "progress":
                progress(*value)
            elif kind == "failure":
                raise value
            else:
                return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _explain_end(subject: str, code: int | None) -> UserError:
    """Finding P640: the process has ended without an answer."""
    how, advice = f"ended with {code}", None
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = f"was ended by {name}"
        if name == "SIGKILL":
            advice = "the system kills what takes too much memory"
        elif name in ("SIGSEGV", "SIGILL", "SIGABRT", "SIGFPE"):
            advice = f"{subject} crashed: measure without it, or with another build of it"
    return UserError.of("P640", f"{subject} {how}", help=advice)


def _end_with_caller() -> None:
    """End this process when its caller is killed; a call that takes minutes would not notice."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "a worker is somebody's"
    caller.join()
    os._exit(1)


def _serve(pipe: Connection, recipe: Recipe) -> None:
    """Make the object in this process and answer calls until told to stop."""
    made: Any = None
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        made = recipe(lambda label, share: pipe.send(("progress", (label, share))))
        pipe.send(("value", None))
        while True:
            name, *arguments = pipe.recv()
            if name == _STOP:
                break
            if name == _PEAK:
                pipe.send(("value", read_peak_rss_bytes()))
            else:
                pipe.send(("value", attrgetter(name)(made)(*arguments)))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        # The caller was interrupted too, or is gone: there is nobody to tell.
        pass
    except BaseException as error:
        if not isinstance(error, UserError):
            text = "".join(traceback.format_exception(error))
            error = RuntimeError(f"the measured process failed:\n{text}")
        try:
            pipe.send(("failure", error))
        except OSError:
            sys.exit(1)
    finally:
        if made is not None:
            made.close()


class RemoteContestant(Worker):
    def __init__(self, recipe: Recipe, progress: Progress, subject: str) -> None:
        super().__init__(recipe, progress, subject)
        try:
            self.description: Description = self.call("describe")
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> Sample:
        sample: Sample = self.call("run", workload)
        return sample

    def profile(self, workload: Workload) -> Profile | None:
        found: Profile | None = self.call("profile", workload)
        return found

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        found: TokenBytes | None = self.call("count_bytes", workload, active)
        return found


BUFFER_BYTES = 512 * 2**20
"""Size of the buffer that is read: far more than any cache."""
PASSES = 4


class BandwidthMeter:
    """Reads a large buffer with all threads and does next to nothing with it."""

    def __init__(self, threads: int, size_bytes: int, _progress: object = None) -> None:
        # Written once, so that every page is a page of its own.
        self._buffer = np.ones(size_bytes // 8, np.uint64)
        self._pool: ThreadPoolExecutor | None = None
        try:
            from pi2.measuring.read_kernel import CompiledReader

            self._reader: Callable[[], object] = CompiledReader(self._buffer, threads=threads)
            self._method = "compiled sum"
        except ImportError:
            pool = self._pool = ThreadPoolExecutor(threads)
            parts = np.array_split(self._buffer, threads)
            # numpy gives the GIL back while it reduces.
            self._reader, self._method = lambda: list(pool.map(np.max, parts)), "numpy maximum"
        self._reader()

    def get_method(self) -> str:
        """Name of what reads: a compiled kernel, or numpy."""
        return self._method

    def measure(self) -> list[float]:
        speeds = []
        for _ in range(PASSES):
            start = time.perf_counter()
            self._reader()
            speeds.append(self._buffer.nbytes / (time.perf_counter() - start))
        return speeds

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class BandwidthLimit(Worker):
    """The caller's side of the meter: collects its measurements."""

    def __init__(self, threads: int, *, size_bytes: int = BUFFER_BYTES) -> None:
        super().__init__(partial(BandwidthMeter, threads, size_bytes))
        self._threads, self._method = threads, str(self.call("get_method"))

    def measure(self) -> list[float]:
        """Read the buffer a few times; bytes per second of every pass."""
        speeds: list[float] = self.call("measure")
        return speeds

    def summarise(self, speeds: list[float]) -> Bandwidth:
        return Bandwidth(
            bytes_s=statistics.median(speeds), threads=self._threads, method=self._method
        )
