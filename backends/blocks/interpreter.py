"""Who runs a program: its `Interpreter`, here the one of compiled kernels."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from pi2.backends.blocks.contract import FIELDS, describe_libraries, list_libraries
from pi2.backends.compiler.cache import load_or_compile_several
from pi2.backends.compiler.functions import refuse_library
from pi2.backends.compiler.runtime import find_address, open_copy
from pi2.backends.protocol import ProgramRequest
from pi2.logging import get_logger
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType

_PATIENCE = 5000
"""How often a thread looks for work before it sleeps."""


class Interpreter(Protocol):
    """Runs programs; `close` may be called twice."""

    @property
    def lanes(self) -> int:
        """Rows of a panel, and 32-bit numbers of a register."""

    def find(self, kernel: str, own: str | None = None) -> int:
        """Return a program's number for a kernel, of the format ``own`` if it belongs to one."""

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        """Run instructions of the program at an address, with one thread if ``most`` is 1."""

    def close(self) -> None:
        """Give everything back."""


Interpret = Callable[[Model, list[str], KvType], Interpreter]
"""Makes the interpreter of a model whose tensors have some formats."""


class CompiledInterpreter:
    """Kernels of a model and of formats, on workers of its own."""

    def __init__(
        self, request: ProgramRequest, model: Model, formats: list[str], kv: KvType
    ) -> None:
        """Load kernels, compiled now unless they are cached."""
        shared = list_libraries(model, kv)
        names = [*shared, *formats]
        specs = describe_libraries(names, request.features, request.architecture)
        self.lanes = specs[0].isa.lanes
        steps, *paths = load_or_compile_several(specs, request.progress)
        loaded = dict(zip(names[1:], map(_open_library, paths), strict=True))
        self._shared = [loaded[name] for name in shared[1:]]
        self._formats = {name: loaded[name] for name in formats}
        self.find = cache(self._find)
        self.workers = Workers(steps, request.threads, request.cores)

    def _find(self, kernel: str, own: str | None = None) -> int:
        assert kernel in FIELDS
        libraries = self._shared if own is None else [self._formats[own]]
        function = next(getattr(item, kernel) for item in libraries if hasattr(item, kernel))
        return find_address(function)

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        self.workers.open().pi2_blocks_run(program, begin, end, most)

    def close(self) -> None:
        """End the workers."""
        self.workers.close()


class Workers:
    """Threads that run a program's instructions, and a library of their own."""

    def __init__(self, steps: Path, count: int, cores: Sequence[int] = ()) -> None:
        """``count`` threads, the caller's included, are bound to ``cores``."""
        self._steps, self._count, self._cores = steps, count, cores
        self._library: ctypes.CDLL | None = None
        self._threads: list[threading.Thread] = []

    def open(self) -> ctypes.CDLL:
        """Return the library; its first use starts the threads."""
        if self._library is not None:
            return self._library
        self._library = library = open_copy(self._steps, _open_library)
        library.pi2_blocks_run.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)
        ]
        library.pi2_blocks_run.restype = None
        since = library.pi2_blocks_start(self._count, _PATIENCE)
        for index in range(1, self._count):
            core = self._cores[index] if index < len(self._cores) else None
            own = (library, index, since, core)
            self._threads.append(threading.Thread(target=_work, args=own, daemon=True))
            self._threads[-1].start()
        return library

    def find_launcher(self) -> int:
        """Return the address of what computes parallel loops of other libraries until `close`."""
        return find_address(self.open().pi2_blocks_launch)

    def close(self) -> None:
        """End the threads, and give the library's memory and disk space back."""
        if self._library is None:
            return
        if self._threads:
            self._library.pi2_blocks_stop()
            for thread in self._threads:
                thread.join()
        _ctypes.dlclose(self._library._handle)
        self._library, self._threads = None, []


def _work(library: ctypes.CDLL, index: int, since: int, core: int | None) -> None:
    if core is not None and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:
            get_logger().warning("thread not bound", core=core, reason=error.strerror)
    library.pi2_blocks_work(ctypes.c_int64(index), since)


def _open_library(path: Path) -> ctypes.CDLL:
    """Load a library; `UserError` P655 if that is not possible."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise refuse_library(path, error) from None
