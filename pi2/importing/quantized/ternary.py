"""BitNet's ternary weights: -1, 0 and 1 times one scale of the matrix.

They are published packed, four to a byte with the matrix's rows in quarters, or as the numbers that
training changes (``quantization_mode`` = ``online``), whose mean magnitude is the scale that they
are rounded with.  BitNet also rounds activations to 8 bits, one scale for a token; how many bits
activations have is a plan's to say, not a store's.

Source: Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits
(arXiv 2402.17764), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    DecodedTensor,
    describe_decoded,
    read_array,
    refuse_shape,
    take_part,
)
from pi2.importing.quantized.eight_bits import SCALE_TYPES, read_scales
from pi2.importing.safetensors_file import SourceTensor

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


METHODS = {"bitnet": read_bitnet}
