"""Layers that keep a state: short convolutions, the gated delta rule and Mamba-2.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``convolve``            projected float32 [T, rows], places, [tails float32 [sequences, kernel - 1,
                        channels]], weights float32 [kernel, channels], [biases], convolved float32
                        [T, channels], of the kind ``convolution`` filled up; length, runs
``recur``               convolved, gates float32 [T, gates], places, rates, steps, [skips] float32
                        [value heads], memory float32 [sequences, value heads, key_dim, value_dim],
                        recurred float32 [T, width]; length, runs
``gate_state``          recurred, projected, weights, mixed float32 [T, width, filled up]; tokens
======================  ==========================================================================

Tokens come in ``runs`` of ``length`` tokens each, that follow each other in a sequence: a chunk is
one run, and each token of a step is one.  `pi2.model.states` says what rows there are, and
`pi2.backends.reference.instructions.states` what is computed."""

from collections.abc import Iterator
from itertools import pairwise

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.specification import Axis, StateKernels

_THREADS = 64
_LANES, _SLICES = 32, 8
"""Columns of a head's matrix that a work group of ``recur`` has, and parts of its rows."""
_SMALLEST_NORM = 1e-6


def list_state_kernels(kernels: StateKernels) -> Iterator[c.Kernel]:
    yield make_convolve(kernels)
    if kernels.shape.kind != "convolution":
        yield make_recur(kernels)
        yield make_gate_state(kernels)


def make_convolve(kernels: StateKernels) -> c.Kernel:
    """Make ``convolve``: a thread for a channel of a run; SiLU follows but for short convolutions,
    which have factors before and behind."""
    kernel = c.Kernel("convolve", (_THREADS, 1, 1))
    shape = kernels.shape
    channels, kept = shape.channels, shape.kernel - 1
    is_short = shape.kind == "convolution"
    pitch = shape.stored_width if is_short else channels
    with kernel.declare():
        projected = kernel.take_array("projected", "float32")
        places = kernel.take_array("places", "int32")
        tails = kernel.take_array("tails", "float32") if kept else None
        weights = kernel.take_array("weights", "float32")
        biases = kernel.take_array("biases", "float32") if shape.convolution_bias else None
        convolved = kernel.take_array("convolved", "float32")
        length = kernel.take_number("length")
        kernel.take_number("runs")
        groups = Axis(times=-(-channels // _THREADS))
        with kernel.run(groups, Axis(number="runs")) as place:
            own = c.let(place.group[0] * _THREADS + place.thread[0])
            channel = c.let(T.min(own, channels - 1))
            first = c.let(place.group[1] * length)
            sequence, position = c.let(places[first * 2]), c.let(places[first * 2 + 1])
            begin = c.let(sequence * (kept * channels) + channel)
            factors = [c.let(weights[step * channels + channel]) for step in range(shape.kernel)]
            tail: list[c.Cell] = []
            if tails is not None:
                for step in range(kept):
                    # A sequence that begins has nothing before it.
                    earlier = T.Select(position > 0, tails[begin + step * channels], c.number(0.0))
                    tail.append(c.Cell(earlier))
            with T.serial(length) as turn:
                row = c.let((first + turn) * shape.rows + channel)
                value = c.let(projected[row])
                if is_short:
                    value = c.let(value * projected[row + 2 * shape.width])
                total = c.Cell(factors[kept] * value)
                for factor, cell in zip(factors, tail, strict=False):
                    total.add(factor * cell.get())
                if biases is not None:
                    total.add(biases[channel])
                for cell, following in pairwise(tail):
                    cell.set(following.get())
                if tail:
                    tail[-1].set(value)
                named = c.let(total.get())
                behind = projected[row + shape.width] if is_short else c.squash(named)
                with c.when(own < channels):
                    c.store(convolved, (first + turn) * pitch + own, named * behind)
            if tails is not None:
                for step, cell in enumerate(tail):
                    with c.when(own < channels):
                        c.store(tails, begin + step * channels, cell.get())
    return kernel


def make_recur(kernels: StateKernels) -> c.Kernel:
    """Make ``recur``: a work group for 32 columns of a value head's matrix in a run; a thread keeps
    an eighth of a column's rows in registers, through all of the run's tokens."""
    kernel = c.Kernel("recur", (_LANES, _SLICES, 1))
    shape = kernels.shape
    each = -(-shape.key_dim // _SLICES)
    strips = -(-shape.value_dim // _LANES)
    with kernel.declare():
        reads = _Reads(kernel, kernels)
        places = kernel.take_array("places", "int32")
        memory = kernel.take_array("memory", "float32")
        recurred = kernel.take_array("recurred", "float32")
        length = kernel.take_number("length")
        kernel.take_number("runs")
        with kernel.run(Axis(times=shape.value_heads * strips), Axis(number="runs")) as place:
            lane, part, _ = place.thread
            head = c.let(T.floordiv(place.group[0], strips))
            own = c.let(T.floormod(place.group[0], strips) * _LANES + lane)
            column = c.let(T.min(own, shape.value_dim - 1))
            first = c.let(place.group[1] * length)
            sequence, position = c.let(places[first * 2]), c.let(places[first * 2 + 1])
            matrix = c.let(
                (sequence * shape.value_heads + head) * (shape.key_dim * shape.value_dim)
            )
            rows = [c.let(part * each + index) for index in range(each)]
            cells = []
            for row in rows:
                is_there = T.And(position > 0, row < shape.key_dim)
                known = memory[matrix + T.min(row, shape.key_dim - 1) * shape.value_dim + column]
                cells.append(c.Cell(T.Select(is_there, known, c.number(0.0))))
            reads.find_head(head)
            delta = shape.kind == "delta"
            shared = c.share(3 * _SLICES * _LANES) if delta else None
            sums = c.share(_SLICES * _LANES)
            with T.serial(length) as turn:
                token = c.let(first + turn)
                keys, queries = reads.read_keys(token, rows)
                value = reads.read_value(token, column)
                entry, decay = reads.find_gates(token)
                key_factor = query_factor = c.number(1.0)
                if shared is not None:
                    found = _add_slices(
                        shared,
                        lane,
                        part,
                        [
                            [cell.get() * key for cell, key in zip(cells, keys, strict=True)],
                            [key * key for key in keys],
                            [query * query for query in queries],
                        ],
                    )
                    key_factor, query_factor = (
                        c.let(c.number(1.0) / T.sqrt(square + c.number(_SMALLEST_NORM)))
                        for square in found[1:]
                    )
                    query_factor = query_factor * c.number(shape.key_dim**-0.5)
                    value = c.let(value - decay * found[0] * key_factor)
                added = c.let(value * entry * key_factor)
                for cell, key in zip(cells, keys, strict=True):
                    cell.set(cell.get() * decay + key * added)
                products = [cell.get() * query for cell, query in zip(cells, queries, strict=True)]
                (mixed,) = _add_slices(sums, lane, part, [products])
                mixed = mixed * query_factor
                if not delta:
                    mixed = mixed + reads.find_skip() * value
                with c.when(T.And(part == 0, own < shape.value_dim)):
                    target = token * shape.width + head * shape.value_dim + own
                    c.store(recurred, target, mixed)
                # Sums of the next token come where these were.
                c.wait_for_group()
            for row, cell in zip(rows, cells, strict=True):
                with c.when(T.And(row < shape.key_dim, own < shape.value_dim)):
                    c.store(memory, matrix + row * shape.value_dim + own, cell.get())
    return kernel


class _Reads:
    """What ``recur`` reads of a token for a value head."""

    def __init__(self, kernel: c.Kernel, kernels: StateKernels) -> None:
        self._shape = shape = kernels.shape
        self._convolved = kernel.take_array("convolved", "float32")
        self._gates = kernel.take_array("gates", "float32")
        self._rates = kernel.take_array("rates", "float32")
        self._steps = kernel.take_array("steps", "float32")
        self._skips = kernel.take_array("skips", "float32") if shape.kind == "mamba" else None
        self._head: c.Expr = None
        self._rate: c.Expr = None
        self._step: c.Expr = None

    def find_head(self, head: c.Expr) -> None:
        self._head = head
        self._rate, self._step = c.let(self._rates[head]), c.let(self._steps[head])

    def read_keys(self, token: c.Expr, rows: list[c.Expr]) -> tuple[list[c.Expr], list[c.Expr]]:
        """Return elements of the head's key and query, 0 beyond them."""
        shape = self._shape
        together = shape.value_heads // shape.key_heads
        query = c.let(token * shape.channels + T.floordiv(self._head, together) * shape.key_dim)
        found: list[list[c.Expr]] = []
        for first in (query + shape.key_heads * shape.key_dim, query):
            found.append([])
            for row in rows:
                value = self._convolved[first + T.min(row, shape.key_dim - 1)]
                is_there = row < shape.key_dim
                found[-1].append(c.let(T.Select(is_there, value, c.number(0.0))))
        return found[0], found[1]

    def read_value(self, token: c.Expr, column: c.Expr) -> c.Expr:
        shape = self._shape
        first = token * shape.channels + 2 * shape.key_heads * shape.key_dim
        return c.let(self._convolved[first + self._head * shape.value_dim + column])

    def find_gates(self, token: c.Expr) -> tuple[c.Expr, c.Expr]:
        """Return how much of the token enters, and how much of the state stays."""
        shape = self._shape
        first = c.let(token * shape.gates + self._head)
        gate = c.let(self._gates[first])
        if shape.kind == "delta":
            step = c.let(self._gates[first + shape.value_heads] + self._step)
            return c.let(c.squash(gate)), c.let(T.exp(self._rate * _soften(step)))
        entry = T.max(_soften(c.let(gate + self._step)), c.number(shape.shortest_step))
        if shape.longest_step is not None:
            entry = T.min(entry, c.number(shape.longest_step))
        entry = c.let(entry)
        return entry, c.let(T.exp(self._rate * entry))

    def find_skip(self) -> c.Expr:
        assert self._skips is not None
        return self._skips[self._head]


def _add_slices(
    shared: c.Buffer, lane: c.Expr, part: c.Expr, terms: list[list[c.Expr]]
) -> list[c.Expr]:
    """Return sums of terms of a column over all parts of its rows, the same in all of them."""
    for number, items in enumerate(terms):
        total = c.Cell(c.number(0.0))
        for item in items:
            total.add(item)
        c.store(shared, (number * _SLICES + part) * _LANES + lane, total.get())
    c.wait_for_group()
    found = []
    for number in range(len(terms)):
        total = c.Cell(c.number(0.0))
        for piece in range(_SLICES):
            total.add(shared[(number * _SLICES + piece) * _LANES + lane])
        found.append(c.let(total.get()))
    return found


def make_gate_state(kernels: StateKernels) -> c.Kernel:
    """Make ``gate_state``: a work group for a group that is normalised together: of Mamba-2 gates
    come first, of the delta rule the norm of each head."""
    kernel = c.Kernel("gate_state", (_THREADS, 1, 1))
    shape = kernels.shape
    is_mamba = shape.kind == "mamba"
    groups = shape.norm_groups if is_mamba else shape.value_heads
    size = shape.width // groups
    with kernel.declare():
        recurred = kernel.take_array("recurred", "float32")
        projected = kernel.take_array("projected", "float32")
        weights = kernel.take_array("weights", "float32")
        mixed = kernel.take_array("mixed", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=groups), Axis(number="tokens")) as place:
            token, thread = place.group[1], place.thread[0]
            begin = c.let(place.group[0] * size)

            def read_gate(index: c.Expr) -> c.Expr:
                gate = c.let(projected[token * shape.rows + shape.channels + begin + index])
                return c.let(gate * c.squash(gate))

            def read(index: c.Expr) -> c.Expr:
                value = recurred[token * shape.width + begin + index]
                return c.let(value * read_gate(index) if is_mamba else value)

            factor = c.find_norm(read, size, kernels.epsilon, thread, _THREADS)
            with c.walk(size, thread, _THREADS) as index:
                weight = weights[begin + index] if is_mamba else weights[index]
                value = c.let(read(index) * factor * weight)
                if not is_mamba:
                    value = value * read_gate(index)
                c.store(mixed, token * shape.stored_width + begin + index, value)
    return kernel


def _soften(value: c.Expr) -> c.Expr:
    """Return ln(1 + exp(value)) of a named value."""
    small = c.let(T.exp(c.number(0.0) - T.abs(value)))
    # A logarithm near 1 has lost what a short series keeps.
    third = c.number(0.5) - small * c.number(1.0 / 3)
    near = small * (c.number(1.0) - small * third)
    rest = T.Select(small < c.number(0.01), near, T.log(c.number(1.0) + small))
    return c.let(T.max(value, c.number(0.0)) + rest)
