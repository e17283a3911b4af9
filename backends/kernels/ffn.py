"""The FFN: over gathered neurons for one token, over contiguous neurons for a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v
from pi2.backends.kernels.dots import Activations, Vector, emit_dots
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import LINE, ROW_TILE, emit_shared, emit_split, emit_token_tiles
from pi2.backends.kernels.neurons import (
    activate,
    emit_unit,
    is_firing,
    list_units,
    load_unit_scale,
    take_part,
)
from pi2.backends.kernels.spec import PANEL, PARTS, UNPACKED, KernelSpec
from pi2.plan.layout import GROUP, PartName, Precision, vector_bytes

AHEAD_BYTES = 4096
"""How far ahead of the bytes in use memory is asked for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """The same stretch of one neuron after another, as memory is read: what is asked for lies
    `AHEAD_BYTES` ahead, in this neuron or in one of the next.

    Requests are spread evenly over the stream.  All at once, or none while down is computed, they
    wait for each other: 8 instead of 11.5 GB/s of 12.5 that the core could read.
    """

    arena: v.Buffer
    start: int
    """Where the stretch begins in a bundle."""
    length: int
    near: v.Expr
    """First byte of the neuron that lies ``AHEAD_BYTES // length`` further."""
    far: v.Expr
    """First byte of the neuron after that one."""

    def ask_for(self, precision: Precision, part: int) -> Callable[[v.Expr, int], None]:
        """Return what to call while the part at byte ``part`` of a bundle is read."""
        # Scales follow the weights: a block's share of the part is a little more than its weights.
        over, under = {"int4": (9, 8), "int8": (17, 16), "fp16": (1, 1)}[precision]
        shift = part - self.start + AHEAD_BYTES % self.length

        def ask(byte: v.Expr, size: int) -> None:
            place = v.let(T.floordiv(byte * over, under) + shift)
            inside = v.let(self.near + self.start + place)
            beyond = self.far + self.start + place - self.length
            first = v.let(T.Select(place < self.length, inside, beyond))
            for line in range(0, -(-size * over // under), LINE):
                v.prefetch(self.arena, first + line)

        return ask


def emit_gathered(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    arena: v.Buffer,
    slots: v.Buffer,
    count: v.Expr,
    gates: v.Buffer,
    firing: v.Buffer,
    partial: v.Buffer,
    counts: v.Buffer,
    total: v.Buffer,
) -> None:
    """Add ``count`` neurons of ``arena`` uint8 [., stride] to ``total`` (y of one token).

    ``slots`` int32 [count]; ``gates`` float32 and ``firing`` int32 [count or more] are scratch;
    ``partial`` float32 [threads, hidden] one sum per thread, added up in the order of threads;
    ``counts`` int32 [threads + 1]: the last one counts non-zero activations, ever.

    First all gates, then up and down of the neurons whose gate is open, divided evenly: which
    thread computes a neuron depends on ``slots`` and the gates alone, so that equal input gives
    equal bits.
    """
    threads, hidden, zero = spec.threads, spec.hidden, T.int32(0)

    parts = {part.name: part.weights_offset for part in spec.bundle.parts}
    part_bytes = vector_bytes(hidden, spec.ffn)

    def base_of(array: v.Buffer, index: v.Expr) -> v.Expr:
        return v.let(v.wide(array[index]) * spec.stride)

    def follow(array: v.Buffer, index: v.Expr, end: v.Expr, name: PartName, length: int) -> _Stream:
        near = T.min(index + AHEAD_BYTES // length, end - 1)
        far = T.min(index + AHEAD_BYTES // length + 1, end - 1)
        return _Stream(
            arena=arena,
            start=parts[name],
            length=length,
            near=base_of(array, near),
            far=base_of(array, far),
        )

    def emit_gates(thread: v.Expr) -> None:
        begin, end = emit_split(thread, threads, count)
        with T.serial(end - begin) as step:
            index = v.let(begin + step)
            vector = take_part(spec, arena, base_of(slots, index), "gate")
            stream = follow(slots, index, end, "gate", part_bytes)
            ask = stream.ask_for(spec.ffn, parts["gate"])
            v.store(gates, index, emit_dots(isa, [vector], activations, [zero], ask)[0][0], 1)

    emit_shared(threads, v.wide(count) * part_bytes, emit_gates)
    kept = T.alloc_buffer((1,), "int32")
    if spec.activation == "silu":
        v.store(kept, 0, count, 1)
        with T.serial(count) as index:
            v.store(firing, index, slots[index], 1)
    else:
        v.store(kept, 0, zero, 1)
        with T.serial(count) as index:
            gate = v.let(gates[index])
            place = v.let(kept[0])
            v.store(gates, place, gate, 1)
            v.store(firing, place, slots[index], 1)
            v.store(kept, 0, place + T.Select(is_firing(spec, gate), T.int32(1), zero), 1)
    active = v.let(kept[0])

    def emit_values(thread: v.Expr) -> None:
        with T.serial(hidden // 16) as step:
            place = thread * hidden + step * 16
            v.store(partial, place, v.constant(0.0, "float32", 16), 16)
        begin, end = emit_split(thread, threads, active)
        # In a register: counters of two threads share a cache line.
        fired = v.Cell(zero)
        with T.serial(end - begin) as step:
            index = v.let(begin + step)
            base = base_of(firing, index)
            stream = follow(firing, index, end, "up", 2 * part_bytes)
            ask = stream.ask_for(spec.ffn, parts["up"])
            vector = take_part(spec, arena, base, "up")
            up = emit_dots(isa, [vector], activations, [zero], ask)[0][0]
            value = v.let(activate(spec, gates[index], up))
            with T.If(value != v.constant(0.0, "float32")), T.Then():
                fired.set(fired.get() + 1)
                _emit_down(
                    isa,
                    spec,
                    take_part(spec, arena, base, "down"),
                    value,
                    partial,
                    v.let(thread * hidden),
                    activations.once,
                    stream.ask_for(spec.ffn, parts["down"]),
                )
        v.store(counts, thread, fired.get(), 1)
        v.store(counts, thread, fired.get(), 1)

    emit_shared(threads, v.wide(active) * (2 * part_bytes), emit_values)
    with T.serial(hidden // 16) as step:
        place = step * 16
        value = v.load(total, place, 16)
        for thread in range(threads):
            value = value + v.load(partial, thread * hidden + place, 16)
        v.store(total, place, value, 16)
    for thread in range(threads):
        v.store(counts, threads, counts[threads] + counts[thread], 1)


def _emit_down(
    isa: Isa,
    spec: KernelSpec,
    vector: Vector,
    value: v.Expr,
    target: v.Buffer,
    base: v.Expr,
    once: v.Expr,
    ask: Callable[[v.Expr, int], None],
) -> None:
    """Add ``value`` times the down vector to ``target[base:]`` (lane order)."""
    per_block = {"int4": 4, "int8": 8, "fp16": 1}[spec.ffn]
    size = {"int4": GROUP // 2, "int8": GROUP, "fp16": 2 * GROUP}[spec.ffn]

    def emit_block(lanes: int, first: v.Expr) -> None:
        ask(v.wide(first * size), size * (1 if spec.ffn == "fp16" else lanes))
        scale = v.let(load_unit_scale(vector, lanes, first) * v.splat(value, lanes))
        for chunk in range(per_block):
            for place, weights in emit_unit(isa, vector, lanes, first, chunk):
                at = base + place
                v.store(target, at, T.fma(weights, scale, v.load(target, at, lanes)), lanes)

    for lanes, group, units in list_units(spec.hidden, spec.ffn):
        groups = 1 if spec.ffn == "fp16" else lanes
        with T.serial(units // per_block * once) as block:
            emit_block(lanes, group + block * groups)


def emit_dense(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: v.Buffer,
    count: v.Expr,
    tokens: v.Expr,
    values: v.Buffer,
    masks: v.Buffer,
    unpacked: v.Buffer,
    total: v.Buffer,
) -> None:
    """Add ``count`` contiguous neurons to ``total`` (y [tokens, hidden], lane order).

    ``bundles`` uint8 [count, stride]; ``values`` float32 [tokens, PANEL] activations of a panel;
    ``masks`` int32 [tokens, PARTS], a bit for each that is not zero; ``unpacked`` float32
    [threads, UNPACKED * 128].  Per panel of neurons: first the activations, threads sharing the
    neurons; then y, threads sharing the elements, for active neurons only.  So no sum depends on
    the number of threads.
    """
    threads, hidden = spec.threads, spec.hidden
    with T.serial(T.floordiv(count + PANEL - 1, PANEL)) as panel:
        origin = v.let(panel * PANEL)
        size = v.let(T.min(count - origin, PANEL))
        with T.parallel(threads) as thread:
            begin, end = emit_split(thread, threads, size)
            with T.serial(T.floordiv(end - begin + ROW_TILE - 1, ROW_TILE)) as tile:
                start = v.let(begin + tile * ROW_TILE)
                stop = v.let(T.min(start + ROW_TILE, end))
                _emit_activations(
                    isa, spec, activations, bundles, origin, start, stop, tokens, values
                )
        with T.parallel(tokens) as token:
            _emit_masks(values, size, token, masks)
        runs = list_units(hidden, spec.ffn)
        with T.parallel(threads) as thread:
            begin, end = emit_split(thread, threads, sum(units for _, _, units in runs))
            with T.serial(end - begin) as step:
                unit = v.let(begin + step)
                passed = 0
                for lanes, group, units in runs:
                    with T.If(T.And(unit >= passed, unit < passed + units)), T.Then():
                        _emit_unit_sum(
                            isa,
                            spec,
                            bundles,
                            origin,
                            size,
                            tokens,
                            values,
                            masks,
                            unpacked,
                            v.let(thread * (UNPACKED * 128)),
                            total,
                            lanes,
                            group,
                            v.let(unit - passed),
                        )
                    passed += units


def _emit_activations(
    isa: Isa,
    spec: KernelSpec,
    activations: Activations,
    bundles: v.Buffer,
    origin: v.Expr,
    start: v.Expr,
    stop: v.Expr,
    tokens: v.Expr,
    values: v.Buffer,
) -> None:
    """Compute the activations of neurons ``start`` to ``stop`` of a panel for all tokens."""
    together = isa.tile_rows // 2

    def emit_tile(_first: v.Expr, named: list[v.Expr]) -> None:
        with T.serial(T.floordiv(stop - start + together - 1, together)) as step:
            top = v.let(start + step * together)
            neurons = [v.let(T.min(top + index, stop - 1)) for index in range(together)]
            bases = [v.let(v.wide(origin + neuron) * spec.stride) for neuron in neurons]
            names: tuple[PartName, ...] = ("gate", "up")
            parts = [take_part(spec, bundles, base, name) for base in bases for name in names]
            dots = emit_dots(isa, parts, activations, named)
            # A repeated token or neuron writes the same value again.
            for index, neuron in enumerate(neurons):
                gates, ups = dots[2 * index], dots[2 * index + 1]
                for token, gate, up in zip(named, gates, ups, strict=True):
                    v.store(values, token * PANEL + neuron, activate(spec, gate, up), 1)

    emit_token_tiles(isa, tokens, emit_tile)


def _emit_unit_sum(
    isa: Isa,
    spec: KernelSpec,
    bundles: v.Buffer,
    origin: v.Expr,
    size: v.Expr,
    tokens: v.Expr,
    values: v.Buffer,
    masks: v.Buffer,
    unpacked: v.Buffer,
    scratch: v.Expr,
    total: v.Buffer,
    lanes: int,
    group: int,
    unit: v.Expr,
) -> None:
    """Add a panel's neurons to one unit of y for all tokens."""
    per_block = {"int4": 4, "int8": 8, "fp16": 1}[spec.ffn]
    groups = 1 if spec.ffn == "fp16" else lanes
    first = v.let(group + T.floordiv(unit, per_block) * groups)
    chunk = v.let(T.floormod(unit, per_block))
    with T.serial(T.floordiv(size + UNPACKED - 1, UNPACKED)) as part:
        begin = v.let(part * UNPACKED)
        number = v.let(T.min(size - begin, UNPACKED))
        places: list[v.Expr] = []
        with T.serial(number) as index:
            base = v.let(v.wide(origin + begin + index) * spec.stride)
            vector = take_part(spec, bundles, base, "down")
            scale = v.let(load_unit_scale(vector, lanes, first))
            rows = emit_unit(isa, vector, lanes, first, chunk)
            for row, (place, weights) in enumerate(rows):
                at = scratch + (index * len(rows) + row) * lanes
                v.store(unpacked, at, weights * scale, lanes)
                places.append(place)
        count = len(places)
        with T.serial(tokens) as token:
            origin_y = v.let(token * spec.hidden)
            sums = [v.Cell(v.load(total, origin_y + place, lanes)) for place in places]
            mask = v.Cell(masks[token * PARTS + part])
            with T.serial(T.popcount(mask.get())):
                index = v.let(count_trailing_zeros(mask.get()))
                mask.set(mask.get() & (mask.get() - 1))
                value = v.let(v.splat(values[token * PANEL + begin + index], lanes))
                row = v.let(scratch + index * (count * lanes))
                for place, cell in enumerate(sums):
                    weights = v.load(unpacked, row + place * lanes, lanes)
                    cell.set(T.fma(weights, value, cell.get()))
            for place, cell in zip(places, sums, strict=True):
                v.store(total, origin_y + place, cell.get(), lanes)


def count_trailing_zeros(mask: v.Expr) -> v.Expr:
    """Return the place of the lowest set bit of an int32 that is not 0."""
    return T.call_llvm_pure_intrin("int32", "llvm.cttz.i32", mask, T.IntImm("bool", 1))


def _emit_masks(values: v.Buffer, size: v.Expr, token: v.Expr, masks: v.Buffer) -> None:
    """Set bit i of ``masks[token, part]`` where activation i of a part is not zero."""
    with T.serial(T.floordiv(size + UNPACKED - 1, UNPACKED)) as part:
        begin = v.let(part * UNPACKED)
        mask = v.Cell(T.int32(0))
        with T.serial(T.min(size - begin, UNPACKED)) as index:
            fires = values[token * PANEL + begin + index] != v.constant(0.0, "float32")
            bit = T.Select(fires, T.int32(1), T.int32(0)) << index
            mask.set(mask.get() | bit)
        v.store(masks, token * PARTS + part, mask.get(), 1)
