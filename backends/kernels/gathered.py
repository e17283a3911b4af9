"""The FFN of one token over gathered neurons: slot indices into an arena of bundles.

``arena`` uint8 [slots, stride], bundles of `pi2.plan.layout`.  Every thread takes every n-th neuron
of the list, so that all get hot and cold ones alike, and runs through three loops on its own:

1. gates of all its neurons; those that are open go on.  Left out where the gates are known
   (`predict_gate` has computed them), and where all neurons fire (SiLU: one loop for everything).
2. up of those; with dReLU some are closed, and only the others go on.  Where gates of smooth
   activations are known, those go on whose activation reaches a limit.
3. down of those, added to the thread's own sum.

So nothing is read that has no effect, and there is one join of the threads.  A few neurons are
computed together, because a processor reads ahead in several rows at once, and while they are,
memory is asked for the same part of the next few, line by line: in bunches, requests wait for each
other and the arithmetic for them.  Which thread adds a neuron, and when, depends on the list and on
the signs of gate and up alone: equal input gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.dots import Activations, Prefetch, Vector, emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import LINE, emit_shared
from pi2.backends.kernels.neurons import (
    activate,
    emit_unit,
    is_firing,
    list_units,
    load_unit_scale,
    take_part,
)
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.layout import GROUP, PartName, vector_bytes

TOGETHER = 4
"""Neurons that a thread computes at the same time.  A loop that only reads rows of 7 KB, spread
over memory, got 15 GB/s with one row at a time, 19 with four and 20 with eight, of 22 in long runs
(Skylake, two threads).  Down vectors share the loads and stores of the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Room of the gathered FFN, shared by its calls.

    ``gates`` float32 [neurons], ``values`` float32 [neurons], ``firing`` int32 [neurons];
    ``partial`` float32 [threads, hidden]: a sum per thread, added up in the order of threads;
    ``counts`` int32 [threads + 1]: the last one counts non-zero activations, ever.
    """

    gates: v.Buffer
    values: v.Buffer
    firing: v.Buffer
    partial: v.Buffer
    counts: v.Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What every loop of a call needs."""

    isa: Isa
    spec: KernelSpec
    activations: Activations
    arena: v.Buffer
    scratch: Scratch
    routes: v.Buffer | None

    def weigh(self, slot: v.Expr, value: v.Expr) -> v.Expr:
        """Return an activation times the weight of the neuron's expert, where it has one."""
        if self.routes is None:
            return value
        assert self.spec.bundle.expert_offset is not None
        place = self.find_base(slot) + self.spec.bundle.expert_offset
        return value * self.routes[v.load_as(self.arena, place, "int32", 1)]

    def find_base(self, slot: v.Expr) -> v.Expr:
        return v.let(v.wide(slot) * self.spec.stride)

    def ask_for(self, slots: Sequence[v.Expr], name: PartName) -> Prefetch:
        """Return what to call while a part is read, to ask for the same of neurons in ``slots``."""
        parts = self.take_parts(slots, name)
        # Scales follow the weights, whose pace is stretched to include them.
        over, under = {"int4": (9, 8), "int8": (17, 16), "fp16": (1, 1)}[self.spec.ffn]

        def ask(index: int, byte: v.Expr, size: int) -> None:
            place = parts[index].weights_base + T.floordiv(byte * over, under)
            for line in range(0, size, LINE):
                v.prefetch(self.arena, place + line)

        return ask

    def take_parts(self, slots: Sequence[v.Expr], name: PartName) -> list[Vector]:
        """Return a part of each of the neurons in ``slots``."""
        return [take_part(self.spec, self.arena, self.find_base(s), name) for s in slots]

    def dot(
        self, slots: Sequence[v.Expr], name: PartName, following: Sequence[v.Expr]
    ) -> list[v.Expr]:
        """Return a part of each neuron times the activations; ask for that of ``following``."""
        parts, ask = self.take_parts(slots, name), self.ask_for(following, name)
        dots = emit_dots(self.isa, parts, self.activations, [T.int32(0)], ask)
        return [row[0] for row in dots]


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    """Slots of a thread's neurons, `TOGETHER` at a time."""

    count: v.Expr
    read: Callable[[v.Expr], v.Expr]
    """The slot at a place of the list."""

    def take(self, first: v.Expr) -> list[v.Expr]:
        """Return the slots from place ``first`` on; the last one stands for those beyond it."""
        places = [T.min(first + index, self.count - 1) for index in range(TOGETHER)]
        return [v.let(self.read(place)) for place in places]

    def visit(self, emit: Callable[[v.Expr, list[v.Expr], list[v.Expr]], None]) -> None:
        """Call ``emit(first place, slots, slots of the next turn)`` for all turns."""
        with T.serial(T.floordiv(self.count + (TOGETHER - 1), TOGETHER)) as turn:
            first = v.let(turn * TOGETHER)
            emit(first, self.take(first), self.take(first + TOGETHER))


def emit_gathered(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    arena: v.Buffer,
    slots: v.Buffer,
    count: v.Expr,
    scratch: Scratch,
    total: v.Buffer,
    known: tuple[v.Buffer, v.Buffer] | None = None,
    limit: v.Expr | None = None,
    routes: v.Buffer | None = None,
) -> None:
    """Add neurons ``slots`` int32 [count] of ``arena`` to ``total`` float32 [hidden], lane order.

    ``known`` (scores float32 [neurons], indices int32 [count]): gate i is ``scores[indices[i]]``;
    of smooth activations it is the activation itself.  These have a ``limit``: neurons whose
    activation, up included, is smaller than that are left out.  ``routes`` float32 [experts]:
    weights of a mixture's experts.
    """
    threads, hidden = spec.threads, spec.hidden
    run = _Run(
        isa=isa, spec=spec, activations=activations, arena=arena, scratch=scratch, routes=routes
    )

    def emit(thread: v.Expr) -> None:
        target = v.let(thread * hidden)
        with T.serial(hidden // 16) as step:
            place = target + step * 16
            v.store(scratch.partial, place, v.constant(0.0, "float32", 16), 16)
        # As many as a thread has, one after the other: no cache line has two writers for long.
        rest = T.floormod(count, threads)
        own = v.let(T.floordiv(count, threads) + T.Select(thread < rest, T.int32(1), T.int32(0)))
        first = v.let(thread * T.floordiv(count, threads) + T.min(thread, rest))

        def list_firing(number: v.Expr) -> _List:
            return _List(count=number, read=lambda place: scratch.firing[first + place])

        given = _List(count=own, read=lambda place: slots[thread + place * threads])
        if spec.is_smooth and known is None:
            fired = _emit_whole(run, given, target)
        else:
            if known is None:
                opened = _emit_gates(run, given, first)
            else:
                opened = own
                with T.serial(own) as step:
                    index = v.let(thread + step * threads)
                    v.store(scratch.gates, first + step, known[0][known[1][index]], 1)
                    v.store(scratch.firing, first + step, slots[index], 1)
            fired = _emit_ups(run, list_firing(opened), first, limit)
            _emit_downs(run, list_firing(fired), first, target)
        v.store(scratch.counts, thread, fired, 1)

    read_bytes = v.wide(count) * (2 * vector_bytes(hidden, spec.ffn))
    emit_shared(threads, read_bytes, emit)
    with T.serial(hidden // 16) as step:
        place = step * 16
        value = v.load(total, place, 16)
        for thread in range(threads):
            value = value + v.load(scratch.partial, thread * hidden + place, 16)
        v.store(total, place, value, 16)
    for thread in range(threads):
        counted = scratch.counts[threads] + scratch.counts[thread]
        v.store(scratch.counts, threads, counted, 1)


def _emit_gates(run: _Run, given: _List, first: v.Expr) -> v.Expr:
    """Compute gates; list the open ones from place ``first`` on; return their number."""
    scratch = run.scratch
    kept = v.Cell(T.int32(0))

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        gates = run.dot(slots, "gate", following)
        for index, (slot, gate) in enumerate(zip(slots, gates, strict=True)):
            # Without branches: every one is written, the place advances.
            place = v.let(first + kept.get())
            v.store(scratch.gates, place, gate, 1)
            v.store(scratch.firing, place, slot, 1)
            opens = T.And(start + index < given.count, is_firing(run.spec, gate))
            kept.set(kept.get() + T.Select(opens, T.int32(1), T.int32(0)))

    given.visit(emit)
    return v.let(kept.get())


def _emit_ups(run: _Run, opened: _List, first: v.Expr, limit: v.Expr | None) -> v.Expr:
    """Compute activations of listed neurons; keep those that are not zero, or that reach
    ``limit``; return their number."""
    scratch = run.scratch
    kept = v.Cell(T.int32(0))

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        # Read before anything is written: the list of those that are kept overtakes nothing.
        gates = [v.let(scratch.gates[first + start + index]) for index in range(TOGETHER)]
        ups = run.dot(slots, "up", following)
        for index, (slot, gate, up) in enumerate(zip(slots, gates, ups, strict=True)):
            value = v.let(activate(run.spec, gate, up) if limit is None else gate * up)
            weighed = v.let(run.weigh(slot, value))
            place = v.let(first + kept.get())
            v.store(scratch.values, place, weighed, 1)
            v.store(scratch.firing, place, slot, 1)
            has_effect = weighed != v.constant(0.0, "float32")
            if limit is not None:
                has_effect = T.abs(value) >= limit
            fires = T.And(start + index < opened.count, has_effect)
            kept.set(kept.get() + T.Select(fires, T.int32(1), T.int32(0)))

    opened.visit(emit)
    return v.let(kept.get())


def _emit_downs(run: _Run, fired: _List, first: v.Expr, target: v.Expr) -> None:
    """Add the listed neurons' down vectors, times their activations."""

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        values = [run.scratch.values[first + start + index] for index in range(TOGETHER)]
        values = _clear_beyond(fired, start, values)
        _emit_down(run, slots, following, values, target)

    fired.visit(emit)


def _emit_whole(run: _Run, given: _List, target: v.Expr) -> v.Expr:
    """Compute neurons that all fire, one turn after the other; return their number."""

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        gates = run.dot(slots, "gate", following)
        ups = run.dot(slots, "up", following)
        values = [
            run.weigh(slot, activate(run.spec, gate, up))
            for slot, gate, up in zip(slots, gates, ups, strict=True)
        ]
        values = _clear_beyond(given, start, values)
        _emit_down(run, slots, following, values, target)

    given.visit(emit)
    return given.count


def _clear_beyond(listed: _List, start: v.Expr, values: list[v.Expr]) -> list[v.Expr]:
    """Return the activations of a turn, zero for places beyond the list's end."""
    zero = v.constant(0.0, "float32")
    return [
        v.let(T.Select(start + index < listed.count, value, zero))
        for index, value in enumerate(values)
    ]


def _emit_down(
    run: _Run,
    slots: Sequence[v.Expr],
    following: Sequence[v.Expr],
    values: Sequence[v.Expr],
    base: v.Expr,
) -> None:
    """Add the down vector of each slot times its value to ``partial[base:]`` (lane order)."""
    vectors, ask = run.take_parts(slots, "down"), run.ask_for(following, "down")
    isa, spec, target = run.isa, run.spec, run.scratch.partial
    per_block = {"int4": 4, "int8": 8, "fp16": 1}[spec.ffn]
    size = {"int4": GROUP // 2, "int8": GROUP, "fp16": 2 * GROUP}[spec.ffn]

    def emit_block(lanes: int, first: v.Expr) -> None:
        step = 2 * GROUP if spec.ffn == "fp16" else 4 * lanes
        scales = [
            v.let(load_unit_scale(vector, lanes, first) * v.splat(value, lanes))
            for vector, value in zip(vectors, values, strict=True)
        ]
        for chunk in range(per_block):
            units = []
            for index, vector in enumerate(vectors):
                ask(index, v.wide(first * size) + chunk * step, step)
                units.append(emit_unit(isa, vector, lanes, first, chunk))
            for rows in zip(*units, strict=True):
                at = v.let(base + rows[0][0])
                total = v.load(target, at, lanes)
                for (_, weights), scale in zip(rows, scales, strict=True):
                    total = T.fma(weights, scale, total)
                v.store(target, at, total, lanes)

    for lanes, group, units in list_units(spec.hidden, spec.ffn):
        groups = 1 if spec.ffn == "fp16" else lanes
        with T.serial(units // per_block * run.activations.once) as block:
            emit_block(lanes, group + block * groups)
