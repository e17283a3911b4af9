"""The FFN of one token over gathered neurons: slot indices into an arena of bundles.

``arena`` uint8 [slots, stride], bundles of `pi2.plan.layout`.  Every thread takes every n-th
neuron of the list, so that all get hot and cold ones alike, and goes through its own in one of two
ways (`KernelSpec.phases`), with the same bits as result:

1. in one loop: gate and up of a few, then down of those that fire;
2. in three: gates of all; up of those whose gates are open; down of those that fire.

Gates that are known are not computed (`predict_gate` has, or had; of smooth activations all are
open).  The first reads some ups in vain, the second rows in three pieces, each of which takes the
processor as long to start on as a third of its bytes takes to read: what is quicker depends on how
many neurons a predictor names in vain.  There is one join of the threads.  A few neurons are
computed together, because a processor reads ahead in several rows at once, and while they are,
memory is asked for what comes next, line by line: in bunches, requests wait for each other and the
arithmetic for them.  Which thread adds a neuron, and when, depends on the list and on the signs of
gate and up alone: equal input gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import LINE, emit_shared
from pi2.backends.kernels.neurons import activate, is_firing, take_part
from pi2.backends.kernels.operands import Activations, Prefetch, Vector
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.kernels.units import emit_unit, list_units, load_unit_scale
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
        """Return what to call while parts are read, to ask for ``name`` of neurons ``slots``."""
        parts = self.take_parts(slots, name)

        def ask(index: int, byte: v.Expr, size: int) -> None:
            # Scales follow the weights: the processor has begun to read ahead by then.
            for line in range(0, size, LINE):
                v.prefetch(self.arena, parts[index].weights_base + byte + line)

        return ask

    def take_parts(self, slots: Sequence[v.Expr], name: PartName) -> list[Vector]:
        """Return a part of each of the neurons in ``slots``."""
        return [take_part(self.spec, self.arena, self.find_base(s), name) for s in slots]

    def dot(
        self,
        slots: Sequence[v.Expr],
        name: PartName,
        following: Sequence[v.Expr],
        next_name: PartName,
    ) -> list[v.Expr]:
        """Return part ``name`` of each neuron times the activations; meanwhile ask for part
        ``next_name`` of neurons ``following``."""
        parts, ask = self.take_parts(slots, name), self.ask_for(following, next_name)
        dots = emit_dots(self.isa, parts, self.activations, [T.int32(0)], ask)
        return [row[0] for row in dots]


ReadGate = Callable[[v.Expr], v.Expr]
"""Gives the known gate of the neuron at a place of a thread's list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    """Slots of a thread's neurons, `TOGETHER` at a time."""

    count: v.Expr
    read: Callable[[v.Expr], v.Expr]
    """The slot at a place of the list."""

    def count_turns(self) -> v.Expr:
        """Return how often `TOGETHER` neurons are to be taken."""
        return T.floordiv(self.count + (TOGETHER - 1), TOGETHER)

    def list_places(self, first: v.Expr) -> list[v.Expr]:
        """Return the places from ``first`` on; the last one stands for those beyond it."""
        return [T.min(first + index, self.count - 1) for index in range(TOGETHER)]

    def take(self, first: v.Expr) -> list[v.Expr]:
        """Return the slots from place ``first`` on, likewise."""
        return [v.let(self.read(place)) for place in self.list_places(first)]

    def visit(self, emit: Callable[[v.Expr, list[v.Expr], list[v.Expr]], None]) -> None:
        """Call ``emit(first place, slots, slots of the next turn)`` for all turns."""
        with T.serial(self.count_turns()) as turn:
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
        given = _List(count=own, read=lambda place: slots[thread + place * threads])

        def read_gate(place: v.Expr) -> v.Expr:
            assert known is not None
            return known[0][known[1][thread + place * threads]]

        emit_all = _emit_at_once if spec.phases == 1 else _emit_in_turn
        fired = emit_all(run, given, read_gate if known else None, first, target, limit)
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


def _emit_at_once(
    run: _Run,
    given: _List,
    gates: ReadGate | None,
    first: v.Expr,
    target: v.Expr,
    limit: v.Expr | None,
) -> v.Expr:
    """Compute neurons in one loop; return the number of those that fire.

    Gate and up of a few; those that fire wait in a list until there are enough of them that memory
    can be asked for the down vectors of the next few while those of the first are added.
    """
    scratch = run.scratch
    kept, added = v.Cell(T.int32(0)), v.Cell(T.int32(0))
    turns = v.let(given.count_turns())
    with T.serial(turns + 1) as turn:
        with T.If(turn < turns), T.Then():
            start = v.let(turn * TOGETHER)
            slots, following = given.take(start), given.take(start + TOGETHER)
            if gates is None:
                # A row is read from its beginning to its end.
                found = run.dot(slots, "gate", slots, "up")
                ups = run.dot(slots, "up", following, "gate")
            else:
                found = [v.let(gates(place)) for place in given.list_places(start)]
                ups = run.dot(slots, "up", following, "up")
            for index, (slot, gate, up) in enumerate(zip(slots, found, ups, strict=True)):
                there = start + index < given.count
                _keep_active(run, kept, first, there, slot, gate, up, limit)
        waiting = kept.get() - added.get()
        some = T.floordiv(waiting, 2 * TOGETHER)
        all_of_them = T.floordiv(waiting + (TOGETHER - 1), TOGETHER)
        fired = _List(count=kept.get(), read=lambda place: scratch.firing[first + place])
        with T.serial(v.let(T.Select(turn < turns, some, all_of_them))):
            _emit_down_turn(run, fired, first, v.let(added.get()), target)
            added.set(added.get() + TOGETHER)
    return v.let(kept.get())


def _emit_in_turn(
    run: _Run,
    given: _List,
    gates: ReadGate | None,
    first: v.Expr,
    target: v.Expr,
    limit: v.Expr | None,
) -> v.Expr:
    """Compute all gates, then ups, then downs; return the number of neurons that fire."""
    scratch = run.scratch

    def list_firing(number: v.Expr) -> _List:
        return _List(count=number, read=lambda place: scratch.firing[first + place])

    if gates is None:
        opened = _emit_gates(run, given, first)
    else:
        opened = given.count
        with T.serial(opened) as step:
            v.store(scratch.gates, first + step, gates(step), 1)
            v.store(scratch.firing, first + step, given.read(step), 1)
    fired = _emit_ups(run, list_firing(opened), first, limit)

    def emit(start: v.Expr, _slots: list[v.Expr], _following: list[v.Expr]) -> None:
        _emit_down_turn(run, list_firing(fired), first, start, target)

    list_firing(fired).visit(emit)
    return fired


def _emit_gates(run: _Run, given: _List, first: v.Expr) -> v.Expr:
    """Compute gates; list the open ones from place ``first`` on; return their number."""
    scratch = run.scratch
    kept = v.Cell(T.int32(0))

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        gates = run.dot(slots, "gate", following, "gate")
        for index, (slot, gate) in enumerate(zip(slots, gates, strict=True)):
            opens = None if run.spec.is_smooth else is_firing(run.spec, gate)
            there = start + index < given.count
            _keep(scratch, kept, first, there, slot, scratch.gates, gate, opens)

    given.visit(emit)
    return v.let(kept.get())


def _emit_ups(run: _Run, opened: _List, first: v.Expr, limit: v.Expr | None) -> v.Expr:
    """Compute activations of listed neurons; keep those that fire; return their number."""
    scratch = run.scratch
    kept = v.Cell(T.int32(0))

    def emit(start: v.Expr, slots: list[v.Expr], following: list[v.Expr]) -> None:
        # Read before anything is written: the list of those that are kept overtakes nothing.
        gates = [v.let(scratch.gates[first + start + index]) for index in range(TOGETHER)]
        ups = run.dot(slots, "up", following, "up")
        for index, (slot, gate, up) in enumerate(zip(slots, gates, ups, strict=True)):
            there = start + index < opened.count
            _keep_active(run, kept, first, there, slot, gate, up, limit)

    opened.visit(emit)
    return v.let(kept.get())


def _keep_active(
    run: _Run,
    kept: v.Cell,
    first: v.Expr,
    there: v.Expr,
    slot: v.Expr,
    gate: v.Expr,
    up: v.Expr,
    limit: v.Expr | None,
) -> None:
    """Compute an activation and keep its neuron if it is not zero, or if it reaches ``limit``."""
    value = v.let(activate(run.spec, gate, up) if limit is None else gate * up)
    weighed = v.let(run.weigh(slot, value))
    fires = weighed != v.constant(0.0, "float32") if limit is None else T.abs(value) >= limit
    _keep(run.scratch, kept, first, there, slot, run.scratch.values, weighed, fires)


def _keep(
    scratch: Scratch,
    kept: v.Cell,
    first: v.Expr,
    there: v.Expr,
    slot: v.Expr,
    values: v.Buffer,
    value: v.Expr,
    stays: v.Expr | None,
) -> None:
    """Write a neuron of a turn to the lists, and go on to the next place if it ``stays``.

    Nothing is written of neurons that are not ``there``, beyond the list's end: where all have
    stayed, the next place is another thread's.
    """
    with T.If(there), T.Then():
        place = v.let(first + kept.get())
        v.store(values, place, value, 1)
        v.store(scratch.firing, place, slot, 1)
        one = T.int32(1)
        kept.set(kept.get() + (one if stays is None else T.Select(stays, one, T.int32(0))))


def _emit_down_turn(run: _Run, fired: _List, first: v.Expr, start: v.Expr, target: v.Expr) -> None:
    """Add the down vectors of a few neurons of the list ``fired``, times their activations."""
    slots, following = fired.take(start), fired.take(start + TOGETHER)
    zero = v.constant(0.0, "float32")
    values = [
        v.let(T.Select(place < fired.count, run.scratch.values[first + place], zero))
        for place in (start + index for index in range(TOGETHER))
    ]
    _emit_down(run, slots, following, values, target)


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
