"""Tensors that a checkpoint stores as codes, scales and more, decoded as their rows are read."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from pi2.arrays import F32, I32, Raw
from pi2.diagnostics import UserError
from pi2.formats import find_packing, list_formats
from pi2.importing.safetensors_file import Kind, SourceTensor, Taken, refuse_export
from pi2.plan.weights.layout import GROUP, Precision

_INTEGERS = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "F8_E4M3": "u1", "F8_E8M0": "u1"}
"""How numpy reads types that are codes."""
Tensors = Mapping[str, SourceTensor]
_FLOATS = {"F32", "F16", "BF16", "F64"}
MOST_EXPERTS = 4096
"""Most experts of a layer."""


def _list_e4m3() -> F32:
    """Numbers that the 256 codes of float8 E4M3 (without infinities) stand for."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    size[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


E4M3 = _list_e4m3()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Numbers that the 16 codes of a 4-bit float stand for (OCP Microscaling Formats, 2023)."""


E8M0 = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan).astype(np.float32)
"""Powers of two by their exponents; 255 is no number."""


def read_array(tensor: SourceTensor, start: int = 0, stop: int | None = None) -> Raw:
    """Rows of codes or numbers as numpy has them; `UserError` P532 for missing bytes, P535."""
    if tensor.dtype in _FLOATS:
        return tensor.read(start, stop)
    storage = _INTEGERS.get(tensor.dtype) or tensor.check_type()
    if math.prod(tensor.shape) * np.dtype(storage).itemsize != tensor.size_bytes:
        problem = f"tensor {tensor.name!r} has not the bytes that its shape needs"
        raise refuse_export("P532", f"cannot read {tensor.file}: {problem}")
    return tensor.read_as(storage, start, stop)


def take_part(
    tensors: Tensors, name: str, shape: tuple[int, ...] | None = None, dtypes: tuple[str, ...] = ()
) -> SourceTensor:
    """A tensor of ``shape`` and one of ``dtypes``; `UserError` P533, P534 or P535."""
    tensor = tensors.get(name)
    if tensor is None:
        raise refuse_export("P533", f"there is no tensor {name!r}, which others need to be decoded")
    if dtypes and tensor.dtype not in dtypes:
        raise UserError.of(
            "P535",
            f"tensor {name!r} in {tensor.file} has the type {tensor.dtype}, not "
            f"{' or '.join(dtypes)}",
            help="take a checkpoint that was exported as its configuration says",
        )
    if shape is not None and tensor.shape != shape:
        raise refuse_shape(tensor, shape)
    return tensor


def refuse_shape(tensor: SourceTensor, shape: tuple[int, ...]) -> UserError:
    return refuse_export(
        "P534",
        f"tensor {tensor.name!r} in {tensor.file} has the shape {list(tensor.shape)}, the tensors "
        f"that belong to it say {list(shape)}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedTensor(SourceTensor):
    """Rows that a function makes of other tensors; ``offset`` is unused."""

    parts: tuple[SourceTensor, ...]
    """All that it is made of, and what else belongs to it."""
    compute: Callable[[int, int], F32]
    """Gives rows from one on and before another, float32 [n, ...]."""
    kind: Kind = "computed"

    @classmethod
    def make(
        cls,
        name: str,
        shape: tuple[int, ...],
        compute: Callable[[int, int], F32],
        *parts: SourceTensor,
        dtype: str = "F32",
        **own: Any,
    ) -> Self:
        """The tensor ``name``, made of ``parts``, with further fields of its ``own``."""
        return cls(
            file=parts[0].file if parts else Path(),
            name=name,
            dtype=dtype,
            shape=shape,
            offset=0,
            size_bytes=sum(part.size_bytes for part in parts),
            parts=parts,
            compute=compute,
            **own,
        )

    def check_type(self) -> str:
        return "<f4"

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        rows = self.shape[0]
        return self.compute(start, rows if stop is None else min(stop, rows))

    def widen(self, raw: Raw) -> F32:
        return raw.astype(np.float32, copy=False)

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        own = list_formats().get(self.kind)
        has_groups = own is not None and own.fits_bytes and raw.shape[1] % GROUP == 0
        is_wide = find_packing(precision).like == "q8_0"
        return quantize_exactly(self.widen(raw)) if has_groups and is_wide else None


def compute_alike(
    whole: SourceTensor, shape: tuple[int, ...], compute: Callable[[int, int], F32]
) -> DecodedTensor:
    """A tensor of numbers of ``whole``, which stay in the type that the file keeps them in."""
    own = {"kind": "stored", "dtype": whole.dtype} if whole.kind == "stored" else {}
    return DecodedTensor.make(whole.name, shape, compute, whole, **own)


def multiply_columns(matrix: SourceTensor, factors: F32, *parts: SourceTensor) -> DecodedTensor:
    """A matrix whose columns are multiplied by ``factors`` [columns]; ``parts`` belong to it."""
    return DecodedTensor.make(
        matrix.name,
        matrix.shape,
        lambda start, stop: matrix.read(start, stop) * factors,
        *(parts or (matrix,)),
    )


def unfold_norm(inner: SourceTensor, norm: SourceTensor | None, offset: float) -> SourceTensor:
    """PowerInfer's predictor ``inner`` for the FFN's input.

    It reads h; the FFN reads u = h / |h| * w with the norm's weights w. fc2 relu(fc1 h) has the
    sign of fc2 relu(fc1 (u / w)): columns of fc1 are divided by w."""
    if norm is None or len(inner.shape) != 2 or norm.shape != inner.shape[1:]:
        return inner  # said later, with all that is missing or wrong
    weights = norm.read() + np.float32(offset)
    return multiply_columns(
        inner, np.divide(1, weights, out=np.zeros_like(weights), where=weights != 0)
    )


FLOATS = ("F32", "BF16", "F16")
SCALE_TYPES = (*FLOATS, "F8_E8M0")
EXPONENTS = ("U8", "F8_E8M0")
_WORD = 32
"""Bits of a word."""
Numbers = Callable[[int, int], F32]
"""Gives rows from one on and before another, float32 [n, ...]."""


def unpack(words: Raw, bits: int, count: int) -> I32:
    """The first ``count`` codes of rows of 32-bit words [n, m], lowest bits first, without gaps."""
    raw, mask = words.view(np.uint32), np.uint32((1 << bits) - 1)
    if _WORD % bits == 0:
        codes = raw[:, :, None] >> np.arange(0, _WORD, bits, dtype=np.uint32) & mask
        return codes.reshape(len(words), -1)[:, :count].astype(np.int32)
    first, shift = np.divmod(np.arange(count) * bits, _WORD)
    low = raw[:, first] >> shift.astype(np.uint32)
    # Of codes that end in the next word. A shift by 32 bits is none, so it is done in two.
    following = np.pad(raw, ((0, 0), (0, 1)))[:, first + 1]
    high = following << np.uint32(1) << (_WORD - 1 - shift).astype(np.uint32)
    return ((low | high) & mask).astype(np.int32)


def count_words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Place in a word of each of 8 neighbours."""


def read_outputs(
    tensor: SourceTensor, bits: int, offset: int, is_mixed: bool, start: int, stop: int
) -> F32:
    """Codes [n, m] of outputs of words [m, words of outputs], each with ``offset`` more."""
    per_word = 32 // bits
    first, last = start // per_word, -(-stop // per_word)
    words = np.ascontiguousarray(read_array(tensor)[:, first:last])
    codes = unpack(words, bits, words.shape[1] * per_word)
    if is_mixed:
        codes = codes.reshape(len(words), -1, 8)[:, :, _AWQ_PLACES].reshape(len(words), -1)
    own = codes[:, start - first * per_word : stop - first * per_word] + np.int32(offset)
    return np.asarray(own.T, np.float32)


def read_inputs(tensor: SourceTensor, bits: int, inputs: int, start: int, stop: int) -> F32:
    """Codes [n, inputs] of words of inputs [words, outputs]."""
    words = np.ascontiguousarray(read_array(tensor)[:, start:stop].T)
    return unpack(words, bits, inputs).astype(np.float32)


def read_columns(tensor: SourceTensor, start: int, stop: int) -> F32:
    return np.asarray(read_array(tensor)[:, start:stop].T, np.float32)


def read_numbers(tensor: SourceTensor, start: int = 0, stop: int | None = None) -> F32:
    """Rows of codes that are numbers each, or of plain ones."""
    raw = read_array(tensor, start, stop)
    return E4M3[raw] if tensor.dtype == "F8_E4M3" else np.asarray(raw, np.float32)


def read_scales(tensor: SourceTensor, start: int = 0, stop: int | None = None) -> F32:
    if tensor.dtype in EXPONENTS:
        return E8M0[read_array(tensor, start, stop).view(np.uint8)]
    return read_numbers(tensor, start, stop)


def read_pairs(codes: SourceTensor, start: int, stop: int) -> F32:
    """4-bit floats [n, 2 m] of bytes [n, m], the low half of each first."""
    raw = read_array(codes, start, stop).view(np.uint8)
    pairs = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)
    return E2M1[pairs.reshape(len(raw), -1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledCodes:
    """A matrix of codes, less the code that stands for 0, times scales."""

    shape: tuple[int, int]
    codes: Numbers
    scales: Numbers
    """By rows of blocks."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zeros: Numbers | None = None
    """Codes that stand for 0, as the scales are."""
    groups: SourceTensor | None = None
    """Number of the group of each column; None: they follow each other."""
    fills: bool = False
    """Whether -1 fills numbers that the quantiser has left out: groups follow each other."""

    def make(
        self, name: str, *parts: SourceTensor | None, kind: Kind = "computed"
    ) -> DecodedTensor:
        """The tensor ``name``, which is made of ``parts``."""
        given = [part for part in (*parts, self.groups) if part is not None]
        return DecodedTensor.make(name, self.shape, self._decode, *given, kind=kind)

    def _decode(self, start: int, stop: int) -> F32:
        numbers = self.codes(start, stop)
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros, start, stop)
        return np.asarray(numbers * self._spread(self.scales, start, stop), np.float32)

    def _spread(self, read: Numbers, start: int, stop: int) -> F32:
        """The value of each weight of some rows, or an array that broadcasts to them."""
        rows, columns = self.block
        first, last = start // rows, -(-stop // rows)
        values = read(first, last).reshape(last - first, -1)
        own = values[np.arange(start, stop) // rows - first]
        if own.shape[1] == 1 and self.groups is None:
            return own
        index = np.arange(self.shape[1]) // columns
        if self.groups is not None:
            found = read_array(self.groups).astype(np.int64)
            if found.min() < -int(self.fills) or found.max() >= own.shape[1]:
                raise refuse_shape(self.groups, (self.shape[1],))
            index = index if found.min() < 0 else found
        return own[:, index]


def find_block(
    shape: tuple[int, ...], scales: SourceTensor, stated: Iterable[tuple[int, int]] = ()
) -> tuple[int, int]:
    """Rows and columns of a matrix of ``shape`` that share a scale: blocks as ``stated`` or of 128,
    or groups along the rows.  `UserError` P534 if shapes do not show them."""
    rows, columns = shape
    # Axes of length 1 may follow those of blocks.
    given = scales.shape[::2] if len(scales.shape) == 4 else scales.shape
    if given in ((), (1,), (1, 1)):
        return rows, columns
    if given in ((rows,), (rows, 1)):
        return 1, columns
    blocks = [*stated, (128, 128)]
    for high, wide in blocks:
        if given == (-(-rows // high), -(-columns // wide)):
            return high, wide
    if len(given) == 2 and given[0] == rows and columns % given[1] == 0:
        return 1, columns // given[1]
    high, wide = blocks[0]
    raise refuse_shape(scales, (-(-rows // high), -(-columns // wide)))


def take_matrix(
    tensors: Tensors, name: str, dtypes: tuple[str, ...] = ()
) -> tuple[SourceTensor, tuple[int, int]]:
    """The codes ``name`` and their shape; `UserError` P533 to P535 if they are no matrix."""
    codes = take_part(tensors, name, dtypes=dtypes)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    return codes, (codes.shape[0], codes.shape[1])


_STACKED = re.compile(r"(.*)\.([0-9]+)")
"""A matrix that `pi2.importing.checkpoint.divide_stacks` has named."""
_SCALES = ("_scale_inv", "_scale")


def decode_scaled(
    tensors: Tensors, name: str, stated: Iterable[tuple[int, int]] = ()
) -> DecodedTensor:
    """A matrix of 8-bit codes with its scales, and its zero points if it has some."""
    codes, shape = take_matrix(tensors, name)
    match = _STACKED.fullmatch(name)
    names = [name + ending for ending in _SCALES]
    if match is not None:
        names += [f"{match[1]}{ending}.{match[2]}" for ending in _SCALES]
    found = next((item for item in names if item in tensors), names[0])
    scales, zeros = take_part(tensors, found, dtypes=(*SCALE_TYPES, "U8")), None
    if f"{name}_zero_point" in tensors:
        types = ("I8", "F8_E4M3", "I64")
        zeros = take_part(tensors, f"{name}_zero_point", scales.shape, types)
    made = ScaledCodes(
        shape=shape,
        codes=partial(read_numbers, codes),
        scales=partial(read_scales, scales),
        block=find_block(shape, scales, stated),
        zeros=None if zeros is None else partial(read_numbers, zeros),
    )
    return made.make(name, codes, scales, zeros)


def quantize_exactly(rows: F32) -> Taken:
    """Rows [n, length] as int8 with powers of two as scales if groups fit exactly, else nearest;
    None if none fits."""
    if not np.isfinite(rows).all():
        return None
    groups = rows.reshape(len(rows), -1, GROUP)
    most = np.abs(groups).max(axis=2)
    exponents = np.frexp(most)[1] - 7
    # The smallest and the largest power of two of fp16.
    powers = np.ldexp(np.float32(1), np.clip(exponents, -24, 15)).astype(np.float32)
    codes = groups / powers[:, :, None]
    exact = (codes == np.rint(codes)).all(axis=2) & (np.abs(codes) <= 127).all(axis=2)
    if not exact.any():
        return None
    packing = find_packing("int8")
    packed, scales = packing.quantize(rows)
    assert scales is not None
    known = packing.unpack(packed, rows.shape[1]).reshape(groups.shape)
    chosen = np.where(exact[:, :, None], codes, known).astype(np.int8)
    scales = np.where(exact, powers, scales).astype(np.float16)
    return packing.pack(chosen.reshape(rows.shape)), scales
