"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM): packed integers, 8-bit
integers and floats, and 4-bit floats.

What a matrix is follows from its tensors: ``NAME.weight_packed`` or ``NAME.weight``, scales,
and zero points and group numbers where there are some.

GPTQ and AWQ: integers packed into 32-bit words, matrices with columns where others have rows.

Both have ``qweight``, ``qzeros`` and ``scales`` [groups, out]. GPTQ packs along the inputs, the
lowest bits first, and keeps zero points less one, except in its second format. Inputs may have any
order; ``g_idx`` states their groups. AWQ packs 8 neighbours of the outputs into a word, in the
order 0, 2, 4, 6, 1, 3, 5, 7."""

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
from pi2.importing.quantized.integers import decode_four_bits, decode_scaled
from pi2.importing.safetensors_file import SourceTensor

_FLOATS = ("F32", "BF16", "F16")


def unpack(words: Raw, bits: int, count: int) -> I32:
    """The first ``count`` codes of rows of 32-bit words [n, m], lowest bits first."""
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
    """Block of weights that share a scale, if a group of the configuration states one."""
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


_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Place in a word of each of 8 neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedIntegers(DecodedTensor):
    """A matrix [out, in]."""

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

    def read_turned(self) -> Raw:
        return self._decode_columns(0, self.shape[0])

    def _decode_columns(self, start: int, stop: int) -> F32:
        """Outputs ``start`` to ``stop`` as columns [in, n]."""
        inputs, per_word = self.shape[1], 32 // self.bits
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
        scales = take_part(tensors, f"{base}.scales", dtypes=_FLOATS)
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
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            decoded.pop(f"{base}.{part}", None)
        decoded[f"{base}.weight"] = TurnedIntegers(
            **describe_decoded(f"{base}.weight", (outputs, inputs), *parts),
            codes=codes,
            zeros=zeros,
            scales=scales,
            groups=groups,
            group_size=size,
            bits=bits,
            offset_of_zeros=offset_of_zeros,
            packs_outputs=packs_outputs,
        )
    return decoded


METHODS = {"compressed-tensors": read_compressed, "gptq": read_gptq, "awq": read_awq}
