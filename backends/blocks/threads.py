"""Threads that run programs: what `steps.ll` needs of the process."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from pi2.backends.blocks.libraries import open_library

_PATIENCE = 500
"""How often a thread looks for work before it sleeps."""


class Threads:
    """Workers of a library of its own: they end with `close`."""

    def __init__(self, library: Path, count: int, cores: Sequence[int] = ()) -> None:
        """Run on ``count`` threads, the caller's included; ``cores``: one for each."""
        self._library = open_library(library)
        self._run = self._library.pi2_blocks_run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._run.restype = None
        self.count = count
        since = self._library.pi2_blocks_start(count, _PATIENCE)
        self._workers = []
        for index in range(1, count):
            core = cores[index] if index < len(cores) else None
            worker = threading.Thread(target=self._work, args=(index, since, core), daemon=True)
            worker.start()
            self._workers.append(worker)

    def _work(self, index: int, since: int, core: int | None) -> None:
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        self._library.pi2_blocks_work(ctypes.c_int64(index), since)

    def run(self, program: int, begin: int, end: int) -> None:
        """Run instructions of the program at an address."""
        self._run(program, begin, end)

    def close(self) -> None:
        """End the workers."""
        if self._workers:
            self._library.pi2_blocks_stop()
            for worker in self._workers:
                worker.join()
            self._workers = []
