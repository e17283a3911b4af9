"""Compiled libraries, and calls of their functions with the arrays that stay the same."""

import _ctypes
import ctypes
import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8
from pi2.backends.compiler.functions import CompiledFunctions, refuse_library
from pi2.backends.compiler.signature import Parameter, find_signatures, read_signatures
from pi2.formats.packing import ALIGNMENT

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class View:
    """What functions see of an array: flat, not copied, kept alive by the maker of the view."""

    tensor: Any
    """What a call takes in the array's place."""
    dtype: str
    size: int
    """Elements."""


Need = tuple[str, str, int, int]
"""Name and type of an array, and its least and largest number of elements."""
NoteKernel = Callable[[str, int | None, float, float], None]
"""Takes a function's name, its layer if it has one, and when a call began and ended
(`time.perf_counter`)."""


class BoundCall(functools.partial[object]):
    """A function bound to its arrays; a ``functools.partial`` unless the library is observed."""

    function: Callable[..., object]
    """The compiled function, even if another one is called in its place."""
    name: str
    layer: int | None

    def observe(self, note: NoteKernel | None) -> None:
        """Call ``note`` after every call from now on; None ends it."""
        called, name, layer = self.function, self.name, self.layer
        if note is not None:
            called = _time_calls(called, functools.partial(note, name, layer))
        # What a partial calls is part of its state, like its arguments.
        state = (called, self.args, self.keywords, self.__dict__)
        self.__setstate__(state)  # type: ignore[attr-defined]


def _time_calls(
    function: Callable[..., object], note: Callable[[float, float], None]
) -> Callable[..., object]:
    def call(*arguments: object) -> object:
        start_s = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            note(start_s, time.perf_counter())

    return call


class Functions(Protocol):
    """The functions of a library, wherever they are (`functions.CompiledFunctions`)."""

    def bind(
        self, name: str, tensors: Sequence[object], given: Sequence[Parameter]
    ) -> tuple[Callable[..., object], Sequence[object]]:
        """Return a function and its first arguments, the ones before ``given``."""

    def make_tensor(self, flat: npt.NDArray[Any]) -> object:
        """Return what functions take in the place of an array [n]."""

    def close(self) -> None:
        """Forget the functions."""


class Library:
    """A compiled library, and calls of its functions."""

    def __init__(
        self,
        path: Path,
        sizes: Mapping[str, int] | None = None,
        *,
        launcher: int | None = None,
        functions: Functions | None = None,
    ) -> None:
        """Load ``path``, unless ``functions`` are given; ``sizes`` are the symbols in parameters'
        shapes. Parallel loops call what is at the address ``launcher``."""
        if functions is None and launcher is None:
            functions = CompiledFunctions(path)
        elif functions is None:
            functions = open_copy(path, functools.partial(_open_with, launcher))
        self._functions: Functions = functions
        self._sizes = dict(sizes or {})
        self.signatures = read_signatures(find_signatures(path).read_text())
        self._needs: dict[str, list[Need]] = {}
        self._calls: list[BoundCall] = []

    def bind(
        self,
        function: str,
        given: str,
        *arrays: Mapping[str, View],
        layer: int | None = None,
        name: str | None = None,
    ) -> BoundCall:
        """Bind arrays, each from the first of ``arrays`` that has its name; ``given`` names what
        every call adds, such as ``"tokens position"``. Missing or small arrays are a programmer's
        mistake. Observers see ``layer``, and ``name`` instead of the function's."""
        names = [parameter.name for parameter in self.signatures[function].given]
        assert given.split() == names, f"{function} is given {names}, not {given.split()}"
        views: dict[str, View] = {}
        for pool in reversed(arrays):
            views.update(pool)
        tensors = []
        # Thousands of calls are bound when a model is loaded.
        for parameter, dtype, least, most in self._list_needs(function):
            view = views.get(parameter)
            assert view is not None, f"{function} needs an array {parameter}"
            assert view.dtype == dtype, (
                f"{parameter} of {function}: {view.dtype} instead of {dtype}"
            )
            assert least <= view.size <= most, (
                f"{parameter} of {function}: {view.size} elements where {least} are expected"
            )
            tensors.append(view.tensor)
        compiled, before = self._functions.bind(function, tensors, self.signatures[function].given)
        call = BoundCall(compiled, *before)
        call.function, call.name, call.layer = compiled, name or function, layer
        self._calls.append(call)
        return call

    def _list_needs(self, function: str) -> list[Need]:
        """Return what ``function`` needs of its bound arrays, in its order."""
        if function not in self._needs:
            bound = self.signatures[function].bound
            self._needs[function] = [_find_need(item, self._sizes) for item in bound]
        return self._needs[function]

    def observe(self, note: NoteKernel | None) -> None:
        """Call ``note`` after every call of every function from now on; None ends it."""
        for call in self._calls:
            call.observe(note)

    def close(self) -> None:
        self._calls.clear()
        self._functions.close()

    def wrap(self, array: npt.NDArray[Any]) -> View:
        """The functions' view of an array which it keeps alive, read-only ones too."""
        assert array.flags.c_contiguous, "kernels take contiguous arrays"
        assert array.dtype == np.uint8 or array.ctypes.data % ALIGNMENT == 0, "misaligned array"
        flat = array.reshape(-1)
        if not flat.flags.writeable:
            flat = _view_writeable(flat)
        return View(self._functions.make_tensor(flat), flat.dtype.name, flat.size)


def open_copy(library: Path, load: Callable[[Path], T]) -> T:
    """Load a copy of ``library``, with variables of its own; `UserError` P655."""
    content = library.read_bytes()
    for folder in (library.parent, None):
        try:
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".so") as own:
                own.write(content)
                own.flush()
                return load(Path(own.name))
        except OSError as error:
            problem = error
    raise refuse_library(library, problem)


def find_address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _open_with(launcher: int | None, path: Path) -> Functions:
    functions, library = CompiledFunctions(path), ctypes.CDLL(str(path))
    ctypes.c_void_p.in_dll(library, "__TVMBackendParallelLaunch").value = launcher
    _ctypes.dlclose(library._handle)
    return functions


def _find_need(parameter: Parameter, sizes: Mapping[str, int]) -> Need:
    """Return what a function needs of an array; symbols that are not in ``sizes`` may be anything,
    and where there is one, more elements do no harm."""
    lengths = [sizes.get(item, 1) if isinstance(item, str) else item for item in parameter.shape]
    least = math.prod(lengths) if lengths else 0
    is_exact = least > 0 and not any(isinstance(item, str) for item in parameter.shape)
    return parameter.name, parameter.dtype, least, least if is_exact else sys.maxsize


def _view_writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    raw = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    writeable: U8 = np.ctypeslib.as_array(raw)
    return writeable.view(array.dtype)
