"""Keys and values as they are kept on the device: vectors of whole words, float32, two fp16 or four
int8 in each, and the scales of int8."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.halves import narrow_half, widen_half
from pi2.backends.gpu.kernels.specification import AttentionKernels

_LARGEST_CODE = 127.0


@dataclass(frozen=True, slots=True)
class KeptVectors:
    """Keys or values, or what latent attention keeps as both."""

    attention: AttentionKernels
    buffer: c.Buffer
    scales: c.Buffer | None

    @classmethod
    def take(cls, kernel: c.Kernel, attention: AttentionKernels, name: str) -> KeptVectors:
        """Declare the array, and its scales."""
        buffer = kernel.take_array(name, "uint32")
        int8 = attention.kv == "int8"
        return cls(
            attention, buffer, kernel.take_array(f"{name}_scales", "float32") if int8 else None
        )

    def find(self, sequence: c.Expr, head: c.Expr, position: c.Expr, context: c.Expr) -> c.Expr:
        """Return the number of a vector."""
        return (sequence * self.attention.kv_heads + head) * context + position

    def load(self, vector: c.Expr, word: c.Expr) -> list[c.Expr]:
        """Return the elements of a word, without a scale."""
        packed = c.let(self.buffer[vector * self.attention.row_words + word])
        if self.attention.kv == "fp32":
            return [c.let(T.reinterpret(packed, dtype="float32"))]
        if self.attention.kv == "fp16":
            return [c.let(widen_half(packed, high)) for high in (False, True)]
        codes = []
        for byte in range(4):
            shifted = c.let(T.shift_left(packed, T.uint32(24 - 8 * byte)))
            signed = T.shift_right(T.reinterpret(shifted, dtype="int32"), T.int32(24))
            codes.append(c.let(T.cast(signed, "float32")))
        return codes

    def load_scale(self, vector: c.Expr) -> c.Expr:
        """Return a vector's scale."""
        return c.number(1.0) if self.scales is None else c.let(self.scales[vector])


def find_kept_scale(attention: AttentionKernels, elements: c.Buffer) -> c.Expr:
    """Return the scale of the vector ``elements`` float32 [head_dim], shared, as fp16 rounds it."""
    top = c.Cell(c.number(0.0))
    with T.serial(attention.head_dim) as index:
        top.set(T.max(top.get(), T.abs(elements[index])))
    bits = narrow_half(c.let(top.get() * c.number(1.0 / _LARGEST_CODE)))
    return c.let(widen_half(c.let(bits), False))


def pack_word(
    attention: AttentionKernels, elements: c.Buffer, word: c.Expr, scale: c.Expr | None
) -> c.Expr:
    """Return a word of what is kept of a vector."""
    each = attention.elements_per_word
    values = [c.let(elements[word * each + index]) for index in range(each)]
    if attention.kv == "fp32":
        return T.reinterpret(values[0], dtype="uint32")
    if attention.kv == "fp16":
        low, high = (c.let(narrow_half(value)) for value in values)
        return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))
    assert scale is not None
    safe = T.max(scale, c.number(2.0**-24))
    factor = c.let(T.Select(scale > c.number(0.0), c.number(1.0) / safe, c.number(0.0)))
    packed: c.Expr = T.uint32(0)
    for byte, value in enumerate(values):
        # Adding 2^23 rounds to the nearest integer, ties to even; adding 128, whose bit is turned
        # over again, keeps the sum above it.
        rounded = c.let(value * factor + c.number(2**23 + 128))
        code = T.bitwise_and(T.reinterpret(rounded, dtype="uint32"), T.uint32(255))
        packed = T.bitwise_or(packed, T.shift_left(code, T.uint32(8 * byte)))
    return T.bitwise_xor(packed, T.uint32(0x80808080))
