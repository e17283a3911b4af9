"""The read bandwidth of the memory, measured in the same run as everything else."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self

import numpy as np

from pi2.measuring.contestant import Worker
from pi2.measuring.samples import Bandwidth

BUFFER_BYTES = 512 * 2**20
"""Size of the buffer that is read: far more than any cache."""
PASSES = 4

Reader = Callable[[], object]


class BandwidthMeter:
    """Reads a large buffer with all threads and does next to nothing with it."""

    def __init__(self, threads: int, size_bytes: int, _progress: object = None) -> None:
        self._threads = threads
        # Written once, so that every page is a page of its own.
        self._buffer = np.ones(size_bytes // 8, np.uint64)
        self._pool: ThreadPoolExecutor | None = None
        self._reader, self._method = self._choose_reader()
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

    def _choose_reader(self) -> tuple[Reader, str]:
        try:
            from pi2.measuring.read_kernel import CompiledReader

            return CompiledReader(self._buffer, threads=self._threads), "compiled sum"
        except ImportError:
            pool = self._pool = ThreadPoolExecutor(self._threads)
            parts = np.array_split(self._buffer, self._threads)
            # numpy gives the GIL back while it reduces.
            return lambda: list(pool.map(np.max, parts)), "numpy maximum"


class BandwidthLimit:
    """The caller's side of the meter: collects its measurements. A context manager."""

    def __init__(self, threads: int, *, size_bytes: int = BUFFER_BYTES) -> None:
        self._threads = threads
        self._worker = Worker(partial(BandwidthMeter, threads, size_bytes))
        self._method: str = self._worker.call("get_method")

    def measure(self) -> list[float]:
        """Read the buffer a few times; bytes per second of every pass."""
        speeds: list[float] = self._worker.call("measure")
        return speeds

    def summarise(self, speeds: list[float]) -> Bandwidth:
        return Bandwidth(
            bytes_s=statistics.median(speeds), threads=self._threads, method=self._method
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.close()
