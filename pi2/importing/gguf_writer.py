"""Writes GGUF files: keys with values, then tensors piece by piece."""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np

from pi2.arrays import F32, U8
from pi2.formats import Format, find_format
from pi2.importing.conversion_job import Task, run_tasks
from pi2.importing.safetensors_file import Shards, list_files
from pi2.store.files import FilePlan, Piece, PlacedFile, explain_os_error

_ALIGNMENT = 32
_TEXT, _LIST = 8, 9
Pieces = Callable[[], Iterable[U8]]


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring bytes of a tensor."""

    sources: object
    """The tensors that they are made from."""
    size_bytes: int
    pieces: Pieces
    """Gives them, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    name: str
    shape: tuple[int, ...]
    """Rows first."""
    format: Format
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return count_bytes(self.shape, self.format)


def count_bytes(shape: Sequence[int], own: Format) -> int:
    return prod(shape[:-1]) * own.count_bytes(shape[-1])


def make_vector(name: str, values: F32) -> NewTensor:
    part = Part(None, values.nbytes, lambda: [values.view(np.uint8)])
    return NewTensor(name=name, shape=values.shape, format=find_format("f32"), parts=(part,))


Value = bool | int | float | str | bytes | Sequence[bool] | Sequence[int] | Sequence[float]
"""What a key may have; ``bytes`` are a text as it is."""
_PLAIN = ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f"))
_NEGATIVE = 5, "<i"


def write_key(key: str, value: Value | Sequence[str] | Sequence[bytes]) -> bytes:
    """A key with its value: whole numbers have 32 bits, and so have others."""
    return _write_text(key.encode()) + _write_value(value)


def _write_value(value: object) -> bytes:
    if isinstance(value, str | bytes):
        return struct.pack("<I", _TEXT) + _write_text(_encode(value))
    if not isinstance(value, Sequence):
        kind, form = _find_kind([value])
        return struct.pack("<I", kind) + struct.pack(form, value)
    start = struct.pack("<I", _LIST)
    if value and isinstance(value[0], str | bytes):
        texts = b"".join(_write_text(_encode(text)) for text in value)
        return start + struct.pack("<IQ", _TEXT, len(value)) + texts
    kind, form = _find_kind(value)
    numbers = struct.pack(f"<{len(value)}{form[1]}", *value)
    return start + struct.pack("<IQ", kind, len(value)) + numbers


def _encode(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _find_kind(values: Sequence[object]) -> tuple[int, str]:
    first = values[0] if values else 0
    if type(first) is int and any(isinstance(own, int) and own < 0 for own in values):
        return _NEGATIVE
    return next((kind, form) for own, kind, form in _PLAIN if isinstance(first, own))


def write_gguf(
    output: Path,
    keys: Mapping[str, bytes],
    tensors: Sequence[NewTensor],
    files: Sequence[Path] = (),
    shards: Shards | None = None,
) -> None:
    """Write ``output``, which appears when it is whole.  ``keys``: each with its value, as bytes;
    tensors without parts are holes.

    ``shards`` bring ``files`` one by one; tensors made before a failure stay for a call with the
    same keys and tensors. Raises `UserError` P523 if it cannot be written, and what pieces
    and shards raise."""
    keys = {"general.alignment": write_key("general.alignment", _ALIGNMENT), **keys}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join([*keys.values(), *_describe(tensors)])
    starts = [_align(len(head)) + place for place in _place_all(tensors)]
    plan = FilePlan(pieces=(Piece(0, head),), size=starts[-1] + tensors[-1].size_bytes)
    parts = [part for tensor in tensors for part in tensor.parts]
    places = list[int]()
    for own, place in zip(tensors, starts, strict=True):
        ends = accumulate((part.size_bytes for part in own.parts), initial=place)
        places += list(ends)[:-1]
    try:
        with PlacedFile(output, plan, keeps=shards is not None) as file:

            def write(number: int) -> None:
                start = end = places[number]
                for piece in parts[number].pieces():
                    end = file.write(end, piece)
                assert end - start == parts[number].size_bytes, parts[number]
                file.mark(number)

            left = [number for number in range(len(parts)) if not file.has(number)]
            tasks = [
                Task(partial(list_files, parts[number].sources), partial(write, number))
                for number in left
            ]
            run_tasks(tasks, files, shards, file.settle)
            file.finish()
    except OSError as error:
        raise explain_os_error(error, output) from None


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _place_all(tensors: Iterable[NewTensor]) -> Iterator[int]:
    """Yield the place of each tensor after the header."""
    offset = 0
    for tensor in tensors:
        yield offset
        offset += _align(tensor.size_bytes)


def _describe(tensors: Sequence[NewTensor]) -> Iterator[bytes]:
    for tensor, offset in zip(tensors, _place_all(tensors), strict=True):
        sizes = tensor.shape[::-1]
        yield _write_text(tensor.name.encode())
        yield struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        yield struct.pack("<IQ", tensor.format.number, offset)


def _write_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
