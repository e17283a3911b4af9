"""Reads GGUF files: metadata, the place of every tensor, and its rows.

The `gguf` package is not used: its reader refuses PowerInfer's files, maps the whole file, and its
errors name neither file nor tensor. Format: magic, version, number of tensors, number of keys, keys
with typed values, then name, dimensions, type and offset of every tensor, then the data, aligned.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pi2.arrays import F16, F32, I8, I64, U8, Raw
from pi2.caches import GGUF_MAGICS, check_regular
from pi2.diagnostics import UserError
from pi2.formats import Format, Packing, find_format, find_packing, list_formats, list_published
from pi2.formats.packing import BlockPacking
from pi2.importing.safetensors_file import Kind, SourceTensor, Taken, turn
from pi2.plan.weights.layout import GROUP, Precision
from pi2.reads import read_weights
from pi2.tokens.texts import Texts

_WHOLE = (("i8", 24, 1), ("i16", 25, 2), ("i32", 26, 4), ("i64", 27, 8), ("f64", 28, 8))
"""Types of single numbers that no weights have."""
BLOCKS = {
    **{own.number: own for own in list_formats().values()},
    **{
        number: Format(name=name, number=number, block=1, block_bytes=size, activations="float")
        for name, number, size in _WHOLE
    },
}
"""Types of blocks by the number that a file states."""


def check_block(block: Format, tensor: str, file: str) -> None:
    """`UserError` P535 if the installed `gguf` package does not decode ``tensor``."""
    if block.is_plain or type(block).decode is not Format.decode:
        return
    from gguf import quants

    if block.number not in {int(kind) for kind in quants._type_traits}:
        raise UserError.of("P535", f"tensor {tensor!r} in {file} has the type {block.name.upper()}")


def take_blocks(raw: U8, block: Format, precision: Precision) -> Taken:
    """Rows of blocks as packed weights and scales of a store, if they are just that: blocks as they
    are, or codes with one scale for 32, in Q4_0, Q5_0, Q8_0 and IQ4_NL."""
    packing = find_packing(precision)
    if packing.name == block.name and isinstance(packing, BlockPacking):
        return None if block.find_faults(raw).any() else (raw, None)
    if not packing.has_group_codes or block.is_plain:
        return None
    if 8 * block.block_bytes > (packing.bits + 1) * GROUP:
        return None
    if block.halves != (0,) or block.block != GROUP:
        return None
    codes, scales = split_blocks(raw, block)
    if codes.min() < -max(packing.offset, packing.top) or codes.max() > packing.top:
        return None  # a store's int8 is symmetric
    if not np.isfinite(scales).all():
        return None
    return packing.pack(codes), scales


def split_blocks(raw: U8, block: Format) -> tuple[I8, F16]:
    """Codes int8 [n, length] and scales float16 [n, length / 32] of rows of blocks that begin with
    their only scale."""
    blocks = raw.reshape(len(raw), -1, block.block_bytes).copy()
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    # What blocks with a scale of 1 stand for are their codes.
    blocks[:, :, :2] = np.array([1.0], "<f2").view(np.uint8)
    return block.decode(blocks.reshape(raw.shape)).astype(np.int8), scales


_PIECE_WEIGHTS = 2**20
"""Weights that are looked at together."""
_PLAIN = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "f64": "<f8"}
_WHOLE_NUMBERS = ".ffn_gate_tid2eid.weight"
"""Ends the names of tables of numbers of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor(SourceTensor):
    """A tensor of a GGUF file; ``name`` is what the file calls it."""

    block: Format
    order: I64 | None = None
    """The stored row at every row of the tensor; None means that both are in the same order."""
    is_turned: bool = False
    """Whether the file has columns where the tensor has rows."""
    added: float = 0.0
    """Number that the file has added to every element."""
    factor: np.float32 | None = None
    """Factor of all numbers."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop``: plain numbers, or bytes [n, bytes]; raises as
        `SourceTensor.read_raw`."""
        stop = self.shape[0] if stop is None else stop
        if self.is_turned:
            return turn(self._decode(self._read_stored(0, self.shape[1])))[start:stop]
        if self.order is None:
            return self._read_stored(start, stop)
        wanted = self.order[start:stop]
        first, last = int(wanted.min()), int(wanted.max())
        return self._read_stored(first, last + 1)[wanted - first]

    def read_turned(self) -> Raw:
        if self.is_turned:
            return self._read_stored(0, self.shape[1])
        rows, columns = self.shape
        step = max(1, _PIECE_WEIGHTS // columns)
        pieces = ((at, min(at + step, rows)) for at in range(0, rows, step))
        turned: Raw | None = None
        for first, last in pieces:
            # Groups lie along the rows: bytes must become numbers before they can be turned.
            numbers = self._decode(self.read_raw(first, last))
            if turned is None:
                turned = np.empty((columns, rows), numbers.dtype)
            turned[:, first:last] = turn(numbers)
        assert turned is not None
        return turned

    def widen(self, raw: Raw) -> F32:
        # A zero-argument super() does not work in classes with slots.
        numbers = SourceTensor.widen(self, self._decode(raw))
        if self.added:
            numbers = numbers - np.float32(self.added)
        if self.factor is not None:
            numbers = numbers * self.factor
        return numbers

    def _decode(self, raw: Raw) -> Raw:
        """Blocks as numbers, and plain numbers as they are."""
        return self.block.decode(raw.view(np.uint8)) if raw.dtype == np.uint8 else raw

    def check_type(self) -> str:
        storage = _PLAIN.get(self.block.name)
        if self.block.name == "i32" and self.name.endswith(_WHOLE_NUMBERS):
            return "<i4"
        if storage is None and (self.block.is_plain or len(self.shape) < 2):
            return SourceTensor.check_type(self)
        if storage is None:
            check_block(self.block, self.name, str(self.file))
        return storage or "|u1"

    def _read_stored(self, start: int, stop: int) -> Raw:
        """Stored rows: plain numbers [n, ...], or blocks uint8 [n, bytes]."""
        storage = self.check_type()
        columns = self.shape[0] if self.is_turned else self.shape[-1]
        width = columns if len(self.shape) > 1 else 1
        if storage == "|u1":
            width = self.block.count_bytes(width)
        size = np.dtype(storage).itemsize
        flat = self.read_flat(self.offset + start * width * size, (stop - start) * width, storage)
        return flat.reshape(stop - start, width) if len(self.shape) > 1 else flat

    @property
    def kind(self) -> Kind:
        name = self.block.name
        return name if self.factor is None and name in list_published() else "computed"

    def is_of(self, packing: Packing) -> bool:
        if packing.top != 1:
            return self.kind == packing.name
        # Files keep -1, 0 and 1 times one number in many formats.
        if not self.block.keeps_signs or len(self.shape) != 2:
            return False
        size: np.float32 | None = None
        rows, columns = self.shape[::-1] if self.is_turned else self.shape
        step = max(1, _PIECE_WEIGHTS // columns)
        for start in range(0, rows, step):
            sizes = np.abs(self.widen(self._read_stored(start, min(start + step, rows))))
            if size is None and sizes.any():
                size = sizes.max()
            if not ((sizes == 0) | (sizes == size)).all():
                return False
        return True

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        if raw.dtype != np.uint8 or self.factor is not None:
            return None
        return take_blocks(raw.view(np.uint8), self.block, precision)


_VERSIONS = (2, 3)
_ALIGNMENT = 32
_HEADER_BYTES = 4 << 20
"""More than the headers of models with small vocabularies have."""
_TEXT_BYTES = 16
"""Of a token and its length in most files: a header that is too short is not searched in vain."""
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 4
"""Arrays within arrays; no known program writes more than one."""
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    """Values by key: numbers, texts, numpy arrays of numbers, `Texts`, lists of the rest."""
    entries: Mapping[str, GgufTensor]
    is_powerinfer: bool
    spans: Mapping[str, tuple[int, int]]
    """Range of each key with its value: first byte, and byte after the last."""


def read_gguf(path: Path) -> GgufFile:
    """Read the header of ``path``.

    Raises `UserError`: P530 no such file, P532 it cannot be read, P535 an unknown type of numbers,
    P536 a tensor twice, P546 its disk fails."""
    try:
        size, taken = check_regular(path).st_size, _HEADER_BYTES
        if size < 24:
            raise _bad_file(path, "it is cut, or not a GGUF file")
        while True:
            # Not mapped: a disk that fails would end the process.
            data = np.empty(min(taken, size), np.uint8)
            read_weights(path, data, 0, "the header")
            try:
                return _Header(path, data.data, size).read()
            except _LongerHeader:
                taken *= 4
    except FileNotFoundError:
        raise UserError.of(
            "P530",
            f"there is no file or folder {path}",
            help="give a folder with config.json and weights, or a GGUF file",
        ) from None
    except (OSError, ValueError) as error:
        raise _bad_file(path, getattr(error, "strerror", None) or str(error)) from None


class _LongerHeader(Exception):
    """The header is longer than the part that was read."""


class _Header:
    """A place in a header that moves on as values are read."""

    def __init__(self, path: Path, data: memoryview, size: int) -> None:
        """``data``: the first bytes of a file of ``size``; `read` raises `_LongerHeader` where they
        end too early."""
        self._path = path
        self._data = data
        self._size = size
        self._place = 0
        self._reading = "its first bytes"

    def read(self) -> GgufFile:
        magic = self._take(4)
        if magic not in GGUF_MAGICS:
            raise _bad_file(self._path, "it is not a GGUF file")
        version = self._take_number("<I")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                self._refuse("its numbers are big-endian, only little-endian files can be read")
            self._refuse(f"its version is {version}, only 2 and 3 can be read")
        tensors, keys = self._take_number("<Q"), self._take_number("<Q")
        metadata: dict[str, Any] = {}
        spans: dict[str, tuple[int, int]] = {}
        for number in range(keys):
            first = self._place
            self._reading = f"metadata key {number} of {keys}"
            key = self._take_text(strict=True)
            self._reading = f"the value of {key!r}"
            if key in metadata:
                self._refuse(f"the metadata key {key!r} appears twice")
            metadata[key] = self._take_value(self._take_number("<I"))
            spans[key] = first, self._place
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {alignment!r}, not a power of two")
        entries = self._take_entries(tensors, alignment)
        return GgufFile(
            path=self._path,
            metadata=metadata,
            entries=entries,
            is_powerinfer=GGUF_MAGICS[magic],
            spans=spans,
        )

    def _take_entries(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        relative: dict[str, GgufTensor] = {}
        for number in range(count):
            self._reading = f"the entry of tensor {number} of {count}"
            entry = self._take_entry()
            if entry.name in relative:
                raise UserError.of("P536", f"{self._path} has tensor {entry.name!r} twice")
            if entry.offset % alignment:
                self._refuse(f"tensor {entry.name!r} does not begin at a multiple of {alignment}")
            relative[entry.name] = entry
        start = -(-self._place // alignment) * alignment
        ordered = _find_lengths(sorted(relative.values(), key=lambda entry: entry.offset))
        end, before = 0, ""
        for entry in ordered:
            if entry.offset < end:
                self._refuse(f"the tensors {before!r} and {entry.name!r} overlap")
            end, before = entry.offset + entry.size_bytes, entry.name
            if start + end > self._size:
                self._refuse(
                    f"it is cut: {self._size} bytes, but tensor {before!r} ends at {start + end}"
                )
        placed = {own.name: replace(own, offset=start + own.offset) for own in ordered}
        return {name: placed[name] for name in relative}

    def _take_entry(self) -> GgufTensor:
        name = self._take_text(strict=True)
        self._reading = f"the entry of tensor {name!r}"
        count = self._take_number("<I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            self._refuse(f"tensor {name!r} has {count} dimensions")
        shape = tuple(self._take_number("<Q") for _ in range(count))[::-1]
        kind, offset = self._take_number("<I"), self._take_number("<Q")
        block = BLOCKS.get(kind)
        if block is None:
            raise UserError.of(
                "P535",
                f"tensor {name!r} in {self._path} has the unknown type {kind}",
                help="convert the model to one of F32, F16, BF16, Q8_0 and Q4_0",
            )
        if min(shape) < 1 or shape[-1] % block.block:
            self._refuse(
                f"tensor {name!r} has the shape {list(shape)}, but {block.name.upper()} comes in "
                f"blocks of {block.block}"
            )
        size = block.count_bytes(math.prod(shape))
        return GgufTensor(
            file=self._path,
            name=name,
            dtype=block.name.upper(),
            shape=shape,
            offset=offset,
            size_bytes=size,
            block=block,
        )

    def _take_value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self._take_array(kind, 1)[0].item()
        if kind == _STRING:
            return self._take_text()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            self._refuse(f"{self._reading} has the unknown type {kind}")
        inner, count = self._take_number("<I"), self._take_number("<Q")
        if inner in _NUMBERS:
            return self._take_array(inner, count)
        if count > self._size - self._place:
            self._refuse(f"it ends inside {self._reading}")
        if inner == _STRING:
            return self._take_texts(count)
        return [self._take_value(inner, depth + 1) for _ in range(count)]

    def _take_array(self, kind: int, count: int) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _take_texts(self, count: int) -> Texts:
        if len(self._data) < min(self._size, self._place + _TEXT_BYTES * count):
            raise _LongerHeader
        try:
            texts, self._place = Texts.read(self._data, self._place, count)
        except (struct.error, OverflowError):
            if len(self._data) < self._size:
                raise _LongerHeader from None
            self._refuse(f"it ends inside {self._reading}")
        return texts

    def _take_text(self, *, strict: bool = False) -> str:
        # Tokens may hold pieces of characters; names may not.
        size = self._take_number("<Q")
        try:
            return self._take(size).decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError:
            self._refuse(f"{self._reading} is not UTF-8")

    def _take_number(self, kind: str) -> int:
        number: int = struct.unpack(kind, self._take(struct.calcsize(kind)))[0]
        return number

    def _take(self, size: int) -> bytes:
        if size > self._size - self._place:
            self._refuse(f"it ends inside {self._reading}")
        if size > len(self._data) - self._place:
            raise _LongerHeader
        piece = bytes(self._data[self._place : self._place + size])
        self._place += size
        return piece

    def _refuse(self, problem: str) -> NoReturn:
        raise _bad_file(self._path, problem)


def _find_lengths(ordered: list[GgufTensor]) -> list[GgufTensor]:
    """Return entries as they are, or with the longer blocks that older files call Q2_0 as well: one
    of them overlaps the next tensor otherwise."""
    short, long = (find_format(name) for name in ("q2_0", "pq2_0"))
    if not any(
        own.block == short and own.offset + own.size_bytes > following.offset
        for own, following in pairwise(ordered)
    ):
        return ordered
    longer: dict[str, Any] = {"block": long, "dtype": long.name.upper()}
    return [
        replace(own, size_bytes=long.count_bytes(math.prod(own.shape)), **longer)
        if own.block == short and own.shape[-1] % long.block == 0
        else own
        for own in ordered
    ]


def _bad_file(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P532", f"cannot read {path}: {problem}", help="download or export the file again"
    )
