"""Compiled functions called through ctypes, in libraries that need no TVM."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.backends.compiler.signature import Parameter
from pi2.diagnostics import UserError

_INTEGER, _FLOAT, _TENSOR = 1, 3, 7
"""Kinds of arguments (TVMFFITypeIndex)."""
_PREFIX = "__tvm_ffi_"
_CPU = 1
_CODES = {"i": 0, "u": 1, "f": 2}
"""Kinds of numbers (DLDataTypeCode)."""
_WORDS = 8
"""64-bit words of a DLTensor, and of its only length and stride, which follow it."""


def refuse_library(path: Path, error: Exception) -> UserError:
    return UserError.of(
        "P655",
        f"compiled kernels cannot be loaded from {path.parent}",
        help="copy the bundle to a folder on a file system that runs code",
        notes=[" ".join(str(error).split())[-300:]],
    )


Call = Callable[..., object]
Words = ctypes.Array[ctypes.c_int64]


def find_obstacles() -> list[str]:
    return []


class CompiledFunctions:
    def __init__(self, path: Path) -> None:
        """Load ``path``; see `pi2.backends.compiler.functions`."""
        self._library = ctypes.CDLL(str(path))
        self._library.pi2_message.restype = ctypes.c_char_p

    def bind(
        self, name: str, tensors: Sequence[object], given: Sequence[Parameter]
    ) -> tuple[Call, Sequence[object]]:
        """Return a function that takes ``given`` after ``tensors``."""
        function = getattr(self._library, _PREFIX + name)
        return _make_call(function, self._library.pi2_message, name, tensors, given), ()

    def make_tensor(self, flat: npt.NDArray[Any]) -> object:
        """Return what functions take in the place of an array [n], which is not copied."""
        words = (ctypes.c_int64 * _WORDS)()
        _write_tensor(words, 0, ctypes.addressof(words), _describe_type(flat.dtype))
        words[0], words[6], words.array = flat.ctypes.data, flat.size, flat  # type: ignore[attr-defined]
        return words

    def close(self) -> None:
        """Nothing is kept."""


def _describe_type(dtype: npt.DTypeLike) -> int:
    found = np.dtype(dtype)
    packed = struct.pack("<iBBH", 1, _CODES[found.kind], 8 * found.itemsize, 1)
    return int(struct.unpack("<q", packed)[0])


def _write_tensor(words: Words | list[int], first: int, address: int, kind: int) -> None:
    """Write a one-dimensional DLTensor, except for its address (word 0) and length (word 6)."""
    words[first + 1] = _CPU
    words[first + 2] = kind
    words[first + 3] = address + 8 * (first + 6)  # shape
    words[first + 4] = address + 8 * (first + 7)  # strides
    words[first + 5] = 0  # offset in bytes
    words[first + 7] = 1


def _make_call(
    function: Any,
    read_message: Callable[[], bytes],
    name: str,
    tensors: Sequence[Any],
    given: Sequence[Parameter],
) -> Call:
    """Call ``function`` with arguments in memory of the call's own: threads may share it."""
    count = len(tensors) + len(given)
    arrays = [place for place, item in enumerate(given) if item.kind == "given"]
    size = 2 * count + _WORDS * len(arrays)
    room = ctypes.c_int64 * size
    words = [0] * size
    for place, tensor in enumerate(tensors):
        words[2 * place : 2 * place + 2] = _TENSOR, ctypes.addressof(tensor)
    steps: list[tuple[int, int, str]] = []
    """Word that a given value goes to, the same of an array's tensor, and its type."""
    for place, item in enumerate(given):
        word = 2 * (len(tensors) + place)
        at = 0
        if item.kind == "given":
            at = 2 * count + _WORDS * arrays.index(place)
            words[word] = _TENSOR
            _write_tensor(words, at, 0, _describe_type(item.dtype))
        else:
            words[word] = _FLOAT if item.dtype.startswith("float") else _INTEGER
        steps.append((word + 1, at, item.dtype))
    template = bytes(room(*words))
    make = room.from_buffer_copy
    address_of, keep = ctypes.addressof, tuple(tensors)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    function.restype = ctypes.c_int32

    def call(*values: Any) -> None:
        words = make(template)
        address = address_of(words)
        for (word, at, dtype), value in zip(steps, values, strict=True):
            if isinstance(value, ctypes.Array):  # of `make_tensor`
                words[word] = address_of(value)
            elif at:
                assert value.dtype == dtype and value.flags.c_contiguous, (name, value.dtype, dtype)
                words[word] = address + 8 * at
                words[at] = value.__array_interface__["data"][0]
                words[at + 3] += address
                words[at + 4] += address
                words[at + 6] = value.size
            elif dtype.startswith("float"):
                words[word] = struct.unpack("<q", struct.pack("<d", value))[0]
            else:
                words[word] = int(value)
        answer = (ctypes.c_int64 * 2)()
        if function(None, address, count, address_of(answer)):
            raise RuntimeError(f"{name}: {read_message().decode(errors='replace')}")

    call.__dict__["tensors"] = keep  # functions see addresses only
    return call
