"""Compiled functions as tvm_ffi calls them, without the compiler; bundles have
`pi2.phone.replacements.functions` instead."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from pi2.backends.compiler.signature import Parameter
from pi2.caches import VARIABLE
from pi2.diagnostics import UserError

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


def refuse_library(path: Path, error: Exception) -> UserError:
    return UserError.of(
        "P655",
        f"compiled kernels cannot be loaded from {path.parent}",
        help=f"set {VARIABLE} to a folder on a file system that runs code, or remove "
        f"{path.name}: it is compiled again",
        notes=[" ".join(str(error).split())[-300:]],
    )


class CompiledFunctions:
    def __init__(self, path: Path) -> None:
        self._ffi = import_ffi()
        try:
            self._module = self._ffi.load_module(str(path), keep_module_alive=False)
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
        """Forget the functions."""
        self._found.clear()
