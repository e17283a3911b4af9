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
    earlier = ("sequences", "positions", "tails") if kept else ()
    arrays = own.take_some("x", "weights", "y", "bias", "places", *earlier)
    gates = own.take("before", "after") if own.has_gates else []
    x_stride, y_stride, sequence_stride, channels, steps, _ = own.number(
        *("x_stride", "y_stride", "sequence_stride", "channels", "steps", "runs")
    )
    with own.kernel.run(Axis(number="channels", per=_THREADS), Axis(number="runs")) as place:
        at = c.let(place.group[0] * _THREADS + place.thread[0])
        channel = c.let(T.min(at, channels - 1))
        source = c.let(arrays["places"][channel]) if "places" in arrays else channel
        first = c.let(place.group[1] * steps)
        factors = [c.let(arrays["weights"][step * channels + channel]) for step in range(kept + 1)]
        tail: list[c.Cell] = []
        if kept:
            begin = arrays["sequences"][first] * sequence_stride + channel
            position, tails = c.let(arrays["positions"][first]), arrays["tails"].skip(begin)
            # A sequence that begins has nothing before it.
            tail += [
                c.Cell(T.Select(position > 0, tails[step * channels], c.number(0.0)))
                for step in range(kept)
            ]
        with T.serial(steps) as turn:
            row = c.let((first + turn) * x_stride + source)
            value = c.let(arrays["x"][row])
            if gates:
                value = c.let(value * gates[0][row])
            total = c.Cell(factors[kept] * value)
            for factor, cell in zip(factors, tail, strict=False):
                total.add(factor * cell.get())
            if "bias" in arrays:
                total.add(arrays["bias"][channel])
            for cell, following in pairwise(tail):
                cell.set(following.get())
            if tail:
                tail[-1].set(value)
            found = c.let(total.get())
            if own.is_silu:
                found = c.let(found * c.squash(found))
            if gates:
                found = c.let(found * gates[1][row])
            with c.when(at < channels):
                arrays["y"].put((first + turn) * y_stride + at, found)
        for step, cell in enumerate(tail):
            with c.when(at < channels):
                tails.put(step * channels, cell.get())


def emit_prepare(own: Arguments) -> None:
    """A work group makes the factors of a value head, and brings a key head to length 1."""
    own.kernel.block = (HEAD_THREADS, 1, 1)
    names = ["entries", "entry_of", "steps", "step_of"] if own.is_delta else ["steps", "step_of"]
    names += ["bias", "rates", "y", *(["queries", "keys"] if own.is_delta else [])]
    arrays = dict(zip(names, own.take(*names), strict=True))
    entries_stride, steps_stride, y_stride, x_stride, heads, key_heads, key_dim, _ = own.number(
        *("entries_stride", "steps_stride", "y_stride", "x_stride", "heads", "key_heads"),
        *("key_dim", "tokens"),
    )
    shortest, longest = own.real("shortest", "longest")
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        if own.is_delta:
            size = T.cast(key_dim, "float32")
            for name, scale in (("queries", c.number(1.0) / T.sqrt(size)), ("keys", None)):
                # All heads take part: barriers are for whole groups.
                key_head = T.min(head, key_heads - 1)
                x = arrays[name].skip(token * x_stride + key_head * key_dim)
                length = _find_square(x, key_dim, thread)
                factor = c.number(1.0) / T.sqrt(length + c.number(_SMALLEST_NORM))
                factor = c.let(factor if scale is None else factor * scale)
                with c.walk(key_dim, thread, HEAD_THREADS) as index, c.when(head < key_heads):
                    x.put(index, x[index] * factor)
        step = arrays["steps"][token * steps_stride + arrays["step_of"][head]]
        soft = soften(c.let(step + arrays["bias"][head]))
        if own.is_delta:
            place_of_entry = token * entries_stride + arrays["entry_of"][head]
            entry = c.let(c.squash(c.let(arrays["entries"][place_of_entry])))
        else:
            entry = c.let(T.min(T.max(soft, shortest), longest))
        decay = T.exp(arrays["rates"][head] * (soft if own.is_delta else entry))
        with c.when(thread == 0):
            arrays["y"].put(token * y_stride + head, entry)
            arrays["y"].put(token * y_stride + heads + head, decay)


def _find_square(x: Vector, count: c.Expr, thread: c.Expr) -> c.Expr:
    def square(index: c.Expr) -> c.Expr:
        value = c.let(x[index])
        return value * value

    return c.add_in_group(square, count, thread, HEAD_THREADS)


def emit_recur(own: Arguments) -> None:
    """A work group takes 32 columns of a value head's matrix through a run; a thread keeps an
    eighth of a column's rows in registers."""
    own.kernel.block = (_LANES, _SLICES, 1)
    depth, width = own.key_dim, own.value_dim
    each, strips = -(-depth // _SLICES), -(-width // _LANES)
    arrays = own.take_some(
        *("queries", "keys", "values", "value_of", "factors", "memory", "y", "skip"),
        *("sequences", "positions"),
    )
    x_stride, factors_stride, sequence_stride, y_stride, group, steps, _ = own.number(
        *("x_stride", "factors_stride", "sequence_stride", "y_stride", "group", "steps", "runs")
    )
    with own.kernel.run(Axis(times=own.heads * strips), Axis(number="runs")) as place:
        lane, part, _ = place.thread
        head = divide(place.group[0], strips)
        at = c.let(T.floormod(place.group[0], strips) * _LANES + lane)
        column = c.let(T.min(at, width - 1))
        first = c.let(place.group[1] * steps)
        sequence = c.let(arrays["sequences"][first])
        position = c.let(arrays["positions"][first])
        memory = arrays["memory"].skip(sequence * sequence_stride + head * (depth * width))
        rows = [c.let(part * each + index) for index in range(each)]
        inside = [c.let(T.min(row, depth - 1)) for row in rows]
        cells = []
        for row, known in zip(rows, inside, strict=True):
            is_there = T.And(position > 0, row < depth)
            before = memory[known * width + column]
            cells.append(c.Cell(T.Select(is_there, before, c.number(0.0))))
        first_key = divide(head, group) * depth
        value_at = c.let(arrays["value_of"][head] + column)
        sums = c.share(_SLICES * _LANES)
        with T.serial(steps) as turn:
            token = c.let(first + turn)

            def read(name: str) -> list[c.Expr]:
                """Elements of the head's key or query, 0 beyond them."""
                x = arrays[name].skip(token * x_stride + first_key)
                return [
                    c.let(T.Select(row < depth, x[known], c.number(0.0)))
                    for row, known in zip(rows, inside, strict=True)
                ]

            keys, queries = read("keys"), read("queries")
            value = c.let(arrays["values"][token * x_stride + value_at])
            factors = arrays["factors"].skip(token * factors_stride + head)
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
            if "skip" in arrays:
                mixed = mixed + arrays["skip"][head] * value
            with c.when(T.And(part == 0, at < width)):
                arrays["y"].put(token * y_stride + head * width + at, mixed)
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
