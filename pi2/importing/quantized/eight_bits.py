"""FP8 (E4M3) weights with a scale for the tensor, each row, or each block, as DeepSeek and Qwen
publish theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    E4M3,
    DecodedTensor,
    decode_e8m0,
    describe_decoded,
    read_array,
    refuse_shape,
    take_part,
)
from pi2.importing.safetensors_file import SourceTensor

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
    """All scales of a tensor."""
    found = read_array(tensor).reshape(tensor.shape)
    if tensor.dtype == "F8_E8M0":
        return decode_e8m0(found)
    return np.asarray(found, np.float32)


def find_block(
    codes: SourceTensor, scales: SourceTensor, stated: tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns that share a scale; `UserError` P534 if shapes do not say so."""
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


METHODS = {"fp8": read_fp8, "fbgemm_fp8": read_fp8}
