"""Hugging Face checkpoints with quantised weights, shown as the plain tensors that they stand for.

compressed-tensors (llm-compressor, vLLM): ``NAME.weight_packed`` or ``NAME.weight``, and scales.
Zero points and group numbers are optional.

GPTQ and AWQ: integers in 32-bit words, matrices with columns where others have rows.
Both have ``qweight``, ``qzeros`` and ``scales`` [groups, out]. GPTQ packs along the inputs, the
lowest bits first, and keeps zero points less one, except in its second format. Inputs may have any
order; ``g_idx`` states their groups. AWQ packs 8 neighbours of the outputs into a word, in the
order 0, 2, 4, 6, 1, 3, 5, 7.

BitNet: -1, 0 and 1 times one scale of the matrix. They are packed, four to a byte with the
matrix's rows in quarters. Or they are the numbers that training changes (``quantization_mode`` =
``online``), whose mean magnitude is the scale. BitNet also rounds activations to 8 bits, one scale
for a token; how many bits activations have is a plan's to say, not a store's.
Source: Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits
(arXiv 2402.17764), section 2."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    EXPONENTS,
    FLOATS,
    MOST_EXPERTS,
    SCALE_TYPES,
    DecodedTensor,
    ScaledCodes,
    Tensors,
    count_words,
    decode_scaled,
    find_block,
    multiply_columns,
    read_array,
    read_columns,
    read_inputs,
    read_numbers,
    read_outputs,
    read_pairs,
    read_scales,
    refuse_shape,
    take_matrix,
    take_part,
    unpack,
)
from pi2.importing.safetensors_file import SourceTensor, TurnedTensor


def read_fp8(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
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


_MX_GROUP, _NV_GROUP = 32, 16


def _decode_groups(
    name: str,
    codes: SourceTensor,
    scales: SourceTensor,
    factor: SourceTensor | None = None,
    *,
    divides: bool = False,
) -> DecodedTensor:
    """4-bit floats, bytes [rows, columns / 2], with a scale for each group [rows, groups]: an
    exponent, or an 8-bit float that the tensor's own ``factor`` multiplies, or ``divides``."""
    shape, value = (codes.shape[0], 2 * codes.shape[1]), np.float32(1)
    if factor is not None:
        stated = float(read_array(factor).reshape(-1)[0])
        value = np.float32(1.0 / stated if divides and stated else stated)
    made = ScaledCodes(
        shape=shape,
        codes=partial(read_pairs, codes),
        scales=lambda start, stop: read_scales(scales, start, stop) * value,
        block=(1, shape[1] // scales.shape[1]),
    )
    return made.make(name, codes, scales, factor, kind="mxfp4" if factor is None else "nvfp4")


def _decode_four_bits(
    tensors: Tensors, name: str, codes_name: str, global_name: str, *, divides: bool
) -> DecodedTensor:
    """A matrix of packed 4-bit floats; ``divides``: whether the tensor's own scale divides the
    groups' scales, instead of multiplying."""
    codes, (rows, half) = take_matrix(tensors, codes_name, ("U8",))
    found = tensors.get(f"{name}_scale")
    is_nv = found is not None and found.dtype == "F8_E4M3"
    group = _NV_GROUP if is_nv else _MX_GROUP
    if 2 * half % group:
        raise refuse_shape(codes, (rows, -(-2 * half // group) * group // 2))
    types = ("F8_E4M3",) if is_nv else EXPONENTS
    scales = take_part(tensors, f"{name}_scale", (rows, 2 * half // group), types)
    whole = take_part(tensors, global_name, dtypes=FLOATS) if is_nv else None
    return _decode_groups(name, codes, scales, whole, divides=divides)


def read_mxfp4(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
    """gpt-oss: ``NAME_blocks`` and ``NAME_scales`` are experts ``NAME.0``, ``NAME.1`` and so on."""
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_blocks"):
            continue
        base, shape = name.removesuffix("_blocks"), tensor.shape
        codes = take_part(tensors, name, dtypes=("U8",))
        if len(shape) != 4 or shape[3] != _MX_GROUP // 2 or not 1 <= shape[0] <= MOST_EXPERTS:
            raise refuse_shape(tensor, (-1, -1, -1, _MX_GROUP // 2))
        scales = take_part(tensors, f"{base}_scales", shape[:3], EXPONENTS)
        widths = shape[2] * shape[3], shape[2]
        for expert in range(shape[0]):
            pairs = zip((codes, scales), widths, strict=True)
            parts = (own.cut(expert, shape=(shape[1], width)) for own, width in pairs)
            whole = _decode_groups(f"{base}.{expert}", *parts)
            decoded[whole.name] = TurnedTensor.of(whole, shape=whole.shape[::-1])
    return decoded


def read_modelopt(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
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
            matrix = _decode_four_bits(tensors, name, name, f"{name}_scale_2", divides=False)
        own = f"{name.removesuffix('weight')}pre_quant_scale"
        if own in tensors:
            factors = take_part(tensors, own, matrix.shape[1:], FLOATS)
            numbers = read_scales(factors).reshape(1, -1)
            matrix = multiply_columns(matrix, numbers, *matrix.parts, factors)
        decoded[name] = matrix
    return decoded


def _decode_pairs_of_rows(tensors: Tensors, name: str) -> DecodedTensor:
    """A matrix of signed 4-bit integers [rows / 2, columns].  The whole tensor's scale is
    unused: kernels round the numbers to 8-bit floats with it."""
    codes, (half, columns) = take_matrix(tensors, name)
    scales, further = take_part(tensors, f"{name}_scale"), tensors.get(f"{name}_scale_2")

    def read(start: int, stop: int) -> F32:
        stored = read_array(codes, start // 2, -(-stop // 2)).view(np.uint8)
        # The upper half of a byte and its sign; shifted, they are a signed number of 4 bits.
        halves = np.stack([stored << np.uint8(4), stored & np.uint8(0xF0)], axis=1)
        numbers = (halves.view(np.int8) >> 4).reshape(-1, columns)
        return numbers[start % 2 :][: stop - start].astype(np.float32)

    shape = 2 * half, columns
    block, scale = find_block(shape, scales), partial(read_scales, scales)
    made = ScaledCodes(shape=shape, codes=read, scales=scale, block=block)
    return made.make(name, codes, scales, further)


_FORMATS = (
    *("dense", "fakequant", "int-quantized", "float-quantized", "naive-quantized"),
    *("pack-quantized", "mixed-precision", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized"),
)
_AT_RUN_TIME = ("input", "output")
"""Places of transforms that no weights contain."""


def read_compressed(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
    """Every matrix that is compressed, by the name of its plain weight."""
    groups = list(_list_tables(settings.read_table("config_groups")))
    for group in (settings, *groups):
        form = group.read("format", str, "dense")
        if form not in _FORMATS:
            raise settings.refuse(f"weights in the format {form!r} are not read")
    _refuse_transforms(settings)
    weights = [group.read_table("weights") for group in groups]
    widths = [item.read("num_bits", int, 0) for item in weights]
    blocks = list(_list_blocks(weights))
    decoded = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            if tensor.dtype == "U8":
                whole = f"{base}_global_scale"
                decoded[base] = _decode_four_bits(tensors, base, name, whole, divides=True)
            else:
                decoded[base] = _decode_packed(tensors, base, widths)
        elif name.endswith(".weight") and tensor.dtype in ("F8_E4M3", "I8"):
            decoded[name] = decode_scaled(tensors, name, blocks)
    return decoded


def _list_tables(table: Config) -> Iterator[Config]:
    """The tables in a table; a list of targets instead of one stands for a known scheme."""
    for key, value in table.values.items():
        if isinstance(value, Mapping):
            yield table.read_table(key)


def _refuse_transforms(settings: Config) -> None:
    for group in _list_tables(settings.read_table("transform_config").read_table("config_groups")):
        for item in group.read_list("apply"):
            if isinstance(item, Mapping) and item.get("location") in _AT_RUN_TIME:
                raise settings.refuse("inputs of matrices are rotated, which pi2 does not do")


def _list_blocks(weights: list[Config]) -> Iterator[tuple[int, int]]:
    """Blocks of weights that share a scale, which groups of the configuration state."""
    for item in weights:
        sizes = item.read_list("block_structure")
        if len(sizes) == 2 and all(type(size) is int and size >= 1 for size in sizes):
            yield sizes[0], sizes[1]


def _decode_packed(tensors: Tensors, base: str, widths: list[int]) -> SourceTensor:
    """A matrix of integers in words; ``widths``: bits of codes that the configuration states."""
    codes = take_part(tensors, f"{base}_packed", dtypes=("I32",))
    shape_tensor = take_part(tensors, f"{base}_shape", dtypes=("I64", "I32"))
    stated = [int(item) for item in read_array(shape_tensor).reshape(-1)]
    if len(stated) != 2 or min(stated) < 1 or len(codes.shape) != 2:
        raise refuse_shape(shape_tensor, (2,))
    rows, columns = stated
    known = [bits for bits in widths if 1 <= bits <= 8] or range(1, 9)
    found = [bits for bits in known if codes.shape == (rows, count_words(columns, bits))]
    if not found:
        raise refuse_shape(codes, (rows, count_words(columns, known[-1])))
    bits = found[0]
    middle = np.int32(1 << (bits - 1))
    scales = take_part(tensors, f"{base}_scale", dtypes=FLOATS)
    zeros, groups, read_zeros = tensors.get(f"{base}_zero_point"), None, None
    if zeros is not None:
        own = take_part(tensors, zeros.name, dtypes=("I32", "I8"))
        packed = (count_words(rows, bits), scales.shape[-1] if scales.shape else 1)
        wanted = packed if own.dtype == "I32" else scales.shape
        if own.shape != wanted:
            raise refuse_shape(own, wanted)

        def read_words(start: int, stop: int) -> F32:
            words = np.ascontiguousarray(read_array(own).T)
            return (unpack(words, bits, rows).T - middle)[start:stop].astype(np.float32)

        read_zeros = read_words if own.dtype == "I32" else partial(read_numbers, own)
    if f"{base}_g_idx" in tensors:
        groups = take_part(tensors, f"{base}_g_idx", (columns,), ("I32", "I64"))

    def read(start: int, stop: int) -> F32:
        codes_read = unpack(read_array(codes, start, stop), bits, columns)
        return (codes_read - middle).astype(np.float32)

    made = ScaledCodes(
        shape=(rows, columns),
        codes=read,
        scales=partial(read_scales, scales),
        block=find_block((rows, columns), scales),
        zeros=read_zeros,
        groups=groups,
        fills=True,
    )
    return made.make(base, codes, shape_tensor, scales, zeros)


def read_gptq(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
    """GPTQ of 2, 4 or 8 bits, with inputs in any order."""
    bits = settings.read("bits", int, 4)
    if bits not in (2, 4, 8):
        raise settings.refuse(f"GPTQ of {bits} bits packs codes across words, which is not read")
    layout = settings.read("checkpoint_format", str, "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise settings.refuse(f"the layout {layout!r} of GPTQ is made for one kernel")
    return _decode_all(settings, tensors, bits, 1 if layout == "gptq" else 0, packs_outputs=False)


def read_awq(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
    """AWQ of 4 bits, as its kernel for matrices has it."""
    settings = settings.change({"bits": settings.read("bits", int, settings.read("w_bit", int, 4))})
    settings.demand("bits", 4, 4)
    version = settings.read("version", str, "gemm")
    if version.lower() != "gemm":
        raise settings.refuse(f"the layout {version!r} of AWQ is made for one kernel")
    return _decode_all(settings, tensors, 4, 0, packs_outputs=True)


def _decode_all(
    settings: Config, tensors: Tensors, bits: int, offset_of_zeros: int, *, packs_outputs: bool
) -> dict[str, SourceTensor]:
    """Matrices [out, in]; ``packs_outputs``: whether words of codes are of outputs (AWQ) or of
    inputs (GPTQ)."""
    stated = settings.read("group_size", int, settings.read("q_group_size", int, 128))
    decoded = dict(tensors)
    for name in tensors:
        if not name.endswith(".qweight"):
            continue
        base = name.removesuffix(".qweight")
        codes = take_part(tensors, name, dtypes=("I32",))
        scales = take_part(tensors, f"{base}.scales", dtypes=FLOATS)
        if len(codes.shape) != 2 or len(scales.shape) != 2 or 0 in (*codes.shape, *scales.shape):
            raise refuse_shape(codes, (-1, -1))
        per_word, outputs = 32 // bits, scales.shape[1]
        inputs = codes.shape[0] * (1 if packs_outputs else per_word)
        words = -(-outputs // per_word)
        if codes.shape[1] != (words if packs_outputs else outputs):
            raise refuse_shape(codes, (codes.shape[0], words if packs_outputs else outputs))
        size = inputs if stated < 1 else stated
        if scales.shape[0] != -(-inputs // size):
            raise refuse_shape(scales, (-(-inputs // size), outputs))
        zeros = take_part(tensors, f"{base}.qzeros", (scales.shape[0], words), ("I32",))
        groups = None
        if not packs_outputs and f"{base}.g_idx" in tensors:
            groups = take_part(tensors, f"{base}.g_idx", (inputs,), ("I32", "I64"))
        read_zeros = partial(read_outputs, zeros, bits, offset_of_zeros, packs_outputs)
        made = ScaledCodes(
            shape=(outputs, inputs),
            codes=partial(read_outputs, codes, bits, 0, True)
            if packs_outputs
            else partial(read_inputs, codes, bits, inputs),
            scales=partial(read_columns, scales),
            block=(1, size),
            zeros=read_zeros,
            groups=groups,
        )
        decoded[f"{base}.weight"] = made.make(f"{base}.weight", codes, zeros, scales)
    return decoded


_PARTS = 4
"""Codes in a byte."""
_PIECE_ROWS = 1024
"""Rows whose magnitudes are added up together."""
_SMALLEST_SCALE = 1e-5


def _read_quarters(codes: SourceTensor, start: int, stop: int) -> F32:
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

    return DecodedTensor.make(plain.name, plain.shape, decode, plain, kind="ternary")


def _find_scale(plain: SourceTensor) -> np.float32:
    """1 over the mean magnitude of all numbers of a matrix."""
    rows, total = plain.shape[0], 0.0
    for start in range(0, rows, _PIECE_ROWS):
        piece = plain.read(start, min(start + _PIECE_ROWS, rows))
        total += float(np.abs(piece).sum(dtype=np.float64))
    mean = np.float32(total / (rows * plain.shape[1]))
    return np.float32(1) / max(mean, np.float32(_SMALLEST_SCALE))


def read_bitnet(settings: Config, tensors: Tensors) -> dict[str, SourceTensor]:
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


def _decode(tensors: Tensors, name: str, divides: bool) -> SourceTensor:
    """A matrix whose numbers a scale multiplies, or divides."""
    codes, (rows, columns) = take_matrix(tensors, name)
    scale = take_part(tensors, f"{name}_scale", dtypes=SCALE_TYPES)
    if int(np.prod(scale.shape)) != 1:
        raise refuse_shape(scale, (1,))
    is_packed = codes.dtype == "U8"
    shape = (rows * _PARTS if is_packed else rows, columns)

    def read_scale(start: int, stop: int) -> F32:
        own = read_scales(scale)
        return np.float32(1) / own if divides else own

    read = partial(_read_quarters, codes) if is_packed else codes.read
    made = ScaledCodes(shape=shape, codes=read, scales=read_scale, block=shape)
    return made.make(name, codes, scale, kind="ternary")


_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8")
Read = Callable[[Config, Tensors], dict[str, SourceTensor]]
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


def decode_weights(file: Path, settings: Mapping[str, Any], tensors: Tensors) -> Tensors:
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
