"""Layers that keep a state: short convolutions, the gated delta rule and Mamba-2.

`pi2.backends.reference.instructions.states` defines them.  Tokens come in ``runs``
of ``steps`` tokens each, that follow each other in a sequence: a chunk is one run, and each token
of a step is one.  A head's state is [key_dim, value_dim]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.arguments import Arguments, Vector, divide
from pi2.backends.gpu.kernels.elements import HEAD_THREADS, soften
from pi2.backends.gpu.kernels.specification import Axis

_THREADS = 64
_LANES, _SLICES = 32, 8
"""Columns of a head's matrix that a work group of ``recur`` has, and parts of its rows."""
_SMALLEST_NORM = 1e-6


def emit_convolve(own: Arguments) -> None:
    """A thread takes a channel through a run."""
    own.kernel.block = (_THREADS, 1, 1)
    kept = own.window - 1
    with own.kernel.run(Axis(number="channels", per=_THREADS), Axis(number="runs")) as place:
        at = c.let(place.group[0] * _THREADS + place.thread[0])
        channel = c.let(T.min(at, own.channels - 1))
        source = c.let(own.places[channel]) if own.has_places else channel
        first = c.let(place.group[1] * own.steps)
        weights = (own.weights[step * own.channels + channel] for step in range(kept + 1))
        factors = [c.let(weight) for weight in weights]
        tail: list[c.Cell] = []
        if kept:
            begin = own.sequences[first] * own.sequence_stride + channel
            position, tails = c.let(own.positions[first]), own.tails.skip(begin)
            # A sequence that begins has nothing before it.
            tail += [
                c.Cell(T.Select(position > 0, tails[step * own.channels], c.number(0.0)))
                for step in range(kept)
            ]
        with T.serial(own.steps) as turn:
            row = c.let((first + turn) * own.x_stride + source)
            value = c.let(own.x[row])
            if own.has_gates:
                value = c.let(value * own.before[row])
            total = c.Cell(factors[kept] * value)
            for factor, cell in zip(factors, tail, strict=False):
                total.add(factor * cell.get())
            if own.has_bias:
                total.add(own.bias[channel])
            for cell, following in pairwise(tail):
                cell.set(following.get())
            if tail:
                tail[-1].set(value)
            found = c.let(total.get())
            if own.is_silu:
                found = c.let(found * c.squash(found))
            if own.has_gates:
                found = c.let(found * own.after[row])
            with c.when(at < own.channels):
                own.y.put((first + turn) * own.y_stride + at, found)
        for step, cell in enumerate(tail):
            with c.when(at < own.channels):
                tails.put(step * own.channels, cell.get())


def emit_prepare(own: Arguments) -> None:
    """A work group makes the factors of a value head, and brings a key head to length 1."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        if own.is_delta:
            size, key_dim = T.cast(own.key_dim, "float32"), own.key_dim
            for vectors, scale in ((own.queries, c.number(1.0) / T.sqrt(size)), (own.keys, None)):
                # All heads take part: barriers are for whole groups.
                key_head = T.min(head, own.key_heads - 1)
                x = vectors.skip(token * own.x_stride + key_head * key_dim)
                length = c.add_squares(x.__getitem__, key_dim, thread, HEAD_THREADS)
                factor = c.number(1.0) / T.sqrt(length + c.number(_SMALLEST_NORM))
                factor = c.let(factor if scale is None else factor * scale)
                with c.walk(key_dim, thread, HEAD_THREADS) as index, c.when(head < own.key_heads):
                    x.put(index, x[index] * factor)
        step = own.steps[token * own.steps_stride + own.step_of[head]]
        soft = soften(c.let(step + own.bias[head]))
        if own.is_delta:
            place_of_entry = token * own.entries_stride + own.entry_of[head]
            entry = c.let(c.squash(c.let(own.entries[place_of_entry])))
        else:
            entry = c.let(T.min(T.max(soft, own.shortest), own.longest))
        decay = T.exp(own.rates[head] * (soft if own.is_delta else entry))
        with c.when(thread == 0):
            own.y.put(token * own.y_stride + head, entry)
            own.y.put(token * own.y_stride + own.heads + head, decay)


def emit_recur(own: Arguments) -> None:
    """A work group takes 32 columns of a value head's matrix through a run; a thread keeps an
    eighth of a column's rows in registers."""
    own.kernel.block = (_LANES, _SLICES, 1)
    depth, width = own.key_dim, own.value_dim
    each, strips = -(-depth // _SLICES), -(-width // _LANES)
    with own.kernel.run(Axis(times=own.heads * strips), Axis(number="runs")) as place:
        lane, part, _ = place.thread
        head = divide(place.group[0], strips)
        at = c.let(T.floormod(place.group[0], strips) * _LANES + lane)
        column = c.let(T.min(at, width - 1))
        first = c.let(place.group[1] * own.steps)
        sequence = c.let(own.sequences[first])
        position = c.let(own.positions[first])
        memory = own.memory.skip(sequence * own.sequence_stride + head * (depth * width))
        rows = [c.let(part * each + index) for index in range(each)]
        inside = [c.let(T.min(row, depth - 1)) for row in rows]
        cells = []
        for row, known in zip(rows, inside, strict=True):
            is_there = T.And(position > 0, row < depth)
            before = memory[known * width + column]
            cells.append(c.Cell(T.Select(is_there, before, c.number(0.0))))
        first_key = divide(head, own.group) * depth
        value_at = c.let(own.value_of[head] + column)
        sums = c.share(_SLICES * _LANES)
        with T.serial(own.steps) as turn:
            token = c.let(first + turn)

            def read(vectors: Vector) -> list[c.Expr]:
                """Elements of the head's key or query, 0 beyond them."""
                x = vectors.skip(token * own.x_stride + first_key)
                return [
                    c.let(T.Select(row < depth, x[known], c.number(0.0)))
                    for row, known in zip(rows, inside, strict=True)
                ]

            keys, queries = read(own.keys), read(own.queries)
            value = c.let(own.values[token * own.x_stride + value_at])
            factors = own.factors.skip(token * own.factors_stride + head)
            entry, decay = c.let(factors[0]), c.let(factors[own.heads])
            added = value
            if own.is_delta:
                products = [cell.get() * key for cell, key in zip(cells, keys, strict=True)]
                added = c.let(value - decay * _add_slices(sums, lane, part, products))
                c.wait_for_group()
            added = c.let(added * entry)
            for cell, key in zip(cells, keys, strict=True):
                cell.set(cell.get() * decay + key * added)
            products = [cell.get() * query for cell, query in zip(cells, queries, strict=True)]
            mixed = _add_slices(sums, lane, part, products)
            if own.has_skip:
                mixed = mixed + own.skip[head] * value
            with c.when(T.And(part == 0, at < width)):
                own.y.put(token * own.y_stride + head * width + at, mixed)
            # Sums of the next token come where these were.
            c.wait_for_group()
        for row, cell in zip(rows, cells, strict=True):
            with c.when(T.And(row < depth, at < width)):
                memory.put(row * width + at, cell.get())


def _add_slices(shared: c.Buffer, lane: c.Expr, part: c.Expr, terms: Sequence[c.Expr]) -> c.Expr:
    """Return the sum of terms of a column over all parts of its rows, the same in all of them."""
    own = c.Cell(c.number(0.0))
    for term in terms:
        own.add(term)
    c.store(shared, part * _LANES + lane, own.get())
    c.wait_for_group()
    total = c.Cell(c.number(0.0))
    for piece in range(_SLICES):
        total.add(shared[piece * _LANES + lane])
    return c.let(total.get())
