"""Small vocabulary for GPU kernels over TVMScript's builder.

A kernel states its threads, its loops, its registers and the memory that a work group shares.
Every function adds to the kernel under construction.

Packed weights on a device: how kernels take numbers out of words.

`pi2.backends.gpu.packing` writes both arrangements.  A group of 32 weights has 4 (int4), 8 (int8)
or 16 (fp16) words of 32 bits:

- int4: byte b of word c holds element 4c + b in its low and element 16 + 4c + b in its high nibble,
  as ``q + 8`` (the store's own words);
- int8: byte b of word c holds element 4c + b;
- fp16: word c holds elements 2c and 2c + 1."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.gpu.kernels.specification import ONCE, Axis, NumberType
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, Precision

Expr = Any
Buffer = Any
Read = Callable[[Expr], Expr]


class Cell(v.Cell):
    """A variable of a thread."""

    def __init__(self, start: Expr) -> None:
        self._cell = T.alloc_buffer((1,), start.ty.dtype, scope="local")
        self.set(start)

    def add(self, value: Expr) -> None:
        self.set(self.get() + value)


def let(value: Expr) -> Expr:
    """Name a value: it is computed once, however often it is used."""
    return Cell(value).get()


def number(value: float) -> Expr:
    """Return a float32 literal."""
    bits = struct.pack("<f", value)
    # Sources have seven digits of a number: others are given by their bits.
    if struct.pack("<f", float(f"{value:e}")) == bits:
        return T.FloatImm("float32", float(value))
    return T.reinterpret(T.uint32(struct.unpack("<I", bits)[0]), dtype="float32")


def make_zeros(count: int) -> list[Cell]:
    """Return float32 variables that are 0."""
    return [Cell(number(0.0)) for _ in range(count)]


def take_lane(vector: Expr, lane: int) -> Expr:
    return Shuffle([vector], [lane])


def divide_up(value: Expr | int, by: int) -> Expr:
    """Return how many pieces of ``by`` hold ``value`` elements."""
    return -(-value // by) if isinstance(value, int) else T.floordiv(value + (by - 1), by)


def share(size: int, dtype: str = "float32") -> Buffer:
    """Return an array that the threads of a work group share."""
    return T.alloc_buffer((size,), dtype, scope="shared")


def wait_for_group() -> None:
    """Barrier of the work group, with its writes to shared arrays."""
    T.evaluate(T.tvm_storage_sync("shared"))


@contextmanager
def walk(count: Expr | int, thread: Expr, threads: int) -> Iterator[Expr]:
    """Add the body for each of ``count`` elements, which ``threads`` have in turns."""
    with T.serial(divide_up(count, threads)) as turn:
        element = let(turn * threads + thread)
        with when(element < count):
            yield element


def add_in_group(
    read: Read, count: Expr | int, thread: Expr, threads: int, shared: Buffer | None = None
) -> Expr:
    """Return the sum of ``read(element)`` over ``count`` elements, the same in all ``threads`` (a
    power of 2); ``shared`` has an element for each of them."""
    own = Cell(number(0.0))
    with walk(count, thread, threads) as element:
        own.add(read(element))
    shared = share(threads) if shared is None else shared
    store(shared, thread, own.get())
    wait_for_group()
    half = threads // 2
    while half:
        with when(thread < half):
            store(shared, thread, shared[thread] + shared[thread + half])
        wait_for_group()
        half //= 2
    total = let(shared[0])
    wait_for_group()
    return total


def add_squares(
    read: Read, count: Expr | int, thread: Expr, threads: int, shared: Buffer | None = None
) -> Expr:
    """Return the sum of the squares of elements likewise."""

    def square(element: Expr) -> Expr:
        value = let(read(element))
        return value * value

    return add_in_group(square, count, thread, threads, shared)


def find_norm(
    read: Read,
    count: Expr | int,
    epsilon: Expr,
    thread: Expr,
    threads: int,
    shared: Buffer | None = None,
) -> Expr:
    """Return the factor that makes the root mean square of ``count`` elements 1, the same in all
    threads."""
    size = number(count) if isinstance(count, int) else T.cast(count, "float32")
    mean = add_squares(read, count, thread, threads, shared) / size
    return let(number(1.0) / T.sqrt(mean + epsilon))


def squash(value: Expr) -> Expr:
    """Return 1 / (1 + exp(-value))."""
    return number(1.0) / (number(1.0) + T.exp(number(0.0) - value))


def store(buffer: Buffer, index: Expr, value: Expr) -> None:
    T.buffer_store(buffer, value, [index])


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Add what follows for threads of which ``condition`` holds."""
    with T.If(condition), T.Then():
        yield


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a thread: its group in the grid and its place in the group, by axis."""

    group: tuple[Expr, Expr]
    thread: tuple[Expr, Expr, Expr]


@dataclass
class Kernel:
    """A kernel under construction."""

    name: str
    block: tuple[int, int, int]
    arrays: dict[str, str] = field(default_factory=dict)
    """Types by name, in the order of declaration."""
    numbers: dict[str, NumberType] = field(default_factory=dict)
    grid: tuple[Axis, Axis] = (ONCE, ONCE)
    function: tvm.tirx.PrimFunc | None = None
    _expressions: dict[str, Expr] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def declare(cls, name: str, block: tuple[int, int, int]) -> Iterator[Kernel]:
        """Declare a kernel: parameters first, then `run`."""
        kernel = cls(name, block)
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name(name)
                T.func_attr({"global_symbol": name, "tirx.noalias": True})
                yield kernel
        kernel.function = builder.get()

    def take_arrays(self, names: str, dtype: str = "float32") -> list[Buffer]:
        return [self.take_array(name, dtype) for name in names.split()]

    def take_array(self, name: str, dtype: str = "float32") -> Buffer:
        self.arrays[name] = dtype
        handle = T.arg(f"{name}_handle", T.handle())
        return IRBuilder.name(name, T.match_buffer(handle, (T.int32(),), dtype, align=16))

    def take_numbers(self, names: str) -> list[Expr]:
        return [self.take_number(name) for name in names.split()]

    def take_number(self, name: str, dtype: NumberType = "int32") -> Expr:
        self.numbers[name] = dtype
        self._expressions[name] = T.arg(name, getattr(T, dtype)())
        return self._expressions[name]

    @contextmanager
    def run(self, x: Axis = ONCE, y: Axis = ONCE) -> Iterator[Place]:
        """Add what every thread does, in as many work groups as the axes say."""
        self.grid = (x, y)
        with ExitStack() as stack:

            def bind(tag: str, extent: Expr) -> Expr:
                return stack.enter_context(T.launch_thread(tag, extent))

            groups = [
                T.int32(0) if axis == ONCE else bind(f"blockIdx.{letter}", self._count(axis))
                for letter, axis in zip("xy", self.grid, strict=True)
            ]
            threads = [
                bind(f"threadIdx.{letter}", extent)
                for letter, extent in zip("xyz", self.block, strict=True)
            ]
            yield Place(group=(groups[0], groups[1]), thread=(threads[0], threads[1], threads[2]))

    @contextmanager
    def run_elements(self, count: int) -> Iterator[tuple[Expr, Expr]]:
        """Add the body for a thread for each of ``count`` elements of ``tokens``."""
        width = self.block[0]
        with self.run(Axis(times=-(-count // width)), Axis(number="tokens")) as place:
            element = let(place.group[0] * width + place.thread[0])
            with when(element < count):
                yield element, place.group[1]

    @contextmanager
    def run_vectors(self) -> Iterator[tuple[Expr, Expr]]:
        """Add the body for a thread for each element of tokens' vectors, and a few beyond: number
        ``length`` says how many there are."""
        width = self.block[0]
        with self.run(Axis(number="length", per=width), Axis(number="tokens")) as place:
            yield let(place.group[0] * width + place.thread[0]), place.group[1]

    def _count(self, axis: Axis) -> Expr:
        if axis.number is None:
            return axis.times
        return axis.times * divide_up(self._expressions[axis.number], axis.per)


_LEAST_NORMAL = 2.0**-14
_LARGEST = 65504.0


def widen_half(word: Expr, high: bool | Expr) -> Expr:
    """Return the low or high fp16 number of a word as float32, with integer instructions only."""
    if isinstance(high, bool):
        shift = T.uint32(16 if high else 0)
    else:
        shift = T.cast(high, "uint32") * T.uint32(16)
    bits = let(T.bitwise_and(T.shift_right(word, shift), T.uint32(0xFFFF)))
    magnitude = let(T.bitwise_and(bits, T.uint32(0x7FFF)))
    # A device may flush subnormal float32 to zero: those of fp16 are made of their integer.
    small = T.cast(magnitude, "float32") * number(2.0**-24)
    exponent = T.uint32((127 - 15) << 23)
    normal_bits = let(T.shift_left(magnitude, T.uint32(13)) + exponent)
    normal = T.reinterpret(normal_bits, dtype="float32")
    value = let(T.Select(magnitude < T.uint32(1 << 10), small, normal))
    return T.Select(bits == magnitude, value, number(0.0) - value)


def narrow_half(value: Expr) -> Expr:
    """Return the bits of the nearest fp16 number, ties to even, of a named float32, as uint32;
    larger numbers become the largest one."""
    size = let(T.min(T.abs(value), number(_LARGEST)))
    bits = let(T.reinterpret(size, dtype="uint32"))
    odd = T.bitwise_and(T.shift_right(bits, T.uint32(13)), T.uint32(1))
    rounded = T.shift_right(bits + T.uint32(0xFFF) + odd, T.uint32(13))
    normal = rounded - T.uint32((127 - 15) << 10)
    # Adding 2^23 rounds to a whole number of the least fp16 numbers.
    counted = let(size * number(2.0**24) + number(2.0**23))
    small = T.reinterpret(counted, dtype="uint32") - T.uint32(0x4B000000)
    is_small = size < number(_LEAST_NORMAL)
    magnitude = let(T.Select(is_small, let(small), let(normal)))
    sign = T.Select(value < number(0.0), T.uint32(0x8000), T.uint32(0))
    return T.bitwise_or(magnitude, sign)


_MAGIC = 0x4B000000
"""The bits of 2^23 as float32: or-ed with an integer below 2^23 they are the bits of their sum,
which costs less than a conversion on most GPUs."""


def count_words(precision: Precision) -> int:
    """Words of a group of 32 weights."""
    return find_packing(precision).bits


def place_elements(precision: Precision, word: Expr | int) -> list[Any]:
    """Return which elements of a group its word ``word`` holds, in the order of `unpack_word`."""
    packing = find_packing(precision)
    if packing.is_plain:
        return [2 * word + index for index in range(2)]
    size = 4 * packing.bits
    return [first + 4 * word + byte for first in range(0, GROUP, size) for byte in range(4)]


def unpack_word(precision: Precision, word: Expr) -> list[Expr]:
    """Return the numbers of a word as float32, without their scale."""
    word, packing = let(word), find_packing(precision)
    if packing.is_plain:
        return [let(widen_half(word, high)) for high in (False, True)]
    bits, offset = packing.bits, packing.offset
    mask = (1 << bits) - 1
    if not offset:
        # With its highest bit turned over, a signed field is itself plus half its range.
        offset = 1 << (bits - 1)
        word = let(T.bitwise_xor(word, T.uint32(offset * (0xFFFFFFFF // mask))))
    shifts = [8 * byte + first for first in range(0, 8, bits) for byte in range(4)]
    return [let(_widen_code(word, shift, mask, offset)) for shift in shifts]


def _widen_code(word: Expr, shift: int, mask: int, offset: int) -> Expr:
    """Return bits of a word as a number, less ``offset``."""
    bits = T.bitwise_and(T.shift_right(word, T.uint32(shift)), T.uint32(mask))
    sum_bits = let(T.bitwise_or(bits, T.uint32(_MAGIC)))
    return T.reinterpret(sum_bits, dtype="float32") - number(2**23 + offset)


@dataclass(frozen=True, slots=True)
class Scales:
    """An array of fp16 scales, or of words with two each where kernels have no fp16."""

    buffer: Buffer
    fp16: bool

    @classmethod
    def take(cls, kernel: Kernel, name: str, fp16: bool) -> Scales:
        return cls(kernel.take_array(name, "float16" if fp16 else "uint32"), fp16)

    def load(self, index: Expr) -> Expr:
        if self.fp16:
            return let(T.cast(self.buffer[index], "float32"))
        index = let(index)
        word = let(self.buffer[T.shift_right(index, T.int32(1))])
        return let(widen_half(word, T.bitwise_and(index, T.int32(1))))


@dataclass(frozen=True, slots=True)
class Weights:
    """An array of packed weights in vectors of ``lanes`` words, and its scales."""

    precision: Precision
    buffer: Buffer
    lanes: int
    scales: Scales | None

    @classmethod
    def take(
        cls, kernel: Kernel, name: str, precision: Precision, lanes: int, fp16: bool
    ) -> Weights:
        """Declare ``name_weights`` and ``name_scales``."""
        dtype = "uint32" if lanes == 1 else f"uint32x{lanes}"
        buffer = kernel.take_array(f"{name}_weights", dtype)
        scaled = find_packing(precision).has_scales
        scales = Scales.take(kernel, f"{name}_scales", fp16) if scaled else None
        return cls(precision, buffer, lanes, scales)

    def load(self, index: Expr) -> list[Expr]:
        vector = let(self.buffer[index])
        if self.lanes == 1:
            return [vector]
        return [let(take_lane(vector, lane)) for lane in range(self.lanes)]

    def load_scale(self, index: Expr) -> Expr:
        """Return a scale; 1 where weights have none."""
        return number(1.0) if self.scales is None else self.scales.load(index)
