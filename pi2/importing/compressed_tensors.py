"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM): packed integers, 8-bit
integers and floats, and 4-bit floats.

What a matrix is follows from its tensors: ``NAME.weight_packed`` or ``NAME.weight``, scales,
and zero points and group numbers where there are some.

GPTQ and AWQ: integers packed into 32-bit words, matrices with columns where others have rows.

Both have ``qweight``, ``qzeros`` and ``scales`` [groups, out]. GPTQ packs along the inputs, the
lowest bits first, and keeps zero points less one, except in its second format. Inputs may have any
order; ``g_idx`` states their groups. AWQ packs 8 neighbours of the outputs into a word, in the
order 0, 2, 4, 6, 1, 3, 5, 7."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, Raw
from pi2.importing.config import Config
from pi2.importing.decoded_tensor import (
    FLOATS,
    ScaledCodes,
    compute_tensor,
    count_words,
    decode_four_bits,
    decode_scaled,
    find_block,
    read_array,
    refuse_shape,
    take_part,
    unpack,
)
from pi2.importing.safetensors_file import SourceTensor

_FORMATS = (
    *("dense", "fakequant", "int-quantized", "float-quantized", "naive-quantized"),
    *("pack-quantized", "mixed-precision", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized"),
)
_AT_RUN_TIME = ("input", "output")
"""Places of transforms that no weights contain."""


def read_compressed(
    settings: Config, tensors: Mapping[str, SourceTensor]
) -> dict[str, SourceTensor]:
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
                decoded[base] = decode_four_bits(
                    tensors, base, name, f"{base}_scale", f"{base}_global_scale", divides=True
                )
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


def _decode_packed(
    tensors: Mapping[str, SourceTensor], base: str, widths: list[int]
) -> SourceTensor:
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
    scales = take_part(tensors, f"{base}_scale", dtypes=FLOATS)
    parts, zeros, groups = [codes, shape_tensor, scales], None, None
    if f"{base}_zero_point" in tensors:
        zeros = take_part(tensors, f"{base}_zero_point", dtypes=("I32", "I8"))
        packed = (count_words(rows, bits), scales.shape[-1] if scales.shape else 1)
        wanted = packed if zeros.dtype == "I32" else scales.shape
        if zeros.shape != wanted:
            raise refuse_shape(zeros, wanted)
        parts.append(zeros)
    if f"{base}_g_idx" in tensors:
        groups = take_part(tensors, f"{base}_g_idx", (columns,), ("I32", "I64"))
        parts.append(groups)
    made = ScaledCodes(
        shape=(rows, columns),
        codes=codes,
        scales=scales,
        block=find_block((rows, columns), scales),
        layout="words",
        bits=bits,
        zeros=zeros,
        groups=groups,
    )
    return compute_tensor(base, (rows, columns), made.decode, *parts)


_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Place in a word of each of 8 neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedIntegers:
    """A matrix [out, in]."""

    inputs: int
    codes: SourceTensor
    zeros: SourceTensor
    """[groups, words of outputs]."""
    scales: SourceTensor
    """[groups, out]."""
    groups: SourceTensor | None
    """Group of each input; None: they follow each other."""
    group_size: int
    bits: int
    offset_of_zeros: int
    """The number added to zero points."""
    packs_outputs: bool
    """Whether words of ``codes`` are of outputs (AWQ) or of inputs (GPTQ)."""

    def decode(self, start: int, stop: int) -> F32:
        turned: F32 = np.ascontiguousarray(self._decode_columns(start, stop).T)
        return turned

    def _decode_columns(self, start: int, stop: int) -> F32:
        """Outputs ``start`` to ``stop`` as columns [in, n]."""
        inputs, per_word = self.inputs, 32 // self.bits
        first, last = start // per_word, -(-stop // per_word)
        inside = slice(start - first * per_word, stop - first * per_word)
        zeros = self._unpack(read_array(self.zeros)[:, first:last])[:, inside]
        zeros += self.offset_of_zeros
        if self.packs_outputs:
            codes = self._unpack(read_array(self.codes)[:, first:last])[:, inside]
        else:
            words = np.ascontiguousarray(read_array(self.codes)[:, start:stop].T)
            codes = np.ascontiguousarray(unpack(words, self.bits, inputs).T)
        scales = np.asarray(read_array(self.scales), np.float32)[:, start:stop]
        index = np.arange(inputs) // self.group_size
        if self.groups is not None:
            index = read_array(self.groups).astype(np.int64)
            if index.min() < 0 or index.max() >= len(scales):
                raise refuse_shape(self.groups, (inputs,))
        return np.asarray((codes - zeros[index]).astype(np.float32) * scales[index])

    def _unpack(self, words: Raw) -> I32:
        """Codes of outputs [n, outputs] of words [n, m]."""
        codes = unpack(np.ascontiguousarray(words), self.bits, words.shape[1] * (32 // self.bits))
        if not self.packs_outputs:
            return codes
        return codes.reshape(len(words), -1, 8)[:, :, _AWQ_PLACES].reshape(len(words), -1)


def read_gptq(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """GPTQ of 2, 4 or 8 bits, with inputs in any order."""
    bits = settings.read("bits", int, 4)
    if bits not in (2, 4, 8):
        raise settings.refuse(f"GPTQ of {bits} bits packs codes across words, which is not read")
    layout = settings.read("checkpoint_format", str, "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise settings.refuse(f"the layout {layout!r} of GPTQ is made for one kernel")
    return _decode_all(settings, tensors, bits, 1 if layout == "gptq" else 0, packs_outputs=False)


def read_awq(settings: Config, tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """AWQ of 4 bits, as its kernel for matrices has it."""
    settings = settings.change({"bits": settings.read("bits", int, settings.read("w_bit", int, 4))})
    settings.demand("bits", 4, 4)
    version = settings.read("version", str, "gemm")
    if version.lower() != "gemm":
        raise settings.refuse(f"the layout {version!r} of AWQ is made for one kernel")
    return _decode_all(settings, tensors, 4, 0, packs_outputs=True)


def _decode_all(
    settings: Config,
    tensors: Mapping[str, SourceTensor],
    bits: int,
    offset_of_zeros: int,
    *,
    packs_outputs: bool,
) -> dict[str, SourceTensor]:
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
        parts, groups = [codes, zeros, scales], None
        if not packs_outputs and f"{base}.g_idx" in tensors:
            groups = take_part(tensors, f"{base}.g_idx", (inputs,), ("I32", "I64"))
            parts.append(groups)
        made = TurnedIntegers(
            inputs=inputs,
            codes=codes,
            zeros=zeros,
            scales=scales,
            groups=groups,
            group_size=size,
            bits=bits,
            offset_of_zeros=offset_of_zeros,
            packs_outputs=packs_outputs,
        )
        name = f"{base}.weight"
        decoded[name] = compute_tensor(name, (outputs, inputs), made.decode, *parts)
    return decoded
