"""Load compiled functions with tvm_ffi, and libtvm_runtime where they run on several threads: the
compiler is never imported."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8
from pi2.backends.compiler.signature import Parameter, find_signatures, read_signatures

ALIGNMENT = 64
"""Bytes; kernels assume it of every array that is not uint8."""

_ANY_CORE, _ONE_CORE_EACH = 1, -2
"""Affinity modes of TVM's thread pool."""
_SPIN_COUNT = "2000"
"""How often an idle thread looks for work before it sleeps.  TVM's own 300,000 keep a core from
reading flash for most of a millisecond: 2.8 instead of 4.0 tokens/s of a 7B with half of its
neurons on flash, and nothing is gained in memory."""


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


@dataclass(frozen=True, slots=True)
class View:
    """What functions see of an array: flat, not copied, kept alive by whoever made the view."""

    tensor: Any
    """What a call takes in the array's place."""
    dtype: str
    size: int
    """Elements."""


class BoundCall(functools.partial[object]):
    """A function with its arrays: a call gives what is left, in the order that `Library.bind` was
    told.

    Arrays come first in a compiled function, so that a call is no more than that of a
    ``functools.partial``: no line of Python.
    """


class Library:
    """A compiled library, and calls of its functions."""

    def __init__(self, path: Path, sizes: Mapping[str, int] | None = None) -> None:
        """Load ``path``; `start_threads` comes first where functions run on several threads.

        ``sizes`` says what the symbols in shapes of parameters stand for: what arrays must have
        room for.
        """
        import tvm_ffi

        self._ffi = tvm_ffi
        self._module = tvm_ffi.load_module(str(path))
        self._sizes = dict(sizes or {})
        self.signatures = read_signatures(find_signatures(path).read_text())

    def bind(
        self,
        function: str,
        given: str,
        *arrays: Mapping[str, View],
        sizes: Mapping[str, int] | None = None,
    ) -> BoundCall:
        """Return a function with its arrays, each from the first of ``arrays`` that has its name.

        ``given``: names of what every call gives, in the order in which it does, such as
        ``"tokens position"``.  ``sizes`` count instead of the library's.  What is missing, has
        another type or too few elements is a programmer's mistake, and found here.
        """
        signature = self.signatures[function]
        names = [parameter.name for parameter in signature.given]
        assert given.split() == names, f"{function} is given {names}, not {given.split()}"
        lengths = self._sizes if sizes is None else {**self._sizes, **sizes}
        tensors = []
        for parameter in signature.bound:
            name = parameter.name
            view = next((pool[name] for pool in arrays if name in pool), None)
            assert view is not None, f"{function} needs an array {name}"
            fault = _find_fault(parameter, view, lengths)
            assert fault is None, f"{name} of {function}: {fault}"
            tensors.append(view.tensor)
        return BoundCall(self._module.get_function(function), *tensors)

    def wrap(self, array: npt.NDArray[Any]) -> View:
        """Return the functions' view of an array, which the caller keeps alive.

        Read-only arrays (a memory-mapped store) are passed too: no kernel writes to weights.
        """
        assert array.flags.c_contiguous, "kernels take contiguous arrays"
        assert array.dtype == np.uint8 or array.ctypes.data % ALIGNMENT == 0, "misaligned array"
        flat = array.reshape(-1)
        if not flat.flags.writeable:
            flat = _view_writeable(flat)
        return View(self._ffi.from_dlpack(flat), flat.dtype.name, flat.size)


def _find_fault(parameter: Parameter, view: View, sizes: Mapping[str, int]) -> str | None:
    """Return what keeps an array from being what a function takes."""
    if view.dtype != parameter.dtype:
        return f"{view.dtype} instead of {parameter.dtype}"
    least, is_exact = 1, bool(parameter.shape)
    for length in parameter.shape:
        if isinstance(length, str):
            # Where nobody says what it is, only the other lengths count.
            least, is_exact = least * sizes.get(length, 1), False
        else:
            least *= length
    if view.size < least or (is_exact and least and view.size != least):
        return f"{view.size} elements where {parameter.shape} are expected"
    return None


def _view_writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same memory without the read-only mark, which DLPack cannot express."""
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    writeable: U8 = np.ctypeslib.as_array(raw)
    return writeable.view(array.dtype)
