"""Load compiled functions with tvm_ffi, and libtvm_runtime where they run on several threads: the
compiler is never imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8

ALIGNMENT = 64
"""Bytes; kernels assume it of every array that is not uint8."""

_ANY_CORE, _ONE_CORE_EACH = 1, -2
"""Affinity modes of TVM's thread pool."""
_SPIN_COUNT = "2000"
"""How often an idle thread looks for work before it sleeps.  TVM's own 300,000 keep a core from
reading flash for most of a millisecond: 2.8 instead of 4.0 tokens/s of a 7B with half of its
neurons on flash, and nothing is gained in memory."""

Kernel = Callable[..., object]


def find_runtime_library() -> Path | None:
    """Return libtvm_runtime of the installed TVM without importing it; None if there is none."""
    found = importlib.util.find_spec("tvm")
    if found is None or found.origin is None:
        return None
    name = "libtvm_runtime.dylib" if sys.platform == "darwin" else "libtvm_runtime.so"
    path = Path(found.origin).parent / "lib" / name
    return path if path.exists() else None


def start_threads(count: int, cores: Sequence[int] = ()) -> None:
    """Let functions of libraries run on ``count`` threads, the calling one included.

    ``cores``: one for each thread to be bound to, the first for the caller, who binds itself.
    """
    # The pool reads it when the runtime library starts it: it cannot be changed afterwards.
    os.environ["TVM_NUM_THREADS"] = str(count)
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPIN_COUNT)
    import tvm_ffi

    runtime = find_runtime_library()
    assert runtime is not None, "find_obstacles says so first"
    # Functions look the pool's up among the global symbols.
    ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    # Another executor of this process may have started the pool with another number.
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    if cores:
        configure(_ONE_CORE_EACH, count, [str(core) for core in cores])
    else:
        configure(_ANY_CORE, count)


class Library:
    """A compiled library and the tensors that are passed to it."""

    def __init__(self, path: Path) -> None:
        """Load ``path``; `start_threads` comes first where functions run on several threads."""
        import tvm_ffi

        self._ffi = tvm_ffi
        self._module = tvm_ffi.load_module(str(path))

    def find(self, name: str) -> Kernel:
        """Return a kernel."""
        kernel: Kernel = self._module.get_function(name)
        return kernel

    def wrap(self, array: npt.NDArray[Any]) -> Any:
        """Return the kernels' view of an array: flat, not copied, kept alive by the caller.

        Read-only arrays (a memory-mapped store) are passed too: no kernel writes to weights.
        """
        assert array.flags.c_contiguous, "kernels take contiguous arrays"
        assert array.dtype == np.uint8 or array.ctypes.data % ALIGNMENT == 0, "misaligned array"
        flat = array.reshape(-1)
        if not flat.flags.writeable:
            flat = _view_writeable(flat)
        return self._ffi.from_dlpack(flat)


def _view_writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same memory without the read-only mark, which DLPack cannot express."""
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    writeable: U8 = np.ctypeslib.as_array(raw)
    return writeable.view(array.dtype)
