"""Reads safetensors files: the header at once, tensors by rows.

Read here and not with the `safetensors` package, because its numpy interface has no bfloat16 and
its errors name neither file nor tensor.  Format: 8 bytes little-endian header size, JSON header
``{name: {dtype, shape, data_offsets}}``, data.  https://huggingface.co/docs/safetensors"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import re
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from pi2.arrays import F16, F32, U8, Raw
from pi2.caches import check_regular, open_stream
from pi2.diagnostics import UserError
from pi2.formats import Packing
from pi2.plan.weights.layout import Precision
from pi2.reads import read_weights

_STORAGE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_TILE = 128
Kind = str
"""Of numbers: ``stored``, as the file has them, in the type ``dtype``; the name of a format of
blocks, or of packed vectors, that holds them; or ``computed``, any other."""
Taken = tuple[U8, F16 | None] | None
"""Packed weights and scales of rows that a checkpoint has just so; None of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a checkpoint and its place; nothing of it is in memory."""

    file: Path
    name: str
    dtype: str
    """Type of the elements as the file states it: ``F32``, ``BF16`` and so on."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the tensor's first element in the file."""
    size_bytes: int

    def cut(self, number: int, **own: Any) -> Self:
        """Part ``number`` of a stack [parts, ...], with values of its ``own``."""
        size = self.size_bytes // self.shape[0]
        kept = {"shape": self.shape[1:], "size_bytes": size}
        return replace(self, **{**kept, "offset": self.offset + number * size, **own})

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows as stored [rows, ...], bfloat16 as uint16, scalars as [1]; P535, P532."""
        return self.read_as(self.check_type(), start, stop)

    def read_as(self, storage: str, start: int = 0, stop: int | None = None) -> Raw:
        """Rows of numbers whose type numpy calls ``storage``; `UserError` P532."""
        rows = self.shape[0] if self.shape else 1
        stop = rows if stop is None else stop
        width = math.prod(self.shape[1:])
        skip = start * width * np.dtype(storage).itemsize
        flat = self.read_flat(self.offset + skip, (stop - start) * width, storage)
        return flat.reshape(stop - start, *self.shape[1:])

    def read_flat(self, offset: int, count: int, storage: str) -> Raw:
        """``count`` numbers at byte ``offset`` of the file; raises as `read_raw`."""
        flat: Raw = np.empty(count, storage)
        read_weights(self.file, flat.view(np.uint8), offset, f"tensor {self.name!r}")
        return flat

    def check_type(self) -> str:
        """Name that numpy has for the type; `UserError` P535 if it is not a float."""
        storage = _STORAGE.get(self.dtype)
        if storage is None:
            raise UserError.of(
                "P535",
                f"tensor {self.name!r} in {self.file} has the type {self.dtype}",
                help=f"convert it to one of {', '.join(_STORAGE)}",
            )
        return storage

    def widen(self, raw: Raw) -> F32:
        """Turn what `read_raw` returned, or rows of it, into float32."""
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            wide = raw.astype(np.uint32)
            wide <<= np.uint32(16)
            return wide.view(np.float32)
        with np.errstate(over="ignore"):
            return raw.astype(np.float32, copy=False)

    def read(self, start: int = 0, stop: int | None = None) -> F32:
        """Rows ``start`` to ``stop`` in float32."""
        return self.widen(self.read_raw(start, stop))

    def read_turned(self) -> Raw:
        """The columns of a matrix as rows, in a type that `widen` takes; raises as `read_raw`."""
        return turn(self.read_raw())

    @property
    def kind(self) -> Kind:
        return "stored"

    def is_of(self, packing: Packing) -> bool:
        """Whether ``packing`` holds its numbers, as far as its format tells; of GGUF files, as far
        as the numbers do.  Raises `UserError` as `read`."""
        return self.kind == packing.name

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        """Packed weights and scales of rows that are quantised already just as the store does it;
        None for all others, which is what every plain number is."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTensor(SourceTensor):
    """Numbers of another tensor in another order; ``offset`` means nothing here."""

    stored: SourceTensor

    @classmethod
    def of(cls, stored: SourceTensor, /, **own: Any) -> Self:
        """A view with the values of ``stored`` except ``own``."""
        kept = ("file", "name", "dtype", "shape", "size_bytes")
        values = {"offset": 0} | {name: getattr(stored, name) for name in kept} | own
        return cls(**values, stored=stored)

    def widen(self, raw: Raw) -> F32:
        return self.stored.widen(raw)

    @property
    def kind(self) -> Kind:
        return self.stored.kind

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        return self.stored.take_codes(raw, precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTensor(ViewTensor):
    """A matrix that the file has turned."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        return self.stored.read_turned()[start:stop]

    def read_turned(self) -> Raw:
        return self.stored.read_raw()


def turn(matrix: Raw) -> Raw:
    rows, columns = matrix.shape
    turned = np.empty((columns, rows), matrix.dtype)
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            tile = matrix[row : row + _TILE, column : column + _TILE]
            turned[column : column + _TILE, row : row + _TILE] = tile.T
    return turned


def list_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Read the header of ``path``; `UserError` P532 or P536 states the file's fault."""
    try:
        with open_stream(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            text = file.read(measure_header(path, prefix, size))
    except OSError as error:
        raise _bad_file(path, error.strerror or str(error)) from None
    return parse_safetensors(path, prefix + text, size)


def measure_header(path: Path, prefix: bytes, size: int) -> int:
    """Bytes of the header that follows the 8 bytes ``prefix`` of a file of ``size`` bytes;
    `UserError` P532 if it cannot have such a header."""
    header_bytes: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
        raise _bad_file(path, "it is cut, or not a safetensors file")
    return header_bytes


def parse_safetensors(
    path: Path, start: bytes, size: int, make: Callable[..., SourceTensor] = SourceTensor
) -> dict[str, SourceTensor]:
    """Tensors of a file by name from ``start``, 8 bytes and header; `UserError` P532, P536."""
    header_bytes = measure_header(path, start[:8], size)
    try:
        header = json.loads(
            start[8 : 8 + header_bytes], object_pairs_hook=lambda pairs: _reject_twins(path, pairs)
        )
    except (ValueError, RecursionError):
        raise _bad_file(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _bad_file(path, "its header is not a table of tensors")
    data_start = 8 + header_bytes
    tensors = {
        name: make(file=path, name=name, **_read_entry(path, name, entry, data_start, size))
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        if tensor.offset < end:
            raise _bad_file(path, f"the tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.size_bytes, tensor.name
    return tensors


def _reject_twins(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise UserError.of("P536", f"{path} has tensor {twin!r} twice")
    return table


def _read_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> dict[str, Any]:
    """Type and place of a tensor."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        if not isinstance(dtype, str) or not all(type(number) is int for number in numbers):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise _bad_file(path, f"the header's entry of tensor {name!r} is malformed") from None
    if min(numbers) < 0 or begin > end:
        raise _bad_file(path, f"tensor {name!r} has a negative size")
    if data_start + end > size:
        raise _bad_file(
            path, f"it is cut: {size} bytes, but tensor {name!r} ends at {data_start + end}"
        )
    storage = _STORAGE.get(dtype)
    if storage is not None and math.prod(shape) * np.dtype(storage).itemsize != end - begin:
        raise _bad_file(path, f"tensor {name!r} has not the bytes that its shape needs")
    place = {"offset": data_start + begin, "size_bytes": end - begin}
    return {"dtype": dtype, "shape": tuple(shape), **place}


def refuse_export(code: str, problem: str) -> UserError:
    """The error for a checkpoint that is not as programs write them."""
    return UserError.of(code, problem, help="download or export the checkpoint again")


def _bad_file(path: Path, problem: str) -> UserError:
    return refuse_export("P532", f"cannot read {path}: {problem}")


_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTensor(SourceTensor):
    """A tensor of a PyTorch file, mapped into memory; ``offset`` means nothing here."""

    values: Any

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        self.check_type()
        import torch

        values = self.values if self.shape else self.values.reshape(1)
        rows = values[start:stop].contiguous()
        if rows.dtype == torch.bfloat16:
            found: Raw = rows.view(torch.int16).numpy().view(np.uint16)
            return found
        plain: Raw = rows.numpy()
        return plain


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def list_torch_file(path: Path) -> Mapping[str, SourceTensor]:
    """Tensors of ``path`` by name; `UserError` P531 without torch, P532 if it cannot be read, P545
    if it holds more than tensors."""
    if not has_torch():
        raise UserError.of(
            "P531",
            f"{path} is a PyTorch file, and torch is not installed",
            help="install torch, or save the model as safetensors",
        )
    import torch

    try:
        # Files of old versions are no archives, and cannot be mapped.
        check_regular(path)
        from zipfile import is_zipfile

        mapped = is_zipfile(path)
        with warnings.catch_warnings():
            # torch warns of pickles that it then refuses.
            warnings.simplefilter("ignore")
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = _find_name(str(error))
        raise UserError.of(
            "P545",
            f"{path} holds more than tensors{named}; nothing of it was run",
            help="save the model as safetensors, on a machine where you trust the file",
        ) from None
    except FileNotFoundError:
        raise _bad_file(path, "No such file or directory") from None
    except Exception as error:  # torch raises RuntimeError, EOFError, OSError and more
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _bad_file(path, reason) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict):
        raise _bad_file(path, "it is not a table of tensors")
    return {
        str(name): _describe(path, str(name), values)
        for name, values in found.items()
        if isinstance(values, torch.Tensor)
    }


def _find_name(explanation: str) -> str:
    """Name the function that a file tried to call, if torch's explanation names it."""
    found = re.search(r"GLOBAL ([\w.]{1,100})", explanation)
    return f": it names {found[1]}" if found else ""


def _describe(path: Path, name: str, values: Any) -> TorchTensor:
    kind = str(values.dtype).removeprefix("torch.")
    return TorchTensor(
        file=path,
        name=name,
        dtype=_NAMES.get(kind, kind),
        shape=tuple(values.shape),
        offset=0,
        size_bytes=values.numel() * values.element_size(),
        values=values.detach(),
    )


_SMALL_BYTES = 2**20
"""Most bytes that are read from where the file comes from, without fetching all of it."""


class Shards(Protocol):
    """Source of a checkpoint's weight files; `UserError` P761-P764 if it fails."""

    def read_header(self, file: Path) -> tuple[bytes, int]:
        """The first 8 bytes and the header of a safetensors file, and the whole file's size."""

    def read_bytes(self, file: Path, offset: int, count: int) -> bytes:
        """``count`` bytes of a file, without fetching the others."""

    def reserve(self, needed: Collection[Path], most_bytes: int) -> None:
        """Drop all files except the ``needed`` ones, and check that there is room for
        ``most_bytes``, the most that exist at a time."""

    def bring(self, file: Path) -> None:
        """Let the file be there as a whole."""

    def drop(self, file: Path) -> None:
        """Delete the file: nothing needs it any more."""

    def measure(self, file: Path) -> int:
        """Bytes of the file."""

    def describe(self, file: Path) -> list[str | int]:
        """Values that are equal if the contents of the file are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor(SourceTensor):
    """A tensor of a file that may not be there yet."""

    shards: Shards

    def read_flat(self, offset: int, count: int, storage: str) -> Raw:
        size_bytes = count * np.dtype(storage).itemsize
        if size_bytes <= _SMALL_BYTES and not self.file.exists():
            return np.frombuffer(self.shards.read_bytes(self.file, offset, size_bytes), storage)
        self.shards.bring(self.file)
        # A zero-argument super() does not work in classes with slots.
        return SourceTensor.read_flat(self, offset, count, storage)


def list_streamed(file: Path, shards: Shards) -> dict[str, SourceTensor]:
    """Tensors of a file that may be elsewhere, by name; raises as `parse_safetensors`."""
    header, size = shards.read_header(file)
    return parse_safetensors(file, header, size, partial(StreamedTensor, shards=shards))


def list_files(part: object) -> set[Path]:
    """Files that contain a tensor and all its parts; ``part`` may also be rows of tensors, a
    predictor, or a list of these."""
    found = {part.file} if isinstance(part, SourceTensor) else set()
    if is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            found |= list_files(getattr(part, field.name))
    elif isinstance(part, Mapping):
        found |= list_files(list(part.values()))
    elif isinstance(part, list | tuple):
        for item in part:
            found |= list_files(item)
    return found
