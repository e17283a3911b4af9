"""The FFN of a chunk of tokens over contiguous neurons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.amx import emit_blocks, has_many, takes_blocks
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_split
from pi2.backends.kernels.neurons import add_squares, find_neighbour
from pi2.backends.kernels.operands import Activations, Chosen
from pi2.backends.kernels.panel import (
    Opened,
    Panel,
    Share,
    emit_activations,
    emit_gates,
    emit_open_values,
)
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED, KernelSpec
from pi2.backends.kernels.unpacking import Block, find_unpacking


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseRoom:
    """What panels of a chunk are computed in."""

    masks: v.Buffer
    """int32 [tokens, PARTS]: a bit for each activation that is not zero."""
    unpacked: v.Buffer
    """float32 [threads, UNPACKED + KEPT, 128]."""
    squares: v.Buffer | None
    """float32 [tokens] of activations, if they are normalised."""


def emit_dense(
    isa: Isa,
    activations: Activations,
    every: Panel,
    tokens: v.Expr,
    room: DenseRoom,
    total: v.Buffer,
) -> None:
    """Add neurons to ``total`` (y [tokens, hidden], lane order): ``every`` one of a call,
    contiguous or chosen, whose bundles are in stored order.

    Per panel of neurons, threads share the neurons and compute activations, or first their gates,
    and then the activations of neurons with open gates for all tokens. Then threads share the
    elements of y; if some neurons rest, only active ones count: the down vectors of neurons that
    fire for some tokens are unpacked, and added for these. So no sum depends on the number of
    threads.

    ``unpacked`` holds a part's down weights, and y of a few tokens at the few places that a thread
    works on: in y itself, one token's places would evict another's from the caches."""
    spec, count = every.bundles.spec, every.size
    threads, hidden = spec.threads, spec.hidden
    if takes_blocks(isa, activations, spec.precision.gates):
        with T.If(has_many(activations, tokens)), T.Then():
            emit_blocks(activations, tokens, every.chosen)
    with T.serial(T.floordiv(count + PANEL - 1, PANEL)) as number:
        origin = v.let(number * PANEL)
        size = v.let(T.min(count - origin, PANEL))
        panel = replace(every, origin=origin, size=size)
        emit_rows = emit_gates if spec.skips_ups else emit_activations
        with T.parallel(threads) as thread:
            begin, end = emit_split(thread, threads, size)
            emit_rows(isa, activations, panel, Share(begin, end, tokens, thread))
        if spec.skips_ups:
            with T.parallel(threads) as thread:
                _emit_open_values(isa, activations, panel, tokens, thread, room)
        elif not spec.is_smooth or room.squares is not None:
            with T.parallel(tokens) as token:
                _emit_masks(panel, token, room.masks, room.squares)
        runs = find_unpacking(spec.precision.ffn).list_tiles(hidden)
        with T.parallel(threads) as thread:
            begin, end = emit_split(thread, threads, sum(tiles for _, _, tiles in runs))
            with T.serial(end - begin) as step:
                tile = v.let(begin + step)
                passed = 0
                for lanes, group, tiles in runs:
                    with T.If(T.And(tile >= passed, tile < passed + tiles)), T.Then():
                        scratch = v.let(thread * ((KEPT + UNPACKED) * 128))
                        place = _Tile(scratch, lanes, group, v.let(tile - passed))
                        _emit_tile_sum(isa, panel, tokens, room, total, place)
                    passed += tiles


@dataclass(frozen=True, slots=True)
class _Tile:
    """Tile ``number`` of a run of blocks of ``lanes`` that begins with ``group``; a thread unpacks
    its weights from ``scratch`` on."""

    scratch: v.Expr
    lanes: int
    group: int
    number: v.Expr


def _emit_tile_sum(
    isa: Isa, panel: Panel, tokens: v.Expr, room: DenseRoom, total: v.Buffer, tile: _Tile
) -> None:
    bundles, chosen, spec = panel.bundles, panel.chosen, panel.bundles.spec
    size, values, masks, unpacked = panel.size, panel.values, room.masks, room.unpacked
    scratch, lanes = tile.scratch, tile.lanes
    unpacking = find_unpacking(spec.precision.ffn)
    number = T.floordiv(tile.number, unpacking.tiles)
    first = v.let(tile.group + number * unpacking.count_groups(lanes))
    chunk = v.let(T.floormod(tile.number, unpacking.tiles))
    own = v.let(scratch + UNPACKED * 128)
    places = unpacking.list_places(lanes, first, chunk)

    with T.serial(T.floordiv(tokens + KEPT - 1, KEPT)) as turn:
        origin_token = v.let(turn * KEPT)
        kept = v.let(T.min(tokens - origin_token, KEPT))
        copied = _Copied(spec, total, unpacked, chosen, origin_token, kept, own)
        _emit_copies(copied, places, lanes, leave=False)
        with T.serial(T.floordiv(size + UNPACKED - 1, UNPACKED)) as part:
            begin = v.let(part * UNPACKED)
            number = v.let(T.min(size - begin, UNPACKED))

            def unpack(index: v.Expr, begin: v.Expr = begin) -> None:
                place = chosen.find_neuron(panel.origin + begin + index)
                vector = bundles.take_part(find_neighbour(bundles, place, panel.first), "down")
                block = Block(vector, lanes, first)
                scale = v.let(unpacking.load_block_scale(block))
                rows = unpacking.emit_tile(isa, block, chunk)
                for row, (_, weights) in enumerate(rows):
                    at = scratch + (index * len(rows) + row) * lanes
                    v.store(unpacked, at, weights * scale, lanes)

            if spec.is_smooth:
                with T.serial(number) as index:
                    unpack(index)
            else:
                used = v.Cell(T.int32(0))
                with T.serial(kept) as token:
                    used.set(used.get() | masks[(origin_token + token) * PARTS + part])
                _emit_each_bit(used, unpack)
            here = _Unpacked(
                values, begin, origin_token, unpacked, scratch, own, len(places), lanes
            )
            if spec.is_smooth:
                _emit_full_sums(isa, here, kept, number)
            else:
                _emit_masked_sums(here, kept, masks, part)
        _emit_copies(copied, places, lanes, leave=True)


@dataclass(frozen=True, slots=True)
class _Copied:
    """y of ``kept`` tokens from ``origin`` on, in ``total`` and, from ``own`` on, in ``near``."""

    spec: KernelSpec
    total: v.Buffer
    near: v.Buffer
    chosen: Chosen
    origin: v.Expr
    kept: v.Expr
    own: v.Expr


def _emit_copies(copied: _Copied, places: list[v.Expr], lanes: int, *, leave: bool) -> None:
    """Copy y at a tile's places to where a thread keeps it, or back."""
    with T.serial(copied.kept) as token:
        row = v.let(copied.chosen.find_token(copied.origin + token) * copied.spec.hidden)
        for index, place in enumerate(places):
            y = v.let(row + place)
            near = v.let(copied.own + (token * len(places) + index) * lanes)
            if leave:
                v.store(copied.total, y, v.load(copied.near, near, lanes), lanes)
            else:
                v.store(copied.near, near, v.load(copied.total, y, lanes), lanes)


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A tile of a part's down vectors, float32 [neurons, count, lanes] from ``scratch`` on, and of
    y, [tokens, count, lanes] from ``own`` on."""

    values: v.Buffer
    begin: v.Expr
    """The part's first neuron in its panel."""
    origin: v.Expr
    """The first token whose y is kept; tokens are counted from it."""
    unpacked: v.Buffer
    scratch: v.Expr
    own: v.Expr
    count: int
    lanes: int

    def load_weights(self, index: v.Expr) -> list[v.Expr]:
        """Return the vectors of neuron ``index`` of the part."""
        base = v.let(self.scratch + index * (self.count * self.lanes))
        return [self._load(base + row * self.lanes) for row in range(self.count)]

    def _load(self, place: v.Expr) -> v.Expr:
        return v.load(self.unpacked, place, self.lanes)

    def load_value(self, token: v.Expr, index: v.Expr) -> v.Expr:
        """Return the activation of neuron ``index`` in every lane."""
        value = self.values[(self.origin + token) * PANEL + self.begin + index]
        return v.let(v.splat(value, self.lanes))

    def load_sums(self, token: v.Expr) -> list[v.Cell]:
        base = v.let(self.own + token * (self.count * self.lanes))
        return [v.Cell(self._load(base + row * self.lanes)) for row in range(self.count)]

    def store_sums(self, token: v.Expr, sums: list[v.Cell]) -> None:
        base = v.let(self.own + token * (self.count * self.lanes))
        for row, cell in enumerate(sums):
            v.store(self.unpacked, base + row * self.lanes, cell.get(), self.lanes)


def _emit_masked_sums(here: _Unpacked, tokens: v.Expr, masks: v.Buffer, part: v.Expr) -> None:
    with T.serial(tokens) as token:
        sums = here.load_sums(token)
        mask = v.Cell(masks[(here.origin + token) * PARTS + part])

        def add(index: v.Expr, token: v.Expr = token, sums: list[v.Cell] = sums) -> None:
            value = here.load_value(token, index)
            for weights, cell in zip(here.load_weights(index), sums, strict=True):
                cell.set(T.fma(weights, value, cell.get()))

        _emit_each_bit(mask, add)
        here.store_sums(token, sums)


def _emit_full_sums(isa: Isa, here: _Unpacked, tokens: v.Expr, number: v.Expr) -> None:
    """Add all ``number`` neurons of a part; a few tokens share the loads of weights."""
    together = 3 if isa.lanes == 16 else 1
    with T.serial(T.floordiv(tokens + together - 1, together)) as tile:
        # The last tile repeats the last token, and stores its sum again.
        named = [v.let(T.min(tile * together + turn, tokens - 1)) for turn in range(together)]
        sums = [here.load_sums(token) for token in named]
        with T.serial(number) as index:
            values = [here.load_value(token, index) for token in named]
            for place, row in enumerate(here.load_weights(index)):
                # One vector of weights at a time: the registers are full of sums.
                weights = v.let(row)
                for value, cells in zip(values, sums, strict=True):
                    cells[place].set(T.fma(weights, value, cells[place].get()))
        for token, cells in zip(named, sums, strict=True):
            here.store_sums(token, cells)


def _emit_each_bit(mask: v.Cell, emit: Callable[[v.Expr], None]) -> None:
    """Call ``emit`` with the places of the bits of an int32, ascending, which are cleared."""
    with T.serial(T.popcount(mask.get())):
        index = v.let(v.count_trailing_zeros(mask.get()))
        mask.set(mask.get() & (mask.get() - 1))
        emit(index)


def _emit_masks(panel: Panel, token: v.Expr, masks: v.Buffer, squares: v.Buffer | None) -> None:
    """Set bit i of ``masks[token, part]`` where activation i of a part is not zero; add the squares
    of the activations to ``squares[token]``."""
    if not panel.bundles.spec.is_smooth:
        with T.serial(T.floordiv(panel.size + UNPACKED - 1, UNPACKED)) as part:
            begin = v.let(part * UNPACKED)
            mask = v.Cell(T.int32(0))
            with T.serial(T.min(panel.size - begin, UNPACKED)) as index:
                fires = panel.load(token, begin + index) != v.constant(0.0, "float32")
                bit = T.Select(fires, T.int32(1), T.int32(0)) << index
                mask.set(mask.get() | bit)
            v.store(masks, token * PARTS + part, mask.get(), 1)
    if squares is not None:
        more = add_squares(panel.values, v.let(token * PANEL), panel.size)
        v.store(squares, token, squares[token] + more, 1)


def _emit_open_values(
    isa: Isa,
    activations: Activations,
    panel: Panel,
    tokens: v.Expr,
    thread: v.Expr,
    room: DenseRoom,
) -> None:
    """Make a panel's gates into activations, for a thread's share of all tokens' neurons; set their
    masks and squares.

    Threads share parts of neurons with a mask: none idles if there are fewer tokens than threads.
    If squares are added up, threads share whole tokens, whose sums have one order."""
    width = UNPACKED if room.squares is None else PANEL
    each = v.let(T.floordiv(panel.size + width - 1, width))
    begin, end = emit_split(thread, panel.bundles.spec.threads, v.let(tokens * each))
    top = v.let(T.floordiv(begin, each))
    with T.serial(T.floordiv(end + each - 1, each) - top) as step:
        token = v.let(top + step)
        start = v.let(T.max(begin - token * each, 0) * width)
        stop = v.let(T.min(T.min(end - token * each, each) * width, panel.size))
        opened = emit_open_values(isa, activations, panel, token, start, stop)
        _emit_open_masks(panel, opened, stop, token, room)


def _emit_open_masks(
    panel: Panel, opened: Opened, stop: v.Expr, token: v.Expr, room: DenseRoom
) -> None:
    """Do what `_emit_masks` does for the neurons up to ``stop`` among which some are ``opened``:
    all activations of others are zero, and not kept."""
    masks, squares = room.masks, room.squares
    base = v.let(token * PARTS)
    first = v.let(T.floordiv(opened.start, UNPACKED))
    with T.serial(T.floordiv(stop + UNPACKED - 1, UNPACKED) - first) as part:
        v.store(masks, base + first + part, T.int32(0), 1)
    total = v.Cell(v.constant(0.0, "float32"))
    with T.serial(opened.count) as place:
        number = opened.read(place)
        value = v.let(panel.load(token, number))
        fires = value != v.constant(0.0, "float32")
        bit = T.Select(fires, T.int32(1), T.int32(0)) << T.floormod(number, UNPACKED)
        part = v.let(base + T.floordiv(number, UNPACKED))
        v.store(masks, part, masks[part] | bit, 1)
        if squares is not None:
            total.set(T.fma(value, value, total.get()))
    if squares is not None:
        v.store(squares, token, squares[token] + total.get(), 1)
