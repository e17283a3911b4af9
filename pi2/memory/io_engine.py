"""What an I/O engine is, and those that need no more than the usual system calls.

An engine takes a `ReadBatch`, reads, and writes results into it.  It does not retry and explains
nothing: `pi2.memory.flash` does.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Literal, Protocol

from pi2.arrays import I32, I64
from pi2.memory.requests import ReadBatch

EngineName = Literal["pread", "io_uring"]

NotePart = Callable[[ReadBatch, int, float, float], None]
"""Is told of every part that a thread has read: batch, number of the part, and from when to when
(`time.perf_counter`)."""

RunRead = Callable[[int, I64, I32, I32, I64, I64, int, int], None]
"""``HostLoops.read_runs`` of `pi2.backends.host.contract`."""


class IoEngine(Protocol):
    """Reads batches.  One caller at a time."""

    def submit(self, batch: ReadBatch) -> None:
        """Begin to read, part by part."""

    def advance(self) -> None:
        """Hand over what there is room for by now of what was submitted; never waits.

        Where an engine has no threads of its own, its caller does this now and then.
        """

    def is_idle(self) -> bool:
        """Whether nothing that was submitted is on its way; never waits."""

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        """Wait until part number ``part``, or ``count`` of them from it on, are over."""

    def abandon(self, batch: ReadBatch) -> None:
        """Wait until nothing of ``batch`` is under way; what has not begun never does."""

    def close(self) -> None:
        """Wait for what is on its way, and give threads and memory back."""


def make_readers(threads: int, name: str) -> ThreadPoolExecutor:
    """Threads that may run on every core that the caller may use now.

    They begin with their first job, when the caller may be bound to a core, and would be, too.
    """
    ask, put = (getattr(os, f"sched_{verb}affinity", None) for verb in ("get", "set"))
    if ask is None or put is None:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        free = ask(0)
    except OSError:  # a sandbox that forbids the question
        return ThreadPoolExecutor(threads, thread_name_prefix=name)

    def let_go() -> None:
        with suppress(OSError):
            put(0, free)

    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=let_go)


def read_in_python(
    fd: int,
    vectors: I64,
    firsts: I32,
    counts: I32,
    offsets: I64,
    results: I64,
    start: int,
    step: int,
) -> None:
    """Do what ``HostLoops.read_runs`` does, request by request in Python."""
    for i in range(start, len(firsts), step):
        buffers = [
            (ctypes.c_uint8 * size).from_address(address)
            for address, size in vectors[firsts[i] : firsts[i] + counts[i]].tolist()
        ]
        try:
            results[i] = os.preadv(fd, buffers, int(offsets[i]))
        except OSError:
            results[i] = -1


class PreadEngine:
    """Threads that issue reads one after the other, in compiled code."""

    def __init__(self, files: Sequence[int], threads: int, read_runs: RunRead) -> None:
        """``files``: descriptors."""
        self._files = files
        self._threads = threads
        self._read_runs = read_runs
        self._pool = make_readers(threads, "pi2-read")
        self._jobs: dict[int, list[Future[None]]] = {}
        self.note_part: NotePart | None = None

    def submit(self, batch: ReadBatch) -> None:
        """See `IoEngine`."""
        self._jobs[id(batch)] = [
            self._pool.submit(self._read, batch, number) for number in range(len(batch.parts))
        ]

    def _read(self, batch: ReadBatch, number: int) -> None:
        part, note = batch.parts[number], self.note_part
        start = time.perf_counter()
        self._read_runs(
            self._files[batch.file],
            batch.vectors,
            batch.firsts[part],
            batch.counts[part],
            batch.offsets[part],
            batch.results[part],
            0,
            1,
        )
        if note is not None:
            note(batch, number, start, time.perf_counter())

    def advance(self) -> None:
        """Its threads do."""

    def is_idle(self) -> bool:
        """See `IoEngine`."""
        return all(job.done() for jobs in self._jobs.values() for job in jobs)

    def wait(self, batch: ReadBatch, part: int, count: int = 1) -> None:
        """See `IoEngine`."""
        for job in self._jobs[id(batch)][part : part + count]:
            job.result()
        if part + count == len(batch.parts):
            del self._jobs[id(batch)]

    def abandon(self, batch: ReadBatch) -> None:
        """See `IoEngine`."""
        wait([job for job in self._jobs.pop(id(batch), []) if not job.cancel()])

    def close(self) -> None:
        """See `IoEngine`."""
        self._pool.shutdown()
