"""Small vocabulary of vector expressions over TVMScript's builder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler.signature import Kind, Parameter, Signature, arrange

if TYPE_CHECKING:
    from pi2.plan.documents.model_parts import Ffn

Expr = Any
Buffer = Any

_BYTES = {"int8": 1, "uint8": 1, "int16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8}


def name_vector(dtype: str, lanes: int) -> str:
    """Return the type name of ``lanes`` elements."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def span(base: Expr, lanes: int, stride: int = 1) -> Expr:
    """Return the indices ``base, base + stride, ...``."""
    return base if lanes == 1 else T.ramp(base, stride, lanes)


def splat(value: Expr, lanes: int) -> Expr:
    """Return ``value`` in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def constant(value: float, dtype: str, lanes: int = 1) -> Expr:
    literal = T.FloatImm(dtype, value) if dtype.startswith("float") else T.IntImm(dtype, int(value))
    return splat(literal, lanes)


def list_constants(values: Sequence[float], dtype: str) -> Expr:
    return Shuffle([constant(value, dtype) for value in values], list(range(len(values))))


def wide(value: Expr) -> Expr:
    """Return an index as int64: byte offsets pass 2 GiB."""
    return T.int64(value) if isinstance(value, int) else T.cast(value, "int64")


def let(value: Expr) -> Expr:
    """Name a value to compute it once.  Not ``T.bind``, which makes TVM's analyzer take minutes."""
    return Cell(value).get()


class Cell:
    """A variable on the stack, which LLVM turns into a register."""

    def __init__(self, start: Expr) -> None:
        # It has no layout in any function here, and TVM looks through all open scopes to know that.
        self._cell = T.alloc_buffer((1,), start.ty.dtype, layout=None)
        self.set(start)

    def get(self) -> Expr:
        return self._cell[0]

    def set(self, value: Expr) -> None:
        T.buffer_store(self._cell, value, [0])


def load(buffer: Buffer, base: Expr, lanes: int) -> Expr:
    """Read ``lanes`` consecutive elements."""
    return buffer[span(base, lanes)]


def store(buffer: Buffer, base: Expr, value: Expr, lanes: int) -> None:
    """Write ``lanes`` consecutive elements."""
    T.buffer_store(buffer, value, [span(base, lanes)])


def load_as(buffer: Buffer, byte: Expr, dtype: str, lanes: int) -> Expr:
    """Read ``lanes`` elements of ``dtype`` from byte ``byte`` of a uint8 buffer."""
    size = _BYTES[dtype] * lanes
    raw = load(buffer, byte, size)
    return T.reinterpret(raw, dtype=name_vector(dtype, lanes))


def load_halves(buffer: Buffer, byte: Expr, lanes: int) -> Expr:
    """Read fp16 values from byte ``byte`` of a uint8 buffer as float32."""
    return T.cast(load_as(buffer, byte, "float16", lanes), name_vector("float32", lanes))


def reinterpret(value: Expr, dtype: str, lanes: int) -> Expr:
    """Return the same bits as another type."""
    return T.reinterpret(value, dtype=name_vector(dtype, lanes))


def cast(value: Expr, dtype: str, lanes: int) -> Expr:
    return T.cast(value, name_vector(dtype, lanes))


def take_lane(value: Expr, lane: int) -> Expr:
    return Shuffle([value], [lane])


def low_half(value: Expr, dtype: str, lanes: int) -> Expr:
    """Return the first half of a vector of ``lanes``."""
    return T.vectorlow(value, dtype=name_vector(dtype, lanes // 2))


def high_half(value: Expr, dtype: str, lanes: int) -> Expr:
    """Return the second half of a vector of ``lanes``."""
    return T.vectorhigh(value, dtype=name_vector(dtype, lanes // 2))


def add_lanes(value: Expr, dtype: str, lanes: int) -> Expr:
    """Return the sum of all lanes, by halves (the order is fixed)."""
    while lanes > 2:
        value = let(value)
        value = low_half(value, dtype, lanes) + high_half(value, dtype, lanes)
        lanes //= 2
    if lanes == 2:
        value = let(value)
        value = take_lane(value, 0) + take_lane(value, 1)
    return value


def add_all_lanes(values: Sequence[Expr], lanes: int) -> list[Expr]:
    """Return `add_lanes` of each of 1, 2, or 4 vectors, whose halves share registers."""
    now, size, each = [let(value) for value in values], lanes, lanes
    while each > 1:
        together = min(2, len(now))
        starts = range(0, together * size, each)
        low, high = (
            [start + first + k for start in starts for k in range(each // 2)]
            for first in (0, each // 2)
        )
        now = [
            let(Shuffle(some, low) + Shuffle(some, high))
            for some in (now[k : k + together] for k in range(0, len(now), together))
        ]
        size, each = together * size // 2, each // 2
    return [take_lane(own, lane) if size > 1 else own for own in now for lane in range(size)]


def count_trailing_zeros(mask: Expr) -> Expr:
    """Return the place of the lowest set bit of an int32 that is not 0."""
    return T.call_llvm_pure_intrin("int32", "llvm.cttz.i32", mask, T.IntImm("bool", 1))


def compress(value: Expr, mask: Expr, lanes: int) -> Expr:
    """Return the int32 lanes that ``mask`` names, side by side, and zeros behind them; for AVX-512,
    16 ``lanes``."""
    name, zero = "llvm.x86.avx512.mask.compress", constant(0, "int32", lanes)
    return T.call_llvm_pure_intrin(f"int32x{lanes}", name, value, zero, mask)


def find_largest(value: Expr, lanes: int) -> Expr:
    while lanes > 2:
        value = let(value)
        value = T.max(low_half(value, "float32", lanes), high_half(value, "float32", lanes))
        lanes //= 2
    if lanes == 2:
        value = let(value)
        value = T.max(take_lane(value, 0), take_lane(value, 1))
    return value


def prefetch(buffer: Buffer, index: Expr, level: int = 1) -> None:
    """Prefetch the cache line of an element into caches from ``level`` on; any address."""
    T.evaluate(
        T.call_llvm_intrin(
            "void",
            "llvm.prefetch",
            T.address_of(buffer[index]),
            T.int32(0),
            T.int32(4 - level),
            T.int32(1),
        )
    )


def take_exponential(
    value: Expr, lanes: int, round_off: Callable[[Expr], Expr] = T.nearbyint
) -> Expr:
    """exp(value), relative error below 3e-7, by 2^n and a Taylor polynomial of degree 7; below -87
    about 1e-38."""

    def number(literal: float) -> Expr:
        return constant(literal, "float32", lanes)

    value = let(T.max(T.min(value, number(88.0)), number(-87.0)))
    power = let(round_off(value * number(1.4426950408889634)))
    # ln 2 in two parts: the first has few bits, so that power * part is exact.
    rest = let(T.fma(power, number(-0.693359375), value))
    rest = let(T.fma(power, number(2.12194440e-4), rest))
    result = number(1.0 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        result = let(T.fma(result, rest, number(1.0 / factorial)))
    exponent = (cast(power, "int32", lanes) + constant(127, "int32", lanes)) << constant(
        23, "int32", lanes
    )
    return result * reinterpret(exponent, "float32", lanes)


def take_tanh(value: Expr, lanes: int, round_off: Callable[[Expr], Expr] = T.nearbyint) -> Expr:
    """Return tanh(value), absolute error below 3e-7."""
    one = constant(1.0, "float32", lanes)
    grown = take_exponential(value * constant(2.0, "float32", lanes), lanes, round_off)
    return one - constant(2.0, "float32", lanes) / (grown + one)


def take_error_function(
    value: Expr, lanes: int = 1, round_off: Callable[[Expr], Expr] = T.nearbyint
) -> Expr:
    """erf(value), absolute error below 5e-7 (Abramowitz and Stegun, 7.1.26)."""

    def number(literal: float) -> Expr:
        return constant(literal, "float32", lanes)

    size = let(T.abs(value))
    t = let(number(1.0) / (number(1.0) + number(0.3275911) * size))
    tail = number(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = let(T.fma(tail, t, number(factor)))
    result = let(
        number(1.0) - tail * t * take_exponential(number(0.0) - size * size, lanes, round_off)
    )
    return T.Select(value < number(0.0), number(0.0) - result, result)


def take_sigmoid(value: Expr, lanes: int) -> Expr:
    """Return 1 / (1 + exp(-value))."""
    one = constant(1.0, "float32", lanes)
    return one / (one + take_exponential(constant(0.0, "float32", lanes) - value, lanes))


def take_silu(value: Expr, lanes: int) -> Expr:
    """Return value / (1 + exp(-value))."""
    one = constant(1.0, "float32", lanes)
    return value / (one + take_exponential(constant(0.0, "float32", lanes) - value, lanes))


def take_softplus(value: Expr, lanes: int) -> Expr:
    """ln(1 + exp(value)), relative error below 1e-6: max(value, 0) + 2 artanh(y / (2 + y)), y =
    exp(-|value|)."""

    def number(literal: float) -> Expr:
        return constant(literal, "float32", lanes)

    value = let(value)
    small = let(take_exponential(number(0.0) - T.abs(value), lanes))
    ratio = let(small / (number(2.0) + small))
    square = let(ratio * ratio)
    series = number(1.0 / 15)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = let(T.fma(series, square, number(1.0 / odd)))
    return T.max(value, number(0.0)) + number(2.0) * ratio * series


class ScalarMath(NamedTuple):
    """How a processor computes with float32 scalars."""

    number: Callable[[float], Expr]
    let: Callable[[Expr], Expr]
    exponential: Callable[[Expr], Expr]
    error_function: Callable[[Expr], Expr]
    tanh: Callable[[Expr], Expr]


def activate(own: ScalarMath, ffn: Ffn, gate: Expr, up: Expr | None) -> Expr:
    """Return a neuron's value; ``up`` is None where neurons have no gate."""
    gate, zero, one = own.let(gate), own.number(0.0), own.number(1.0)
    match ffn.activation:
        case "relu" | "drelu":
            active = T.max(gate, zero)
        case "fatrelu":
            active = T.Select(gate > own.number(ffn.threshold), gate, zero)
        case "relu2":
            positive = own.let(T.max(gate, zero))
            active = positive * positive
        case "silu":
            if ffn.limit is not None:
                gate = own.let(T.min(gate, own.number(ffn.limit)))
            steep = gate if ffn.slope == 1.0 else own.let(own.number(ffn.slope) * gate)
            active = gate / (one + own.exponential(zero - steep))
        case "gelu":
            scaled = own.let(gate * own.number(math.sqrt(0.5)))
            active = own.number(0.5) * gate * (one + own.error_function(scaled))
        case "gelu_tanh":
            cube = gate * gate * gate
            inner = own.number(math.sqrt(2 / math.pi)) * (gate + own.number(0.044715) * cube)
            active = own.number(0.5) * gate * (one + own.tanh(own.let(inner)))
    active = own.let(active)
    if up is None:
        return active
    if ffn.activation == "drelu":
        up = T.max(up, zero)
    if ffn.limit is not None:
        up = T.max(T.min(up, own.number(ffn.limit)), own.number(-ffn.limit))
    if ffn.up_offset:
        up = up + own.number(ffn.up_offset)
    return own.let(active * up)


class Parameters:
    """Declares the parameters of the function under construction."""

    def __init__(self) -> None:
        self.declared: list[Parameter] = []

    def take_array(self, name: str, dtype: str, *shape: int | str) -> Buffer:
        """Declare a flat array that stays from call to call; ``shape`` as in `Parameter`."""
        return self._take_array(name, "bound", dtype, shape)

    def take_given_array(self, name: str, dtype: str, *shape: int | str) -> Buffer:
        """Declare a flat array that every call gives."""
        return self._take_array(name, "given", dtype, shape)

    def _take_array(
        self, name: str, kind: Kind, dtype: str, shape: tuple[int | str, ...]
    ) -> Buffer:
        self.declared.append(Parameter(name, kind, dtype, shape))
        handle = T.arg(name, T.handle())
        size = T.int64()
        align = 1 if dtype == "uint8" else 64
        return T.match_buffer(handle, (size,), dtype, align=align)

    def take_number(self, name: str, dtype: str = "int32") -> Expr:
        self.declared.append(Parameter(name, "number", dtype))
        return T.arg(name, T.int64() if dtype == "int64" else getattr(T, dtype)())


def make_function(name: str, emit: Callable[[Parameters], None]) -> tvm.tirx.PrimFunc:
    """Build a function whose parameters, as they are declared, and body ``emit`` adds."""
    return _build(name, emit)[0]


def make_bindable_function(
    name: str, emit: Callable[[Parameters], None]
) -> tuple[tvm.tirx.PrimFunc, Signature]:
    """Build the same with its parameters in the order of its signature."""
    function, declared = _build(name, emit)
    signature = arrange(declared)
    handles = {item.name: handle for item, handle in zip(declared, function.params, strict=True)}
    ordered = [handles[item.name] for item in (*signature.bound, *signature.given)]
    arranged = tvm.tirx.PrimFunc(ordered, function.body, function.ret_type, function.attrs)
    return arranged, signature


def _build(
    name: str, emit: Callable[[Parameters], None]
) -> tuple[tvm.tirx.PrimFunc, list[Parameter]]:
    parameters = Parameters()
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(name)
            T.func_attr({"global_symbol": name, "tirx.noalias": True})
            emit(parameters)
    return builder.get(), parameters.declared
