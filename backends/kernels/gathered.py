"""The FFN of one token over gathered neurons: slot indices into an arena of bundles.

Every thread takes every n-th neuron of the list, in one loop or in three passes
(`KernelSpec.passes`) with the same bits as result.  One loop reads some ups in vain; three begin on
rows in three pieces.  The order of additions depends on the list and on signs of gate and up alone:
equal input gives equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.dots import emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared, emit_split
from pi2.backends.kernels.neurons import (
    Bundles,
    Neuron,
    Squares,
    add_biases,
    adjust_up,
    emit_add,
    emit_count,
    emit_downs,
    emit_fill,
    find_value,
    is_firing,
)
from pi2.backends.kernels.operands import LINE, Activations, Prefetch, Vector
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import PartName, scale_bytes, weight_bytes

TOGETHER = 4
"""Neurons that a thread computes at the same time.  A loop that only reads rows of 7 KB, spread
over memory, got 15 GB/s with one row at a time, 19 with four and 20 with eight, of 22 in long runs
(Skylake, two threads).  Down vectors share the loads and stores of the sum."""


@dataclass(frozen=True, slots=True)
class Place:
    """Slot of a neuron, and its row of scales where these are resident."""

    slot: v.Expr
    row: v.Expr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceList:
    """A thread's neurons, `TOGETHER` at a time."""

    count: v.Expr
    slots: v.Buffer
    rows: v.Buffer | None
    locate: Callable[[v.Expr], v.Expr]
    """Places of the list's neurons in these."""
    ahead: v.Expr | None = None
    """Number of neurons from the list's first on, if others follow it."""

    def read(self, place: v.Expr) -> Place:
        index = self.locate(place)
        slot = v.let(self.slots[index])
        return Place(slot, None if self.rows is None else v.let(self.rows[index]))

    def count_turns(self) -> v.Expr:
        """Return how often `TOGETHER` neurons are to be taken."""
        return T.floordiv(self.count + (TOGETHER - 1), TOGETHER)

    def list_places(self, first: v.Expr) -> list[v.Expr]:
        """Return the places from ``first`` on; the last one stands for those beyond it."""
        return [T.min(first + index, self.count - 1) for index in range(TOGETHER)]

    def take(self, first: v.Expr) -> list[Place]:
        """Return the neurons from place ``first`` on, likewise."""
        return [self.read(place) for place in self.list_places(first)]

    def look_ahead(self, first: v.Expr) -> list[Place]:
        """Return the prefetched neurons from place ``first`` on, including some behind the list."""
        last = (self.count if self.ahead is None else self.ahead) - 1
        return [self.read(T.min(first + index, last)) for index in range(TOGETHER)]

    def visit(self, emit: Callable[[v.Expr, list[Place], list[Place]], None]) -> None:
        """Call ``emit(first place, neurons, neurons of the next turn)`` for all turns."""
        with T.serial(self.count_turns()) as turn:
            first = v.let(turn * TOGETHER)
            emit(first, self.take(first), self.take(first + TOGETHER))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Neurons of a call: ``slots`` int32 [count], and ``rows`` likewise of resident scales."""

    slots: v.Buffer
    rows: v.Buffer | None
    count: v.Expr

    def find(self, bundles: Bundles, place: v.Expr) -> Neuron:
        return bundles.find(self.slots[place], None if self.rows is None else self.rows[place])


def emit_gathered_gates(
    isa: Isa,
    activations: Activations,
    bundles: Bundles,
    gathered: Gathered,
    gates: v.Buffer,
    token: v.Expr,
) -> None:
    """Set ``gates`` float32 [count] to the gates of neurons for ``token``, the same bits as
    `emit_gathered` computes."""
    spec, count = bundles.spec, gathered.count

    def emit(thread: v.Expr) -> None:
        begin, end = emit_split(thread, spec.threads, count)
        with T.serial(T.floordiv(end - begin + (TOGETHER - 1), TOGETHER)) as turn:
            top = v.let(begin + turn * TOGETHER)
            # A repeated neuron writes the same value again.
            places = [v.let(T.min(top + index, end - 1)) for index in range(TOGETHER)]
            neurons = [gathered.find(bundles, place) for place in places]
            parts = [bundles.take_part(neuron, "gate") for neuron in neurons]
            found = emit_dots(isa, parts, activations, [token])
            for place, gate in zip(places, found, strict=True):
                v.store(gates, place, gate[0], 1)

    emit_shared(spec.threads, v.wide(count) * spec.bundle.gate_bytes, emit)


DOWN_TURNS = 16
"""Turns of `TOGETHER` down vectors that are added one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Room of the gathered FFN, shared by its calls.

    ``gates`` float32 [neurons], ``values`` float32 [neurons], ``firing`` int32 [neurons], and
    ``firing_rows`` likewise where scales are resident, else None;
    ``partial`` float32 [threads, hidden]: a sum per thread, added up in the order of threads;
    ``counts`` int32 [threads + 1]: the last one counts non-zero activations, ever."""

    gates: v.Buffer
    values: v.Buffer
    firing: v.Buffer
    firing_rows: v.Buffer | None
    partial: v.Buffer
    counts: v.Buffer
    squares: Squares | None = None
    """What activations are normalised by, if they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every loop of a call needs; ``routes`` are the weights of an MoE model's experts."""

    isa: Isa
    spec: KernelSpec
    activations: Activations
    bundles: Bundles
    scratch: Scratch
    routes: v.Buffer | None
    token: v.Expr
    cutoffs: v.Buffer | None = None

    @property
    def names(self) -> list[PartName]:
        """Parts that are multiplied: gate and up, or up."""
        return [part.name for part in self.spec.bundle.parts[:-1]]

    def find(self, place: Place) -> Neuron:
        return self.bundles.find(place.slot, place.row)

    def ask_for(self, places: Sequence[Place], name: PartName) -> Prefetch:
        """Return what to call while parts are read, to ask for ``name`` of neurons ``places``."""
        parts, level = self.take_parts(places, name), self.isa.prefetch_level
        part = next(part for part in self.spec.bundle.parts if part.name == name)
        hidden = self.spec.hidden
        own = hidden if part.spread else scale_bytes(hidden, part.precision)
        # Scales follow the weights: a processor that fills its first cache has begun to read ahead.
        asks_scales = own and (level > 1 or part.resident)

        def ask(index: int, byte: v.Expr, size: int) -> None:
            vector = parts[index]
            for line in range(0, size, LINE):
                v.prefetch(vector.weights, vector.weights_base + byte + line, level)
            if asks_scales:
                place = T.floordiv(byte * own, weight_bytes(hidden, part.precision))
                v.prefetch(vector.scales, vector.scales_base + place, level)

        return ask

    def take_parts(self, places: Sequence[Place], name: PartName) -> list[Vector]:
        return [self.bundles.take_part(self.find(place), name) for place in places]

    def dot(
        self,
        places: Sequence[Place],
        name: PartName,
        following: Sequence[Place],
        next_name: PartName,
    ) -> list[v.Expr]:
        """Return part ``name`` of each neuron times the activations; meanwhile ask for part
        ``next_name`` of neurons ``following``."""
        parts, ask = self.take_parts(places, name), self.ask_for(following, next_name)
        dots = emit_dots(self.isa, parts, self.activations, [self.token], ask)
        return [row[0] for row in dots]


ReadGate = Callable[[v.Expr], v.Expr]
"""Gives the known gate of the neuron at a place of a thread's list."""


def emit_gathered(
    run: Run,
    gathered: Gathered,
    total: v.Buffer,
    known: tuple[v.Buffer, v.Buffer] | None = None,
    limit: v.Expr | None = None,
) -> None:
    """Add neurons to ``total`` float32 [hidden], lane order.

    ``known`` (scores float32 [neurons], indices int32 [count]): gate i is ``scores[indices[i]]``;
    of smooth activations it is the activation itself.  These have a ``limit``: neurons whose
    activation, up included, is smaller than that are left out."""
    spec, scratch, token, count = run.spec, run.scratch, run.token, gathered.count
    threads = spec.threads

    def emit(thread: v.Expr) -> None:
        target = v.let(thread * spec.hidden)
        emit_fill(scratch.partial, target, spec.hidden)
        # As many as a thread has, one after the other: no cache line has two writers for long.
        rest = T.floormod(count, threads)
        own = v.let(T.floordiv(count, threads) + T.Select(thread < rest, T.int32(1), T.int32(0)))
        first = v.let(thread * T.floordiv(count, threads) + T.min(thread, rest))
        given = PlaceList(
            count=own,
            slots=gathered.slots,
            rows=gathered.rows,
            locate=lambda place: thread + place * threads,
        )

        def read_gate(place: v.Expr) -> v.Expr:
            assert known is not None
            return known[0][known[1][thread + place * threads]]

        is_one = spec.passes == 1 or not spec.ffn.gated
        emit_all = emit_at_once if is_one else emit_in_turn
        fired = emit_all(run, given, read_gate if known else None, first, target, limit)
        v.store(scratch.counts, thread, fired, 1)
        if scratch.squares is not None:
            scratch.squares.set_own(thread, scratch.values, first, fired)

    read_bytes = v.wide(count) * (2 * spec.bundle.down_bytes)
    emit_shared(threads, read_bytes, emit)
    emit_add(spec, scratch.partial, total, token)
    if scratch.squares is not None:
        scratch.squares.emit_add(threads, token)
    emit_count(spec, scratch.counts)


def emit_at_once(
    run: Run,
    given: PlaceList,
    gates: ReadGate | None,
    first: v.Expr,
    target: v.Expr,
    limit: v.Expr | None,
) -> v.Expr:
    """Compute neurons in one loop; return the number of firing ones.

    Gate and up of a few come first. Firing ones wait in a list until there are enough to fetch the
    sum, which the first-level cache does not hold next to gates and ups. The down vectors of the
    next few are prefetched while the first are added."""
    scratch = run.scratch
    kept, added = _Kept(scratch, first), v.Cell(T.int32(0))
    turns = v.let(given.count_turns())
    with T.serial(turns + 1) as turn:
        with T.If(turn < turns), T.Then():
            start = v.let(turn * TOGETHER)
            places, following = given.take(start), given.look_ahead(start + TOGETHER)
            if gates is None:
                # A row is read from its beginning to its end.
                names = run.names
                later = places if run.isa.prefetch_level == 1 else following
                asked = [*((later, name) for name in names[1:]), (following, names[0])]
                dots = [run.dot(places, name, *ask) for name, ask in zip(names, asked, strict=True)]
            else:
                dots = [
                    [v.let(gates(place)) for place in given.list_places(start)],
                    run.dot(places, "up", following, "up"),
                ]
            for index, (place, *terms) in enumerate(zip(places, *dots, strict=True)):
                there = start + index < given.count
                _keep_active(run, kept, there, place, terms, limit, 0 if gates is None else 1)
        waiting = v.let(kept.count - added.get())
        # One turn more has to wait: memory is asked for it during the last one.
        is_enough = waiting >= (DOWN_TURNS + 1) * TOGETHER
        some = T.Select(is_enough, T.int32(DOWN_TURNS), T.int32(0))
        all_of_them = T.floordiv(waiting + (TOGETHER - 1), TOGETHER)
        fired = _list_firing(scratch, first, kept.count)
        with T.serial(v.let(T.Select(turn < turns, some, all_of_them))):
            _emit_down_turn(run, fired, first, v.let(added.get()), target)
            added.set(added.get() + TOGETHER)
    return v.let(kept.count)


def emit_in_turn(
    run: Run,
    given: PlaceList,
    gates: ReadGate | None,
    first: v.Expr,
    target: v.Expr,
    limit: v.Expr | None,
) -> v.Expr:
    """Compute all gates, then ups, then downs; return the number of neurons that fire."""
    scratch = run.scratch

    def list_firing(number: v.Expr) -> PlaceList:
        return _list_firing(scratch, first, number)

    if gates is None:
        opened = _emit_gates(run, given, first)
    else:
        opened = given.count
        with T.serial(opened) as step:
            v.store(scratch.gates, first + step, gates(step), 1)
            _note(scratch, first + step, given.read(step))
    fired = _emit_ups(run, list_firing(opened), first, limit)

    def emit(start: v.Expr, _places: list[Place], _following: list[Place]) -> None:
        _emit_down_turn(run, list_firing(fired), first, start, target)

    list_firing(fired).visit(emit)
    return fired


def _list_firing(scratch: Scratch, first: v.Expr, count: v.Expr) -> PlaceList:
    """Return the neurons of a thread's list that begins with place ``first``."""
    return PlaceList(
        count=count,
        slots=scratch.firing,
        rows=scratch.firing_rows,
        locate=lambda place: first + place,
    )


def _note(scratch: Scratch, index: v.Expr, place: Place) -> None:
    v.store(scratch.firing, index, place.slot, 1)
    if scratch.firing_rows is not None:
        v.store(scratch.firing_rows, index, place.row, 1)


def _emit_gates(run: Run, given: PlaceList, first: v.Expr) -> v.Expr:
    """Compute gates; list the open ones from place ``first`` on; return their number."""
    scratch = run.scratch
    kept = _Kept(scratch, first)

    def emit(start: v.Expr, places: list[Place], following: list[Place]) -> None:
        gates = run.dot(places, "gate", following, "gate")
        for index, (place, dot) in enumerate(zip(places, gates, strict=True)):
            (gate,) = add_biases(run.bundles, run.find(place), [dot])
            opens = None if run.spec.is_smooth else is_firing(run.spec, gate)
            there = start + index < given.count
            kept.keep(there, place, scratch.gates, gate, opens)

    given.visit(emit)
    return v.let(kept.count)


def _emit_ups(run: Run, opened: PlaceList, first: v.Expr, limit: v.Expr | None) -> v.Expr:
    """Compute activations of listed neurons; keep the firing ones; return their number."""
    scratch = run.scratch
    kept = _Kept(scratch, first)

    def emit(start: v.Expr, places: list[Place], following: list[Place]) -> None:
        # Read before anything is written: the list of those that are kept overtakes nothing.
        gates = [v.let(scratch.gates[first + start + index]) for index in range(TOGETHER)]
        ups = run.dot(places, "up", following, "up")
        for index, (place, gate, up) in enumerate(zip(places, gates, ups, strict=True)):
            there = start + index < opened.count
            _keep_active(run, kept, there, place, [gate, up], limit, 1)

    opened.visit(emit)
    return v.let(kept.count)


class _Kept:
    """A thread's list of neurons, from place ``first`` on."""

    def __init__(self, scratch: Scratch, first: v.Expr) -> None:
        self._scratch = scratch
        self._first = first
        self._cell = v.Cell(T.int32(0))

    @property
    def count(self) -> v.Expr:
        return self._cell.get()

    def keep(
        self, there: v.Expr, place: Place, values: v.Buffer, value: v.Expr, stays: v.Expr | None
    ) -> None:
        """Write a neuron of a turn to the lists, and go on to the next place if it ``stays``.

        Nothing is written of neurons that are not ``there``, beyond the list's end: if all have
        stayed, the next place is another thread's."""
        with T.If(there), T.Then():
            index = v.let(self._first + self.count)
            v.store(values, index, value, 1)
            _note(self._scratch, index, place)
            one = T.int32(1)
            more = one if stays is None else T.Select(stays, one, T.int32(0))
            self._cell.set(self.count + more)


def _keep_active(
    run: Run,
    kept: _Kept,
    there: v.Expr,
    place: Place,
    terms: list[v.Expr],
    limit: v.Expr | None,
    done: int,
) -> None:
    """Compute an activation of gate and up, of which the first ``done`` have their biases; keep its
    neuron unless it is 0 or below ``limit``."""
    neuron = run.find(place)
    terms[done:] = add_biases(run.bundles, neuron, terms[done:], done)
    if limit is None:
        value = v.let(find_value(run.bundles, neuron, run.token, terms, run.routes, run.cutoffs))
        fires = value != v.constant(0.0, "float32")
    else:
        value = v.let(terms[0] * adjust_up(run.spec, terms[1]))
        fires = T.abs(value) >= limit
    kept.keep(there, place, run.scratch.values, value, fires)


def _emit_down_turn(
    run: Run, fired: PlaceList, first: v.Expr, start: v.Expr, target: v.Expr
) -> None:
    """Add the down vectors of a few neurons of the list ``fired``, times their activations."""
    places, following = fired.take(start), fired.take(start + TOGETHER)
    zero = v.constant(0.0, "float32")
    values = [
        v.let(T.Select(place < fired.count, run.scratch.values[first + place], zero))
        for place in (start + index for index in range(TOGETHER))
    ]
    _emit_down(run, places, following, values, target)


def _emit_down(
    run: Run,
    places: Sequence[Place],
    following: Sequence[Place],
    values: Sequence[v.Expr],
    base: v.Expr,
) -> None:
    """Add the down vector of each neuron times its value to ``partial[base:]`` (lane order)."""
    vectors, ask = run.take_parts(places, "down"), run.ask_for(following, "down")
    once = run.activations.once
    weighed = list(zip(vectors, values, strict=True))
    emit_downs(run.isa, run.spec, weighed, run.scratch.partial, base, once, ask)
