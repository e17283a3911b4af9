"""4-bit floats (E2M1): MXFP4, groups of 32 with a power of two, and NVFP4, groups of 16 with an
8-bit float and one scale for the tensor.

MXFP4 is what gpt-oss is published in: experts in one tensor, whose matrices the model's code has
turned (columns are what experts give).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F16, F32, U8, Raw
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
from pi2.importing.quantized.eight_bits import decode_scaled
from pi2.importing.safetensors_file import SourceTensor, turn
from pi2.plan.weights.codes import pack_codes, unpack_codes
from pi2.plan.weights.layout import GROUP, Precision
from pi2.plan.weights.rounding import quantize

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
    """Whether the tensor's rows are the columns of what is stored."""

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
        if precision != "int8" or raw.shape[1] % GROUP:
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
    """Rows [n, length] as int8, with a power of two as the scale of every group whose numbers are
    multiples of it, up to 127; other groups are rounded to nearest.  None where that fits nowhere.

    4-bit floats with one power of two are such groups; those of a down projection, which a store
    has along its outputs, are as long as their exponents differ little.
    """
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
    packed, scales = quantize(rows, "int8")
    assert scales is not None
    known = unpack_codes(packed, rows.shape[1], "int8").reshape(groups.shape)
    chosen = np.where(exact[:, :, None], codes, known).astype(np.int8)
    scales = np.where(exact, powers, scales).astype(np.float16)
    return pack_codes(chosen.reshape(rows.shape), "int8"), scales


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
    """A matrix of packed 4-bit floats; ``divides``: whether the tensor's own scale divides those of
    groups, instead of multiplying."""
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


METHODS = {"mxfp4": read_mxfp4, "modelopt": read_modelopt, "modelopt_fp4": read_modelopt}
