"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM): packed integers, 8-bit
integers and floats, and 4-bit floats.

What a matrix is follows from its tensors: ``NAME.weight_packed`` or ``NAME.weight``, scales,
and zero points and group numbers where there are some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, Raw
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    DecodedTensor,
    describe_decoded,
    read_array,
    refuse_shape,
    take_part,
)
from pi2.importing.quantized.eight_bits import decode_scaled
from pi2.importing.quantized.four_bits import decode_four_bits
from pi2.importing.safetensors_file import SourceTensor

_FLOATS = ("F32", "BF16", "F16")


def unpack(words: Raw, bits: int, count: int) -> I32:
    """The first ``count`` codes of rows of 32-bit words [n, m], lowest bits first, no code across
    two words."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)[:, :count].astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers(DecodedTensor):
    """Integers of some bits in 32-bit words, with scales for groups along the rows."""

    codes: SourceTensor
    """[rows, words]."""
    scales: SourceTensor
    """[rows, groups]."""
    zeros: SourceTensor | None
    """Codes that stand for 0, packed along the rows [words, groups]; None: the middle does."""
    groups: SourceTensor | None
    """Number of the group of each column; None: they follow each other."""
    bits: int

    def decode(self, start: int, stop: int) -> F32:
        columns, middle = self.shape[1], 1 << (self.bits - 1)
        codes = unpack(read_array(self.codes, start, stop), self.bits, columns) - middle
        scales = np.asarray(read_array(self.scales, start, stop), np.float32)
        size = -(-columns // scales.shape[1])
        index = np.arange(columns) // size
        if self.groups is not None:
            index = read_array(self.groups).astype(np.int64)
            if index.min() < 0 or index.max() >= scales.shape[1]:
                raise refuse_shape(self.groups, (columns,))
        numbers = codes.astype(np.float32)
        if self.zeros is not None:
            packed = np.ascontiguousarray(read_array(self.zeros).T)
            zeros = unpack(packed, self.bits, self.shape[0]).T[start:stop] - middle
            numbers -= zeros.astype(np.float32)[:, index]
        return np.asarray(numbers * scales[:, index], np.float32)


def read_compressed(
    settings: Config, tensors: Mapping[str, SourceTensor]
) -> dict[str, SourceTensor]:
    """Every matrix that is compressed, by the name of its plain weight."""
    sizes = _read_blocks(settings)
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            if tensor.dtype == "U8":
                decoded[base] = decode_four_bits(
                    tensors, base, name, f"{base}_scale", f"{base}_global_scale", divides=True
                )
            else:
                decoded[base] = _decode_packed(tensors, base)
            del decoded[name]
        elif name.endswith(".weight") and tensor.dtype in ("F8_E4M3", "I8"):
            if f"{name}_zero_point" in tensors and tensor.dtype == "I8":
                zeros = read_array(tensors[f"{name}_zero_point"])
                if np.any(zeros):
                    raise settings.refuse(f"{name} has zero points, which 8-bit weights have not")
            decoded[name], _ = decode_scaled(tensors, name, sizes)
    return decoded


def _read_blocks(settings: Config) -> tuple[int, int] | None:
    """Block of weights that share a scale, where a group of the configuration states one."""
    groups = settings.read_table("config_groups")
    for key in ("group_0", "group_1", "FP8_BLOCK"):
        sizes = groups.read_table(key).read_table("weights").read_list("block_structure")
        if len(sizes) == 2 and all(type(size) is int and size >= 1 for size in sizes):
            return sizes[0], sizes[1]
    return None


def _decode_packed(tensors: Mapping[str, SourceTensor], base: str) -> SourceTensor:
    codes = take_part(tensors, f"{base}_packed", dtypes=("I32",))
    shape_tensor = take_part(tensors, f"{base}_shape", dtypes=("I64", "I32"))
    stated = [int(item) for item in read_array(shape_tensor).reshape(-1)]
    if len(stated) != 2 or min(stated) < 1 or len(codes.shape) != 2:
        raise refuse_shape(shape_tensor, (2,))
    rows, columns = stated
    widths = [bits for bits in (2, 4, 8) if codes.shape == (rows, -(-columns * bits // 32))]
    if not widths:
        raise refuse_shape(codes, (rows, columns // 8))
    bits = widths[0]
    scales = take_part(tensors, f"{base}_scale", dtypes=_FLOATS)
    if len(scales.shape) != 2 or scales.shape[0] != rows or not 1 <= scales.shape[1] <= columns:
        raise refuse_shape(scales, (rows, -1))
    parts, zeros, groups = [codes, scales], None, None
    if f"{base}_zero_point" in tensors:
        per_word = 32 // bits
        wanted = (-(-rows // per_word), scales.shape[1])
        zeros = take_part(tensors, f"{base}_zero_point", wanted, ("I32",))
        parts.append(zeros)
    if f"{base}_g_idx" in tensors:
        groups = take_part(tensors, f"{base}_g_idx", (columns,), ("I32", "I64"))
        parts.append(groups)
    return PackedIntegers(
        **describe_decoded(base, (rows, columns), *parts),
        codes=codes,
        scales=scales,
        zeros=zeros,
        groups=groups,
        bits=bits,
    )


METHODS = {"compressed-tensors": read_compressed}
