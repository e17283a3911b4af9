"""The functions of a library."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tvm
from tvm.tirx.script import builder as T

from pi2.backends.blocks import attention, elements, panels, rows
from pi2.backends.blocks.contract import ATTENTION, COMMON, ROUTING, STEPS, BlockSpec
from pi2.backends.blocks.elements import add_up, walk
from pi2.backends.blocks.machine import Table, make_tabled_function
from pi2.backends.blocks.unpacking import find_unpacking
from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.compile import compile_text, generate_plain, make_target
from pi2.formats import find_format

_LEAST = -3.0e38
"""Below every score."""


def emit_route(table: Table) -> None:
    """Choose each token's ``active`` best experts: ``chosen`` int32 and ``weights`` [T, active];
    the first of equal ones wins."""
    scores, stride = table.take_array("scores", "float32"), table.take("scores_stride")
    experts, active = table.take("experts"), table.take("active")
    chosen, weights = table.take_array("chosen", "int32"), table.take_array("weights", "float32")
    bias, has_bias = table.take_array("choice_bias", "float32"), table.take("has_choice_bias")
    scales, has_scales = table.take_array("expert_scale", "float32"), table.take("has_expert_scale")
    is_sigmoid, of_score = table.take("is_sigmoid"), table.take("bias_of_score")
    groups, active_groups = table.take("groups"), table.take("active_groups")
    best_two, normalise = table.take("best_two"), table.take("normalise")
    scaling, zero = table.take_float("scaling"), T.int64(0)
    scratch = table.take_array("scratch", "float32")
    shares = v.let(table.thread * (table.take("scratch_stride") // 4))
    wanted = v.let(shares + experts)
    worths = v.let(wanted + experts)
    with T.serial(table.first, table.end) as token:
        source = v.let(token * stride)
        with T.If(is_sigmoid != zero):
            with T.Then():

                def take_sigmoid(place: v.Expr, lanes: int) -> None:
                    value = v.take_sigmoid(v.load(scores, source + place, lanes), lanes)
                    v.store(scratch, shares + place, value, lanes)

                walk(zero, experts, take_sigmoid)
            with T.Else():
                top = v.Cell(T.float32(_LEAST))
                with T.serial(experts) as expert:
                    top.set(T.max(top.get(), scores[source + expert]))
                largest = v.let(top.get())

                def exponentiate(place: v.Expr, lanes: int) -> v.Expr:
                    value = v.load(scores, source + place, lanes) - v.splat(largest, lanes)
                    share = v.let(v.take_exponential(value, lanes))
                    v.store(scratch, shares + place, share, lanes)
                    return share

                inverse = v.let(T.float32(1.0) / add_up(zero, experts, exponentiate))

                def divide(place: v.Expr, lanes: int) -> None:
                    share = v.load(scratch, shares + place, lanes) * v.splat(inverse, lanes)
                    v.store(scratch, shares + place, share, lanes)

                walk(zero, experts, divide)
        with T.serial(experts) as expert:
            worth = v.Cell(scratch[shares + expert])
            with T.If(of_score != zero), T.Then():
                worth.set(scores[source + expert])
            with T.If(has_bias != zero), T.Then():
                worth.set(worth.get() + bias[expert])
            T.buffer_store(scratch, worth.get(), [wanted + expert])
        with T.If(groups > T.int64(1)), T.Then():
            _leave_groups(scratch, wanted, worths, experts, groups, active_groups, best_two)
        target = v.let(token * active)
        total = v.Cell(T.float32(0.0))
        with T.serial(active) as place:
            best = _find_best(scratch, wanted, experts)
            T.buffer_store(scratch, T.float32(_LEAST), [wanted + best])
            share = v.let(scratch[shares + best])
            T.buffer_store(chosen, T.cast(best, "int32"), [target + place])
            T.buffer_store(weights, share, [target + place])
            total.set(total.get() + share)
        factor = v.Cell(scaling)
        with T.If(normalise != zero), T.Then():
            factor.set(scaling / T.max(total.get(), T.float32(1e-20)))
        with T.serial(active) as place:
            weight = v.Cell(weights[target + place] * factor.get())
            with T.If(has_scales != zero), T.Then():
                weight.set(weight.get() * scales[v.wide(chosen[target + place])])
            T.buffer_store(weights, weight.get(), [target + place])


def _find_best(values: v.Buffer, first: v.Expr, count: v.Expr) -> v.Expr:
    best, worth = v.Cell(T.int64(0)), v.Cell(values[first])
    with T.serial(T.int64(1), count) as place:
        value = v.let(values[first + place])
        with T.If(value > worth.get()), T.Then():
            worth.set(value)
            best.set(place)
    return v.let(best.get())


def _leave_groups(
    scratch: v.Buffer,
    wanted: v.Expr,
    worths: v.Expr,
    experts: v.Expr,
    groups: v.Expr,
    active_groups: v.Expr,
    best_two: v.Expr,
) -> None:
    """Leave only experts of the best groups, by their best expert or the sum of the best two."""
    size = v.let(experts // groups)
    with T.serial(groups) as group:
        first, second = v.Cell(T.float32(_LEAST)), v.Cell(T.float32(_LEAST))
        with T.serial(size) as place:
            value = v.let(scratch[wanted + group * size + place])
            second.set(T.max(second.get(), T.min(first.get(), value)))
            first.set(T.max(first.get(), value))
        with T.If(best_two != T.int64(0)), T.Then():
            first.set(first.get() + second.get())
        T.buffer_store(scratch, first.get(), [worths + group])
    # Groups that were found are marked with a value above every worth.
    marked = T.float32(3.0e38)
    with T.serial(active_groups):
        best, worth = v.Cell(T.int64(-1)), v.Cell(T.float32(_LEAST))
        with T.serial(groups) as group:
            value = v.let(scratch[worths + group])
            is_open = T.bitwise_and(
                value < marked, T.bitwise_or(value > worth.get(), best.get() < 0)
            )
            with T.If(is_open), T.Then():
                worth.set(value)
                best.set(group)
        T.buffer_store(scratch, marked, [worths + best.get()])
    with T.serial(groups) as group:
        with T.If(scratch[worths + group] < marked), T.Then(), T.serial(size) as place:
            T.buffer_store(scratch, T.float32(_LEAST), [wanted + group * size + place])


def emit_group(table: Table) -> None:
    """List the pairs of tokens and experts by expert: ``starts`` int32 [experts + 1], ``pairs``
    int32 [T x active]; one item does it all."""
    chosen, count = table.take_array("chosen", "int32"), table.take("active")
    count = v.let(count * table.take("tokens"))
    experts = table.take("experts")
    starts, pairs = table.take_array("starts", "int32"), table.take_array("pairs", "int32")
    with T.serial(table.first, table.end):
        with T.serial(experts + 1) as expert:
            T.buffer_store(starts, T.int32(0), [expert])
        with T.serial(count) as pair:
            place = v.let(v.wide(chosen[pair]) + 1)
            T.buffer_store(starts, starts[place] + 1, [place])
        with T.serial(experts) as expert:
            T.buffer_store(starts, starts[expert] + starts[expert + 1], [expert + 1])
        with T.serial(count) as pair:
            # The beginning of an expert moves while its pairs are put, and is put back then.
            place = v.let(v.wide(chosen[pair]))
            T.buffer_store(pairs, T.cast(pair, "int32"), [v.wide(starts[place])])
            T.buffer_store(starts, starts[place] + 1, [place])
        with T.serial(experts) as number:
            expert = v.let(experts - number)
            T.buffer_store(starts, starts[expert - 1], [expert])
        T.buffer_store(starts, T.int32(0), [T.int64(0)])


def emit_weigh(table: Table) -> None:
    """Multiply vectors with the sigmoid of a score each: items are tokens."""
    x, stride, length = (
        table.take_array("x", "float32"),
        table.take("x_stride"),
        table.take("length"),
    )
    scores, scores_stride = table.take_array("scores", "float32"), table.take("scores_stride")
    with T.serial(table.first, table.end) as token:
        weight = v.let(v.take_sigmoid(scores[token * scores_stride], 1))
        source = v.let(token * stride)

        def emit(place: v.Expr, lanes: int) -> None:
            value = v.load(x, source + place, lanes) * v.splat(weight, lanes)
            v.store(x, source + place, value, lanes)

        walk(T.int64(0), length, emit)


_PAUSES = {
    "x86-64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def read_program(text: str) -> Program:
    return Program(BlockSpec.from_json(text))


class Program:
    """Kernels that take a table of arguments."""

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec

    @property
    def target(self) -> tvm.target.Target:
        # LLVM's further levels take it as long again, and kernels of no format gain nothing.
        return make_target(self._spec.isa, level=1 if self._spec.library == COMMON else 3)

    def write_objects(
        self, folder: Path, target: tvm.target.Target, report: Callable[[str, float], None]
    ) -> list[Path]:
        kernels, texts = self.list_kernels(), self.list_texts()
        files = []
        if kernels:
            functions = {name: make_tabled_function(name, emit) for name, emit in kernels.items()}
            files.append(folder / "kernels.o")
            module = generate_plain(tvm.IRModule(functions), target)
            module.write_to_file(str(files[-1]), "o")
        triple = str(target.attrs.get("mtriple", f"{platform.machine()}-linux-gnu"))
        for name, text in texts.items():
            files.append(compile_text(text, triple, folder / f"{name}.o"))
        report(f"compiled {self._spec.library}", 0.9)
        return files

    def list_kernels(self) -> dict[str, Callable[[Table], None]]:
        """Return what emits each kernel, by name."""
        isa, library = self._spec.isa, self._spec.library
        if library == STEPS:
            return {}
        if library == ROUTING:
            return {"route": emit_route, "group": emit_group, "weigh": emit_weigh}
        if library.startswith(ATTENTION):
            counts = [int(count) for count in library.split("_")[1:]]
            return {"attend": partial(attention.emit_attend, isa, counts)}
        if library == COMMON:
            return {
                "normalize": elements.emit_normalize,
                "quantize_q8_k": partial(elements.emit_quantize, "q8_k"),
                "quantize_q8_0": partial(elements.emit_quantize, "q8_0"),
                "turn": elements.emit_turn,
                "keep": elements.emit_keep,
                "join": partial(attention.emit_join, isa),
                "attend_many": partial(attention.emit_attend_many, isa),
                "gate": elements.emit_gate,
                "cap": elements.emit_cap,
            }
        unpacking = find_unpacking(find_format(library))
        many = partial(panels.emit_multiply_many, isa, unpacking)
        return {
            **({} if unpacking.floats is not None else {"multiply_many": many}),
            "multiply": partial(rows.emit_multiply, isa, unpacking),
            "multiply_few": partial(rows.emit_multiply_few, isa, unpacking),
            "take_rows": partial(rows.emit_take_rows, isa, unpacking),
        }

    def list_texts(self) -> dict[str, str]:
        """Return LLVM's assembly that is part of the library, by name."""
        if self._spec.library != STEPS:
            return {}
        code = Path(__file__).with_name("steps.ll").read_text()
        declaration, call = _PAUSES[self._spec.architecture]
        code = code.replace("PAUSE_DECLARATION", declaration).replace("PAUSE", call)
        return {"steps": code}
