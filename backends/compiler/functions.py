"""Compiled functions as tvm_ffi calls them, without the compiler; bundles have
`pi2.phone.replacements.functions` instead."""

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from pi2.backends.compiler.signature import Parameter
from pi2.caches import VARIABLE
from pi2.diagnostics import UserError

_ANY_CORE, _ONE_CORE_EACH = 1, -2
"""Affinity modes of TVM's thread pool."""
_SPIN_COUNT = "2000"
"""Spins of an idle thread before it sleeps: TVM's 300,000 keep a core from reading flash (2.8
instead of 4.0 tokens/s of a 7B)."""


_OF_NO_USE = frozenset({"torch", "ml_dtypes"})
"""Libraries that tvm_ffi imports wherever they are installed, for tensors that pi2 never passes:
180 MiB of PyTorch, and 2 of NumPy's further types, beyond any plan's budget."""


class _WithoutOthers:
    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Leave all other modules, and all other threads, to the finders that follow."""
        if name in _OF_NO_USE and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is of no use here", name=name)


def import_ffi() -> ModuleType:
    """Import tvm_ffi without PyTorch and ml_dtypes, unless the process has imported them."""
    finder = _WithoutOthers()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        sys.meta_path.remove(finder)


def find_obstacles() -> list[str]:
    """Return what keeps compiled functions from being called here."""
    obstacles = []
    if find_runtime_library() is None:
        obstacles.append("apache-tvm is not installed")
    if importlib.util.find_spec("tvm_ffi") is None:
        obstacles.append("apache-tvm-ffi is not installed")
    return obstacles


def find_runtime_library() -> Path | None:
    """Return libtvm_runtime of the installed TVM without importing it; None if there is none."""
    found = importlib.util.find_spec("tvm")
    if found is None or found.origin is None:
        return None
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    path = Path(found.origin).parent / "lib" / name
    return path if path.exists() else None


def _start_threads(count: int, cores: Sequence[int]) -> None:
    """Let functions of libraries that are loaded from now on run on ``count`` threads."""
    # The pool reads it when the runtime library starts it: it cannot be changed afterwards.
    os.environ["TVM_NUM_THREADS"] = str(count)
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPIN_COUNT)
    # The runtime library needs one that comes with tvm_ffi, and finds it where it is loaded.
    ffi = import_ffi()
    runtime = find_runtime_library()
    assert runtime is not None, "find_obstacles says so first"
    # Functions look the pool's up among the global symbols.
    ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    # Another executor of this process may have started the pool with another number.
    configure = ffi.get_global_func("runtime.config_threadpool")
    with _keep_cores():
        if cores:
            configure(_ONE_CORE_EACH, count, [str(core) for core in cores])
        else:
            configure(_ANY_CORE, count)


@contextmanager
def _keep_cores() -> Iterator[None]:
    """Give the calling thread its cores back: TVM binds it to as many as the pool has threads."""
    try:
        free = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    except OSError:  # a sandbox that forbids the question
        free = None
    yield
    if free is not None:
        os.sched_setaffinity(0, free)


def refuse_library(path: Path, error: Exception) -> UserError:
    return UserError.of(
        "P655",
        f"compiled kernels cannot be loaded from {path.parent}",
        help=f"set {VARIABLE} to a folder on a file system that runs code, or remove "
        f"{path.name}: it is compiled again",
        notes=[" ".join(str(error).split())[-300:]],
    )


class CompiledFunctions:
    """The functions of a library."""

    def __init__(self, path: Path, threads: int | None = None, cores: Sequence[int] = ()) -> None:
        """Load ``path``; parallel loops run on ``threads``, with the caller, bound to ``cores``."""
        if threads is not None:
            # A library looks for the pool when it is loaded.
            _start_threads(threads, cores)
        self._ffi = import_ffi()
        try:
            self._module = self._ffi.load_module(str(path))
        except (OSError, RuntimeError) as error:
            raise refuse_library(path, error) from None
        self._found: dict[str, Callable[..., object]] = {}

    def bind(
        self, name: str, tensors: Sequence[object], given: Sequence[Parameter]
    ) -> tuple[Callable[..., object], Sequence[object]]:
        """Return a function and its first arguments, the ones before ``given``; it then takes
        ``tensors`` (of `make_tensor`)."""
        function = self._found.get(name)
        if function is None:
            function = self._found[name] = self._module.get_function(name)
        return function, tensors

    def make_tensor(self, flat: npt.NDArray[Any]) -> object:
        """Return what functions take in the place of an array [n], which is not copied."""
        return self._ffi.from_dlpack(flat)

    def close(self) -> None:
        """Forget the functions; the pool of threads is the process's, and stays."""
        self._found.clear()
