"""Packed weights on a device: how kernels take numbers out of words.

`pi2.backends.gpu.packing` writes both arrangements.  A group of 32 weights has 4 (int4), 8 (int8)
or 16 (fp16) words of 32 bits:

- int4: byte b of word c holds element 4c + b in its low and element 16 + 4c + b in its high nibble,
  as ``q + 8`` (the store's own words);
- int8: byte b of word c holds element 4c + b;
- fp16: word c holds elements 2c and 2c + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.halves import widen_half
from pi2.plan.weights.layout import GROUP, Precision

WORDS = {"int4": 4, "int8": 8, "fp16": 16}
"""Words of a group."""
_MAGIC = 0x4B000000
"""The bits of 2^23 as float32: or-ed with an integer below 2^23 they are the bits of their sum,
which costs less than a conversion on most GPUs."""


def list_elements(precision: Precision, word: int) -> list[int]:
    """Return which elements of a group word ``word`` holds, in the order of `unpack_word`."""
    return [int(element) for element in place_elements(precision, word)]


def place_elements(precision: Precision, word: c.Expr) -> list[c.Expr]:
    """Return which elements a group's word holds, for a word that only the device knows."""
    if precision == "int4":
        return [4 * word + b for b in range(4)] + [16 + 4 * word + b for b in range(4)]
    each = GROUP // WORDS[precision]
    return [each * word + index for index in range(each)]


def unpack_word(precision: Precision, word: c.Expr) -> list[c.Expr]:
    """Return the numbers of a word as float32, without their scale."""
    word = c.let(word)
    if precision == "int4":
        shifts = [8 * b for b in range(4)] + [8 * b + 4 for b in range(4)]
        return [c.let(_widen_code(word, shift, 15, 8)) for shift in shifts]
    if precision == "int8":
        # With its highest bit turned over, a signed byte is itself plus 128.
        turned = c.let(T.bitwise_xor(word, T.uint32(0x80808080)))
        return [c.let(_widen_code(turned, 8 * b, 255, 128)) for b in range(4)]
    return [c.let(widen_half(word, high)) for high in (False, True)]


def _widen_code(word: c.Expr, shift: int, mask: int, offset: int) -> c.Expr:
    """Return bits of a word as a number, less ``offset``."""
    bits = T.bitwise_and(T.shift_right(word, T.uint32(shift)), T.uint32(mask))
    sum_bits = c.let(T.bitwise_or(bits, T.uint32(_MAGIC)))
    return T.reinterpret(sum_bits, dtype="float32") - c.number(2**23 + offset)


@dataclass(frozen=True, slots=True)
class Scales:
    """An array of fp16 scales, or of words with two each where kernels have no fp16."""

    buffer: c.Buffer
    fp16: bool

    @classmethod
    def take(cls, kernel: c.Kernel, name: str, fp16: bool) -> Scales:
        """Declare the array."""
        return cls(kernel.take_array(name, "float16" if fp16 else "uint32"), fp16)

    def load(self, index: c.Expr) -> c.Expr:
        """Return a scale as float32."""
        if self.fp16:
            return c.let(T.cast(self.buffer[index], "float32"))
        index = c.let(index)
        word = c.let(self.buffer[T.shift_right(index, T.int32(1))])
        return c.let(widen_half(word, T.bitwise_and(index, T.int32(1))))


@dataclass(frozen=True, slots=True)
class Weights:
    """An array of packed weights in vectors of ``lanes`` words, and its scales."""

    precision: Precision
    buffer: c.Buffer
    lanes: int
    scales: Scales | None

    @classmethod
    def take(
        cls, kernel: c.Kernel, name: str, precision: Precision, lanes: int, fp16: bool
    ) -> Weights:
        """Declare ``name_weights`` and ``name_scales``."""
        dtype = "uint32" if lanes == 1 else f"uint32x{lanes}"
        buffer = kernel.take_array(f"{name}_weights", dtype)
        scaled = precision != "fp16"
        scales = Scales.take(kernel, f"{name}_scales", fp16) if scaled else None
        return cls(precision, buffer, lanes, scales)

    def load(self, index: c.Expr) -> list[c.Expr]:
        """Return the words of a vector."""
        vector = c.let(self.buffer[index])
        if self.lanes == 1:
            return [vector]
        return [c.let(c.take_lane(vector, lane)) for lane in range(self.lanes)]

    def load_scale(self, index: c.Expr) -> c.Expr:
        """Return a scale; 1 where weights have none."""
        return c.number(1.0) if self.scales is None else self.scales.load(index)
