"""Weights of two, four and eight bits: bitsandbytes, MXFP4, FP8, BitNet and their like.

BitNet's ternary weights: -1, 0 and 1 times one scale of the matrix.

They are published packed, four to a byte with the matrix's rows in quarters, or as the numbers that
training changes (``quantization_mode`` = ``online``). Their scale is then their mean magnitude.
BitNet also rounds activations to 8 bits, one scale for a token; how many bits activations have is a
plan's to say, not a store's.

Source: Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits
(arXiv 2402.17764), section 2."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from pi2.arrays import F16, F32, U8, Raw
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    E4M3,
    MOST_EXPERTS,
    DecodedTensor,
    decode_e8m0,
    decode_pairs,
    describe_decoded,
    read_array,
    refuse_shape,
    take_part,
)
from pi2.importing.safetensors_file import SourceTensor, turn
from pi2.plan.weights.layout import GROUP, Precision

_PART = re.compile(r"(.*)\.([0-9]+)")
"""A matrix that `pi2.importing.checkpoint.divide_stacks` has named."""
_SCALES = ("_scale_inv", "_scale")
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTensor(DecodedTensor):
    """8-bit floats or integers times scales."""

    codes: SourceTensor
    scales: SourceTensor
    block: tuple[int, int]
    """Rows and columns that share a scale."""

    def decode(self, start: int, stop: int) -> F32:
        raw = read_array(self.codes, start, stop)
        numbers = E4M3[raw] if self.codes.dtype == "F8_E4M3" else raw.astype(np.float32)
        rows, columns = self.block
        first, last = start // rows, -(-stop // rows)
        scales = read_scales(self.scales)
        if scales.size == 1:
            return np.asarray(numbers * scales.reshape(()), np.float32)
        own = scales.reshape(scales.shape[0], -1)[first:last]
        own = np.repeat(own, rows, axis=0)[start - first * rows :][: stop - start]
        if own.shape[1] > 1:
            own = np.repeat(own, columns, axis=1)[:, : numbers.shape[1]]
        return np.asarray(numbers * own, np.float32)


def read_scales(tensor: SourceTensor) -> F32:
    found = read_array(tensor).reshape(tensor.shape)
    if tensor.dtype == "F8_E8M0":
        return decode_e8m0(found)
    return np.asarray(found, np.float32)


def find_block(
    codes: SourceTensor, scales: SourceTensor, stated: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns that share a scale; `UserError` P534 if shapes do not show them."""
    rows, columns = codes.shape
    if scales.shape in ((), (1,), (1, 1)):
        return rows, columns
    if scales.shape in ((rows,), (rows, 1)):
        return 1, columns
    high, wide = stated or (128, 128)
    wanted = (-(-rows // high), -(-columns // wide))
    if scales.shape != wanted:
        raise refuse_shape(scales, wanted)
    return high, wide


def decode_scaled(
    tensors: Mapping[str, SourceTensor], name: str, stated: tuple[int, int] | None
) -> tuple[SourceTensor, str]:
    """A matrix of 8-bit codes with its scales, and the name of these."""
    codes = take_part(tensors, name)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    match = _PART.fullmatch(name)
    names = [name + ending for ending in _SCALES]
    if match is not None:
        names += [f"{match[1]}{ending}.{match[2]}" for ending in _SCALES]
    found = next((item for item in names if item in tensors), names[0])
    scales = take_part(tensors, found, dtypes=SCALE_TYPES)
    block = find_block(codes, scales, stated)
    own = describe_decoded(name, codes.shape, codes, scales)
    return ScaledTensor(**own, codes=codes, scales=scales, block=block), found


def read_fp8(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Weights of type F8_E4M3 with ``_scale_inv`` or ``_scale``; others are plain."""
    stated = None
    if settings.has("weight_block_size"):
        sizes = settings.read_list("weight_block_size")
        if len(sizes) != 2 or not all(type(size) is int and size >= 1 for size in sizes):
            raise settings.refuse("weight_block_size is not two sizes")
        stated = (sizes[0], sizes[1])
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E4M3":
            decoded[name], scales = decode_scaled(tensors, name, stated)
            decoded.pop(scales, None)
    return decoded


MX_GROUP, NV_GROUP = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitTensor(DecodedTensor):
    """Rows of 4-bit floats with a scale for each group; of one expert where there are several."""

    codes: SourceTensor
    """Bytes [rows, columns / 2], or of all experts [experts, rows, groups, bytes]."""
    scales: SourceTensor
    """[rows, groups], or [experts, rows, groups]: exponents, or 8-bit floats."""
    factor: float = 1.0
    """Scale of the whole tensor."""
    expert: int | None = None
    is_turned: bool = False
    """Whether the tensor's rows are the columns of the stored matrix."""

    def decode(self, start: int, stop: int) -> F32:
        rows = (self.shape[1] if self.is_turned else self.shape[0]) * (self.expert or 0)
        codes = _read_part(self.codes, rows + start, rows + stop)
        scales = _read_part(self.scales, rows + start, rows + stop)
        wide = decode_e8m0(scales) if self.is_mxfp4 else E4M3[scales] * np.float32(self.factor)
        numbers = decode_pairs(codes)
        groups = numbers.reshape(len(codes), wide.shape[1], -1) * wide[:, :, None]
        return np.asarray(groups.reshape(len(codes), -1), np.float32)

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype in ("U8", "F8_E8M0")

    def take_codes(self, raw: Raw, precision: Precision) -> tuple[U8, F16 | None] | None:
        if find_packing(precision).like != "q8_0" or raw.shape[1] % GROUP:
            return None
        return quantize_exactly(self.widen(raw))

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        stop = self.shape[0] if stop is None else stop
        if self.is_turned:
            return turn(self.decode(0, self.shape[1]))[start:stop]
        return self.decode(start, stop)

    def read_turned(self) -> Raw:
        return self.decode(0, self.shape[1]) if self.is_turned else turn(self.read_raw())


def quantize_exactly(rows: F32) -> tuple[U8, F16 | None] | None:
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


def _read_part(tensor: SourceTensor, start: int, stop: int) -> Raw:
    """Rows of codes or scales [n, .], of all experts one after the other."""
    if len(tensor.shape) == 2:
        return read_array(tensor, start, stop)
    rows = tensor.shape[1]
    first, last = start // rows, -(-stop // rows)
    found = read_array(tensor, first, last).reshape((last - first) * rows, -1)
    return found[start - first * rows : stop - first * rows]


def read_mxfp4(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """gpt-oss: ``NAME_blocks`` and ``NAME_scales`` are experts ``NAME.0``, ``NAME.1`` and so on."""
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_blocks"):
            continue
        base = name.removesuffix("_blocks")
        shape = tensor.shape
        codes = take_part(tensors, name, dtypes=("U8",))
        if len(shape) != 4 or shape[3] != MX_GROUP // 2 or not 1 <= shape[0] <= MOST_EXPERTS:
            raise refuse_shape(tensor, (-1, -1, -1, MX_GROUP // 2))
        scales = take_part(tensors, f"{base}_scales", shape[:3], ("U8", "F8_E8M0"))
        del decoded[name], decoded[f"{base}_scales"]
        for expert in range(shape[0]):
            own = describe_decoded(
                f"{base}.{expert}", (shape[2] * MX_GROUP, shape[1]), codes, scales
            )
            own["size_bytes"] //= shape[0]
            decoded[f"{base}.{expert}"] = FourBitTensor(
                **own, codes=codes, scales=scales, expert=expert, is_turned=True
            )
    return decoded


def decode_four_bits(
    tensors: Mapping[str, SourceTensor],
    name: str,
    codes_name: str,
    scales_name: str,
    global_name: str,
    *,
    divides: bool,
) -> SourceTensor:
    """A matrix of packed 4-bit floats; ``divides``: whether the tensor's own scale divides the
    groups' scales, instead of multiplying."""
    codes = take_part(tensors, codes_name, dtypes=("U8",))
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    found = tensors.get(scales_name)
    is_nv = found is not None and found.dtype == "F8_E4M3"
    group = NV_GROUP if is_nv else MX_GROUP
    if columns % group:
        raise refuse_shape(codes, (rows, -(-columns // group) * group // 2))
    types = ("F8_E4M3",) if is_nv else ("U8", "F8_E8M0")
    scales = take_part(tensors, scales_name, (rows, columns // group), types)
    factor, parts = 1.0, [codes, scales]
    if is_nv and global_name in tensors:
        whole = take_part(tensors, global_name, dtypes=("F32", "BF16", "F16"))
        value = float(read_array(whole).reshape(-1)[0])
        factor = 1.0 / value if divides and value else value
        parts.append(whole)
    own = describe_decoded(name, (rows, columns), *parts)
    return FourBitTensor(**own, codes=codes, scales=scales, factor=factor)


def read_modelopt(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """NVIDIA's exporter: 4-bit floats in bytes with ``_scale`` and ``_scale_2``, or 8-bit
    floats with ``_scale``."""
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E4M3" and f"{name}_scale" in tensors:
            decoded[name], _ = decode_scaled(tensors, name, None)
        elif tensor.dtype == "U8" and f"{name}_scale" in tensors:
            decoded[name] = decode_four_bits(
                tensors, name, name, f"{name}_scale", f"{name}_scale_2", divides=False
            )
    return decoded


_PARTS = 4
"""Codes in a byte."""
_PIECE_ROWS = 1024
"""Rows whose magnitudes are added up together."""
_SMALLEST_SCALE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TernaryTensor(DecodedTensor):
    """A matrix of -1, 0 and 1 times a scale."""

    codes: SourceTensor
    """Packed uint8 [rows / 4, columns]: row r is in bits 2 (r // n) of row r % n, n being their
    number; or plain numbers [rows, columns]."""
    scale: SourceTensor
    divides: bool
    """Whether numbers are divided by the scale, not multiplied."""

    def decode(self, start: int, stop: int) -> F32:
        scale = read_scales(self.scale).reshape(())
        factor = np.float32(1) / scale if self.divides else scale
        if self.codes.dtype != "U8":
            return self.codes.read(start, stop) * factor
        count = self.codes.shape[0]
        found = np.empty((stop - start, self.shape[1]), np.float32)
        for part in range(_PARTS):
            first, last = max(start, part * count), min(stop, (part + 1) * count)
            if first < last:
                raw = read_array(self.codes, first - part * count, last - part * count)
                codes = (raw.view(np.uint8) >> np.uint8(2 * part)) & np.uint8(3)
                if (codes == 3).any():
                    raise self._refuse_code()
                found[first - start : last - start] = codes
        return (found - np.float32(1)) * factor

    def _refuse_code(self) -> UserError:
        return UserError.of(
            "P539",
            f"tensor {self.codes.name!r} in {self.codes.file} has a code that no weight has: 3",
            help="ternary weights are packed as 0, 1 and 2; fetch the file again",
        )

    def is_ternary(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterTensor(DecodedTensor):
    """A matrix whose numbers are rounded to -1, 0 or 1 times their mean magnitude."""

    plain: SourceTensor
    find_scale: Callable[[SourceTensor], np.float32]
    """Gives 1 over the mean magnitude, which is found once."""

    def decode(self, start: int, stop: int) -> F32:
        scale = self.find_scale(self.plain)
        codes = np.clip(np.rint(self.plain.read(start, stop) * scale), -1, 1)
        return np.asarray(codes / scale, np.float32)

    def is_ternary(self) -> bool:
        return True


def _find_scale(plain: SourceTensor) -> np.float32:
    """1 over the mean magnitude of all numbers of a matrix."""
    rows, total = plain.shape[0], 0.0
    for start in range(0, rows, _PIECE_ROWS):
        piece = plain.read(start, min(start + _PIECE_ROWS, rows))
        total += float(np.abs(piece).sum(dtype=np.float64))
    mean = np.float32(total / (rows * plain.shape[1]))
    return np.float32(1) / max(mean, np.float32(_SMALLEST_SCALE))


def read_bitnet(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Every matrix with a scale, or of a layer where they are rounded as they are used."""
    settings.demand("use_rms_norm", False, False)
    divides = settings.read("linear_class", str, "bitlinear") != "autobitlinear"
    is_online = not divides and settings.read("quantization_mode", str, "offline") == "online"
    left_out = [str(item) for item in settings.read_list("modules_to_not_convert")]
    decoded, find_scale = dict(tensors), cache(_find_scale)
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            decoded[name] = _decode(tensors, name, divides)
            del decoded[f"{name}_scale"]
        elif is_online and len(tensor.shape) == 2 and ".layers." in name:
            if not any(part in name for part in left_out):
                own = describe_decoded(name, tensor.shape, tensor)
                decoded[name] = MasterTensor(**own, plain=tensor, find_scale=find_scale)
    return decoded


def _decode(tensors: Mapping[str, SourceTensor], name: str, divides: bool) -> SourceTensor:
    codes = take_part(tensors, name)
    scale = take_part(tensors, f"{name}_scale", dtypes=SCALE_TYPES)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    if int(np.prod(scale.shape)) != 1:
        raise refuse_shape(scale, (1,))
    rows, columns = codes.shape
    shape = (rows * _PARTS if codes.dtype == "U8" else rows, columns)
    own = describe_decoded(name, shape, codes, scale)
    return TernaryTensor(**own, codes=codes, scale=scale, divides=divides)


METHODS = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "mxfp4": read_mxfp4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "bitnet": read_bitnet,
}
