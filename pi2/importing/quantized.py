"""Hugging Face checkpoints whose weights are quantised: shown as the plain tensors that they stand
for.  Here are weights of two, four and eight bits: MXFP4, FP8, ModelOpt, BitNet.

BitNet's ternary weights: -1, 0 and 1 times one scale of the matrix.

They are published packed, four to a byte with the matrix's rows in quarters, or as the numbers that
training changes (``quantization_mode`` = ``online``). Their scale is then their mean magnitude.
BitNet also rounds activations to 8 bits, one scale for a token; how many bits activations have is a
plan's to say, not a store's.

Source: Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits
(arXiv 2402.17764), section 2."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.compressed_tensors import read_awq, read_compressed, read_gptq
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    FLOATS,
    MOST_EXPERTS,
    MX_GROUP,
    SCALE_TYPES,
    DecodedTensor,
    ScaledCodes,
    compute_tensor,
    decode_four_bits,
    decode_groups,
    decode_scaled,
    find_block,
    multiply_columns,
    read_array,
    read_scales,
    refuse_shape,
    take_part,
)
from pi2.importing.safetensors_file import SourceTensor, TurnedTensor


def read_fp8(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Weights of type F8_E4M3 with ``_scale_inv`` or ``_scale``; others are plain."""
    stated = []
    if settings.has("weight_block_size"):
        sizes = settings.read_list("weight_block_size")
        if len(sizes) != 2 or not all(type(size) is int and size >= 1 for size in sizes):
            raise settings.refuse("weight_block_size is not two sizes")
        stated = [(sizes[0], sizes[1])]
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E4M3":
            decoded[name] = decode_scaled(tensors, name, stated)
    return decoded


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
        for expert in range(shape[0]):
            sizes = shape[1], shape[2] * MX_GROUP
            first = expert * shape[1]
            whole = decode_groups(f"{base}.{expert}", sizes, codes, scales, first=first)
            decoded[f"{base}.{expert}"] = TurnedTensor.of(
                whole, shape=sizes[::-1], size_bytes=whole.size_bytes // shape[0]
            )
    return decoded


def read_modelopt(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """NVIDIA's exporter, by the types of weights and scales: each matrix may have another method.

    Factors of a matrix's inputs, ``pre_quant_scale``, are multiplied into its columns."""
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}_scale")
        if scales is None or tensor.dtype not in ("F8_E4M3", "I8", "U8"):
            continue
        if tensor.dtype != "U8":
            matrix = decode_scaled(tensors, name)
        elif scales.dtype in FLOATS:
            matrix = _decode_pairs_of_rows(tensors, name)
        else:
            further = f"{name}_scale_2"
            matrix = decode_four_bits(tensors, name, name, f"{name}_scale", further, divides=False)
        own = f"{name.removesuffix('weight')}pre_quant_scale"
        if own in tensors:
            factors = take_part(tensors, own, matrix.shape[1:], FLOATS)
            numbers = read_scales(factors).reshape(1, -1)
            matrix = multiply_columns(matrix, numbers, *matrix.parts, factors)
        decoded[name] = matrix
    return decoded


def _decode_pairs_of_rows(tensors: Mapping[str, SourceTensor], name: str) -> DecodedTensor:
    """A matrix of signed 4-bit integers [rows / 2, columns].  The whole tensor's scale is
    unused: kernels round the numbers to 8-bit floats with it."""
    codes = take_part(tensors, name)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    shape = (2 * codes.shape[0], codes.shape[1])
    scales, further = take_part(tensors, f"{name}_scale"), tensors.get(f"{name}_scale_2")
    parts = [codes, scales, *([] if further is None else [further])]
    block = find_block(shape, scales)
    made = ScaledCodes(shape=shape, codes=codes, scales=scales, block=block, layout="pairs of rows")
    return compute_tensor(name, shape, made.decode, *parts)


_PARTS = 4
"""Codes in a byte."""
_PIECE_ROWS = 1024
"""Rows whose magnitudes are added up together."""
_SMALLEST_SCALE = 1e-5


def _decode_parts(codes: SourceTensor, start: int, stop: int) -> F32:
    """Rows of -1, 0 and 1 that are packed uint8 [rows / 4, columns]: row r is in bits 2 (r // n) of
    row r % n, n being their number."""
    count = codes.shape[0]
    found = np.empty((stop - start, codes.shape[1]), np.float32)
    for part in range(_PARTS):
        first, last = max(start, part * count), min(stop, (part + 1) * count)
        if first < last:
            raw = read_array(codes, first - part * count, last - part * count)
            fields = (raw.view(np.uint8) >> np.uint8(2 * part)) & np.uint8(3)
            if (fields == 3).any():
                raise UserError.of(
                    "P539",
                    f"tensor {codes.name!r} in {codes.file} has a code that no weight has: 3",
                    help="ternary weights are packed as 0, 1 and 2; fetch the file again",
                )
            found[first - start : last - start] = fields
    return found - np.float32(1)


def _round_online(plain: SourceTensor) -> DecodedTensor:
    """A matrix whose numbers are rounded to -1, 0 or 1 times their mean magnitude."""
    find_scale = cache(_find_scale)

    def decode(start: int, stop: int) -> F32:
        scale = find_scale(plain)
        codes = np.clip(np.rint(plain.read(start, stop) * scale), -1, 1)
        return np.asarray(codes / scale, np.float32)

    return compute_tensor(plain.name, plain.shape, decode, plain, kind="ternary")


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
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            decoded[name] = _decode(tensors, name, divides)
        elif is_online and len(tensor.shape) == 2 and ".layers." in name:
            if not any(part in name for part in left_out):
                decoded[name] = _round_online(tensor)
    return decoded


def _decode(tensors: Mapping[str, SourceTensor], name: str, divides: bool) -> SourceTensor:
    """A matrix whose numbers a scale multiplies, or divides."""
    codes = take_part(tensors, name)
    scale = take_part(tensors, f"{name}_scale", dtypes=SCALE_TYPES)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise refuse_shape(codes, (-1, -1))
    if int(np.prod(scale.shape)) != 1:
        raise refuse_shape(scale, (1,))
    rows, columns = codes.shape
    is_packed = codes.dtype == "U8"
    shape = (rows * _PARTS if is_packed else rows, columns)

    def decode(start: int, stop: int) -> F32:
        own = read_scales(scale).reshape(())
        factor = np.float32(1) / own if divides else own
        found = _decode_parts(codes, start, stop) if is_packed else codes.read(start, stop)
        return np.asarray(found * factor, np.float32)

    return compute_tensor(name, shape, decode, codes, scale, kind="ternary")


_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8")
Read = Callable[[Config, Mapping[str, SourceTensor]], dict[str, SourceTensor]]
"""Gives tensors with weights that are decoded as they are read, by the names of plain weights."""
_METHODS: Mapping[str, Read] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "fp8": read_fp8,
    "fbgemm_fp8": read_fp8,
    "mxfp4": read_mxfp4,
    **dict.fromkeys(_MODELOPT, read_modelopt),
    "bitnet": read_bitnet,
}
"""By ``quantization_config.quant_method``."""


def decode_weights(
    file: Path, settings: Mapping[str, Any], tensors: Mapping[str, SourceTensor]
) -> Mapping[str, SourceTensor]:
    """Tensors as in a plain checkpoint, by what ``file`` says of quantised weights, if anything;
    `UserError` P533 to P535, P544 for unknown methods."""
    if not settings:
        return tensors
    own = Config(file, settings)
    # Some say how, and leave the name of the method out.
    method = own.read("quant_method", str, "fp8" if own.has("weight_block_size") else "")
    if method not in _METHODS:
        raise UserError.of(
            "P544",
            f"{file} says that the weights are quantised by {method!r}, which pi2 does not read",
            help=f"take a checkpoint of another kind: plain, or {', '.join(sorted(_METHODS))}",
            file=str(file),
        )
    decoded = _METHODS[method](own, tensors)
    stored = {
        name: item.stored if isinstance(item, TurnedTensor) else item
        for name, item in decoded.items()
    }
    made = {name: item for name, item in stored.items() if isinstance(item, DecodedTensor)}
    parts = {part.name for item in made.values() for part in item.parts}
    return {name: item for name, item in decoded.items() if name in made or name not in parts}


def find_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a configuration says of quantised weights; nothing if they are plain."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, Mapping) and found:
                return found
    return {}
