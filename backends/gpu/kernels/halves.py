"""fp16 numbers in words of 32 bits, with integer instructions alone: not every device has fp16."""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c

_LEAST_NORMAL = 2.0**-14
_LARGEST = 65504.0


def widen_half(word: c.Expr, high: bool | c.Expr) -> c.Expr:
    """Return the low or high fp16 number of a word as float32, with integer instructions alone."""
    if isinstance(high, bool):
        shift = T.uint32(16 if high else 0)
    else:
        shift = T.cast(high, "uint32") * T.uint32(16)
    bits = c.let(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFFFF)))
    magnitude = c.let(T.bitwise_and(bits, T.uint32(0x7FFF)))
    # A device may flush subnormal float32 to zero: those of fp16 are made of their integer.
    small = T.cast(magnitude, "float32") * c.number(2.0**-24)
    exponent = T.uint32((127 - 15) << 23)
    normal_bits = c.let(T.shift_left(magnitude, T.uint32(13)) + exponent)
    normal = T.reinterpret(normal_bits, dtype="float32")
    value = c.let(T.Select(magnitude < T.uint32(1 << 10), small, normal))
    return T.Select(bits == magnitude, value, c.number(0.0) - value)


def narrow_half(value: c.Expr) -> c.Expr:
    """Return the bits of the nearest fp16 number, ties to even, of a named float32, as uint32; what
    is too large becomes the largest one."""
    size = c.let(T.min(T.abs(value), c.number(_LARGEST)))
    bits = c.let(T.reinterpret(size, dtype="uint32"))
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(13)), T.uint32(1))
    rounded = T.shift_right(bits + T.uint32(0xFFF) + odd, T.uint32(13))
    normal = rounded - T.uint32((127 - 15) << 10)
    # Adding 2^23 rounds to a whole number of the least fp16 numbers.
    counted = c.let(size * c.number(2.0**24) + c.number(2.0**23))
    small = T.reinterpret(counted, dtype="uint32") - T.uint32(0x4B000000)
    is_small = size < c.number(_LEAST_NORMAL)
    magnitude = c.let(T.Select(is_small, c.let(small), c.let(normal)))
    sign = T.Select(value < c.number(0.0), T.uint32(0x8000), T.uint32(0))
    return T.bitwise_or(magnitude, sign)
