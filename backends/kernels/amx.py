"""Many tokens with the tile instructions of x86-64's AMX: ``tdpbssd``.

It multiplies 16 tokens of some bytes with as many bytes of 16 rows and adds the products to 16 by
16 sums: a group of 32 elements, 8,192 products, in 16 cycles, where ``vpdpbusd`` makes 64 products.
The sums of a group are exact integers; they leave the tiles through memory, and are multiplied with
the scales of the group there.  The sums of the next group are made meanwhile.

Both sides are brought into the order of the tiles beforehand:

- Tokens, once in a call, those that are ``chosen``: ``blocks`` int8 [tokens / 16, places,
  `count_block_bytes`], for each group the codes int8 [planes, 16, 32] in natural order and the
  scales float32 [16].  Arrays hold a multiple of 16 tokens; what stands for those that are not
  there is computed with and never used.
- Weights, once for all tokens of a call: `TOGETHER` vectors are unpacked into ``tiles``, a thread's
  scratch that stays in the second-level cache.  For each 16 of them and each group int8
  [8, 16, 4], four elements of each vector side by side, and the scales float32 [16].

A few tokens are not worth a tile: they take the schedule of processors without AMX
(`kernels.dots`).  Sums have the same bits there, since groups are added in the same order here:
those of each lane first, and then the lanes by halves.  They lie in this order, too (`Chains`).

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.tirx import Shuffle
from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import BLOCK_TOKENS as TOKENS
from pi2.backends.kernels.isa import BLOCKED_GROUP_BYTES as GROUP_BYTES
from pi2.backends.kernels.isa import BLOCKED_ROWS as TOGETHER
from pi2.backends.kernels.isa import BLOCKED_SUM_BYTES, Isa, count_block_bytes
from pi2.backends.kernels.matrix import Items
from pi2.backends.kernels.operands import FLOAT_PLANES, LINE, Activations, Chosen, Vector, list_runs
from pi2.backends.kernels.unpacking import find_unpacking
from pi2.plan.weights.layout import GROUP, Precision, round_up, weight_bytes

ROWS = 16
"""Rows of weights of a tile."""
_LEAST_TOKENS = {1: 32, 2: 16}
"""Tokens from which on tiles pay, by planes."""
LANES = 16
"""Lanes of a register of 32-bit numbers."""
_CODE_BYTES = GROUP * ROWS
_SUMS, _TOKEN_CODES, _WEIGHTS = 0, 4, 6
"""First tile of each use: sums and codes of two groups in two planes, and weights."""


def takes_blocks(isa: Isa, activations: Activations, precision: Precision) -> bool:
    """Return whether many tokens are multiplied with weights of a precision in this way."""
    has_room = activations.blocks is not None and activations.planes != FLOAT_PLANES
    return isa.blocks and has_room and find_unpacking(precision).has_words


def has_many(activations: Activations, tokens: v.Expr) -> v.Expr:
    """Return whether ``tokens`` are so many that tiles pay."""
    return tokens >= _LEAST_TOKENS[activations.planes]


def emit_blocks(activations: Activations, tokens: v.Expr, chosen: Chosen) -> None:
    """Bring ``tokens``, or those ``chosen``, into the order of tiles, in parallel."""
    blocks, planes, length = activations.blocks, activations.planes, activations.length
    assert blocks is not None
    chains, each = Chains(length), count_block_bytes(planes)
    groups = length // GROUP
    with T.parallel(tokens) as number:
        token = v.let(v.wide(chosen.find_token(number)))
        turn = v.let(T.floormod(number, TOKENS))
        base = v.let(v.wide(T.floordiv(number, TOKENS)) * (chains.places * each))
        for lanes, first, count in list_runs(length):
            with T.serial(count * activations.once) as block:
                group = v.let(first + block * lanes)
                scales = v.let(token * groups + group)
                step = chains.find_step(first, block)
                with T.serial(lanes * activations.once) as lane:
                    place = chains.find_place(lane, step)
                    at = base + place * each + planes * TOKENS * GROUP + turn * 4
                    scale = v.let(activations.scales[scales + lane])
                    v.store(blocks, at, v.reinterpret(scale, "int8", 4), 4)
                with T.serial(planes) as plane:
                    source = v.let((token * planes + plane) * length + group * GROUP)
                    target = v.let(base + plane * (TOKENS * GROUP) + turn * GROUP)

                    def find(
                        lane: v.Expr | int, step: v.Expr = step, to: v.Expr = target
                    ) -> v.Expr:
                        return to + chains.find_place(lane, step) * each

                    _emit_natural_order(activations, source, find, lanes)


def _emit_natural_order(
    activations: Activations, source: v.Expr, find: Callable[[v.Expr | int], v.Expr], lanes: int
) -> None:
    """Copy ``lanes`` groups of codes, which lie four elements of each group side by side, to the
    places of 32 bytes that ``find`` gives."""
    blocks, chunks = activations.blocks, GROUP // 4
    if lanes < chunks:
        with T.serial(lanes) as lane, T.serial(chunks) as chunk:
            four = v.load(activations.codes, source + (chunk * lanes + lane) * 4, 4)
            v.store(blocks, find(lane) + chunk * 4, four, 4)
        return
    words = []
    for chunk in range(chunks):
        four = v.load(activations.codes, source + chunk * (4 * lanes), 4 * lanes)
        words.append(v.let(v.reinterpret(four, "int32", lanes)))
    for number, both in enumerate(_transpose(words, lanes)):
        halves = [both]
        if lanes == LANES:
            halves = [take(both, "int32", LANES) for take in (v.low_half, v.high_half)]
        for half, group in enumerate(halves):
            v.store(
                blocks, find(half * chunks + number), v.reinterpret(group, "int8", GROUP), GROUP
            )


def _transpose(vectors: Sequence[v.Expr], size: int) -> list[v.Expr]:
    """Return n vectors of ``size`` lanes with lane i of vector j and lane j of vector i exchanged,
    within each n of the lanes."""
    found, step, lanes = list(vectors), len(vectors) // 2, range(size)
    while step:
        low = [lane if lane & step == 0 else size + lane - step for lane in lanes]
        high = [lane + step if lane & step == 0 else size + lane for lane in lanes]
        for index in range(len(found)):
            if index & step == 0:
                both = [found[index], found[index + step]]
                found[index] = v.let(Shuffle(both, low))
                found[index + step] = v.let(Shuffle(both, high))
        step //= 2
    return found


def emit_block_items(
    activations: Activations, tokens: v.Expr, thread: v.Expr, given: Items
) -> None:
    """Compute vector . x for items and the ``tokens`` that `emit_blocks` has brought into the order
    of tiles; ``thread`` chooses the part of ``activations.tiles``."""
    begin, end, parts = given.begin, given.end, given.parts
    take_vectors, finish = given.take_vectors, given.finish
    each = Chains(activations.length).places * GROUP_BYTES
    size = TOGETHER // ROWS * each
    room = v.let(v.wide(thread) * (size + BLOCKED_SUM_BYTES) + size)
    first_tile = v.let(room - size)
    together = TOGETHER // parts
    _emit_configuration()
    with T.serial(T.floordiv(end - begin + together - 1, together)) as step:
        top = v.let(begin + step * together)
        items = v.let(T.min(end - top, together))
        sixteens = v.let(T.floordiv(items * parts + ROWS - 1, ROWS))
        with T.serial(sixteens) as part:
            # The last vectors repeat the last item.
            named = [
                v.let(T.min(top + part * (ROWS // parts) + turn, end - 1))
                for turn in range(ROWS // parts)
            ]
            vectors = [vector for item in named for vector in take_vectors(item)]
            _emit_unpacked(vectors, activations, v.let(first_tile + part * each))
        with T.serial(T.floordiv(tokens + TOKENS - 1, TOKENS)) as tile, T.serial(sixteens) as part:
            first = v.let(tile * TOKENS)
            weights = v.let(first_tile + part * each)
            place = v.let(part * (ROWS // parts))
            later = [
                v.let(T.min(top + together + place + turn, end - 1))
                for turn in range(ROWS // parts)
            ]
            asked = [vector for item in later for vector in take_vectors(item)]
            _emit_request(asked, activations.length, tile)
            found = _emit_tile(activations, tile, weights, room)
            with (
                T.serial(T.min(tokens - first, TOKENS)) as token,
                T.serial(T.min(items - place, ROWS // parts)) as item,
            ):
                at = v.let(found + (token * ROWS + item * parts) * 4)
                dots = [
                    v.let(v.load_as(activations.tiles, at + 4 * index, "float32", 1))
                    for index in range(parts)
                ]
                finish(v.let(first + token), v.let(top + place + item), dots)
    _emit_instruction("tilerelease")


_REQUESTS = 8
"""Tiles of tokens in which the next vectors are asked for, a part of them in each."""


def _emit_request(vectors: Sequence[Vector], length: int, turn: v.Expr) -> None:
    """Ask for ``vectors``, for the second-level cache: in each of the first turns for a part."""
    with T.If(turn < _REQUESTS), T.Then():
        for vector in vectors:
            size = round_up(weight_bytes(length, vector.precision), _REQUESTS * LINE) // _REQUESTS
            begin = v.let(vector.weights_base + v.wide(turn) * size)
            for line in range(0, size, LINE):
                v.prefetch(vector.weights, begin + line, 2)


def _emit_tile(activations: Activations, tile: v.Expr, weights: v.Expr, room: v.Expr) -> v.Expr:
    """Return from which byte of ``tiles`` on, in the ``room``, the products float32 [16 tokens, 16
    rows] of a tile of tokens and the rows unpacked from byte ``weights`` on are kept."""
    tiles, blocks, planes = activations.tiles, activations.blocks, activations.planes
    assert tiles is not None and blocks is not None
    chains, each = Chains(activations.length), count_block_bytes(planes)
    base = v.let(v.wide(tile) * (chains.places * each))
    size = TOKENS * ROWS * 4
    kept = v.let(room + 4 * size)

    def multiply(place: v.Expr, slot: int) -> None:
        own, codes = weights + place * GROUP_BYTES, base + place * each
        _emit_load(_WEIGHTS, tiles, own, 4 * ROWS)
        for plane in range(planes):
            number = _SUMS + 2 * slot + plane
            _emit_load(_TOKEN_CODES + plane, blocks, codes + plane * (TOKENS * GROUP), GROUP)
            _emit_instruction("tilezero", _name_tile(number))
            operands = (number, _TOKEN_CODES + plane, _WEIGHTS)
            _emit_instruction("tdpbssd", *map(_name_tile, operands))
        for plane in range(planes):
            at = T.address_of(tiles[room + (2 * slot + plane) * size])
            number = _name_tile(_SUMS + 2 * slot + plane)
            _emit_instruction("tilestored64", number, at, T.int64(4 * ROWS))

    def load_sum(slot: int, plane: int, token: int) -> v.Expr:
        at = room + ((2 * slot + plane) * size + token * (4 * ROWS))
        return v.load_as(tiles, at, "int32", LANES)

    def add(place: v.Expr, slot: int, totals: list[v.Cell]) -> None:
        at = weights + place * GROUP_BYTES + _CODE_BYTES
        weight_scale = v.let(v.load_as(tiles, at, "float32", LANES))
        scales = v.let(base + place * each + planes * (TOKENS * GROUP))
        for token, total in enumerate(totals):
            found = load_sum(slot, 0, token)
            if planes == 2:
                # 256 high + low, in one sum.
                found = (found << v.constant(8, "int32", LANES)) + load_sum(slot, 1, token)
            scale = v.splat(v.load_as(blocks, scales + token * 4, "float32", 1), LANES)
            part = v.cast(found, "float32", LANES)
            total.set(T.fma(part, weight_scale * scale, total.get()))

    multiply(T.int64(0), 0)
    with T.serial(chains.lanes * activations.once) as turn:
        totals = [v.Cell(v.constant(0.0, "float32", LANES)) for _ in range(TOKENS)]
        count = chains.count(turn)
        first = v.let(v.wide(turn) * chains.steps)
        # After the last lane one of its groups comes once more, and is not added.
        other = v.let(T.min(first + chains.steps, T.int64(chains.places - 1)))
        with T.serial(count >> 1) as pair:
            place = v.let(first + pair * 2)
            multiply(place + 1, 1)
            add(place, 0, totals)
            multiply(v.let(T.Select(pair * 2 + 2 < count, place + 2, other)), 0)
            add(place + 1, 1, totals)
        with T.If((count & 1) == 1), T.Then():
            add(v.let(first + (count - 1)), 0, totals)
            multiply(other, 0)
        for level in range(chains.levels):
            # As many lanes as that are added up where the halves of all smaller numbers were.
            mask = (2 << level) - 1
            with T.If((turn & mask) == mask), T.Then():
                for token, total in enumerate(totals):
                    at = kept + (level * size + token * (4 * ROWS))
                    total.set(v.load_as(tiles, at, "float32", LANES) + total.get())
        place = v.let(kept + v.wide(v.count_trailing_zeros(turn + 1)) * size)
        for token, total in enumerate(totals):
            value = v.reinterpret(total.get(), "int8", 4 * LANES)
            v.store(tiles, place + token * (4 * ROWS), value, 4 * LANES)
    return v.let(kept + chains.levels * size)


class Chains:
    """Places of a vector's groups in the order in which `kernels.dots` adds them, lane by lane;
    lanes without narrow blocks leave some empty."""

    def __init__(self, length: int) -> None:
        runs = list_runs(length)
        self.lanes = runs[0][0]
        """Lanes of the widest block."""
        self.levels = self.lanes.bit_length() - 1
        """How often lanes are halved."""
        self._blocks = runs[0][2]
        self._rest = [(lanes, first) for lanes, first, _ in runs[1:]]
        self.steps = self._blocks + len(self._rest)
        """Places of a lane."""
        self.places = self.lanes * self.steps

    def reverse(self, number: v.Expr | int) -> v.Expr | int:
        """Return the turn of a lane, or the lane of a turn: the bits in the opposite order."""
        found: v.Expr | int = 0
        for bit in range(self.levels):
            found = found | (((number >> bit) & 1) << (self.levels - 1 - bit))
        return found

    def count(self, turn: v.Expr) -> v.Expr:
        """Return how many groups the lane of a turn has: narrower blocks do not have all lanes."""
        lane, count = v.let(T.int32(0) + self.reverse(turn)), T.int32(self._blocks)
        for lanes, _ in self._rest:
            count = count + T.Select(lane < lanes, T.int32(1), T.int32(0))
        return v.let(count)

    def find_step(self, first: int, block: v.Expr) -> v.Expr:
        """Return the number in their lanes of the groups of a block: number ``block`` of the run
        that begins with group ``first``."""
        starts = [start for _, start in self._rest]
        return T.int32(self._blocks + starts.index(first)) if first in starts else block

    def find_place(self, lane: v.Expr | int, step: v.Expr) -> v.Expr:
        """Return the place of group ``step`` of a lane, as int64."""
        return v.wide(self.reverse(lane) * self.steps + step)


def _emit_unpacked(vectors: Sequence[Vector], activations: Activations, base: v.Expr) -> None:
    """Unpack 16 vectors, with their scales, from byte ``base`` of ``activations.tiles`` on."""
    chains = Chains(activations.length)
    for lanes, first, count in list_runs(activations.length):
        with T.serial(v.wide(count * activations.once)) as block:
            group = v.let(first + block * lanes)
            step = chains.find_step(first, block)

            def find(lane: v.Expr | int, step: v.Expr = step) -> v.Expr:
                return base + chains.find_place(lane, step) * GROUP_BYTES

            if lanes == LANES:
                _emit_sixteen_groups(vectors, activations, group, find)
            else:
                _emit_few_groups(vectors, activations, group, find, lanes)


def _emit_sixteen_groups(
    vectors: Sequence[Vector],
    activations: Activations,
    group: v.Expr,
    find: Callable[[v.Expr | int], v.Expr],
) -> None:
    """Unpack 16 groups of each vector to the places that ``find`` gives."""
    unpacking, tiles = find_unpacking(vectors[0].precision), activations.tiles
    with T.serial(v.wide(unpacking.chunks * activations.once)) as word:
        byte = v.let(group * unpacking.group_bytes + word * (4 * LANES))
        packed = [
            v.let(v.load_as(vector.weights, vector.weights_base + byte, "int32", LANES))
            for vector in vectors
        ]
        for lane, words in enumerate(_transpose(packed, LANES)):
            for chunk, numbers in unpacking.split_words(words, word, ROWS):
                v.store(tiles, find(lane) + chunk * (4 * ROWS), numbers, 4 * ROWS)
    scales = [v.let(unpacking.load_scales(vector, group, LANES)) for vector in vectors]
    for lane, own in enumerate(_transpose(scales, LANES)):
        v.store(tiles, find(lane) + _CODE_BYTES, v.reinterpret(own, "int8", 4 * ROWS), 4 * ROWS)


def _emit_few_groups(
    vectors: Sequence[Vector],
    activations: Activations,
    group: v.Expr,
    find: Callable[[v.Expr | int], v.Expr],
    lanes: int,
) -> None:
    """Unpack ``lanes`` groups of each vector to the places that ``find`` gives, one by one."""
    unpacking, tiles = find_unpacking(vectors[0].precision), activations.tiles
    for row, vector in enumerate(vectors):
        byte = v.let(vector.weights_base + group * unpacking.group_bytes)
        with T.serial(lanes * activations.once) as lane:
            target = v.let(find(lane) + row * 4)
            with T.serial(v.wide(unpacking.chunks * activations.once)) as word:
                four = byte + word * (4 * lanes) + lane * 4
                words = v.let(v.load_as(vector.weights, four, "int32", 1))
                for chunk, numbers in unpacking.split_words(words, word, 1):
                    v.store(tiles, target + chunk * (4 * ROWS), numbers, 4)
            scale = v.let(unpacking.load_scales(vector, v.let(group + lane), 1))
            v.store(tiles, target + _CODE_BYTES, v.reinterpret(scale, "int8", 4), 4)


def _emit_configuration() -> None:
    """Set the tiles' shapes: sums 16 rows of 64 bytes, codes 16 of 32, weights 8 of 64."""
    bytes_ = T.alloc_buffer((64,), "uint8")
    v.store(bytes_, 0, v.constant(0, "uint8", 64), 64)
    v.store(bytes_, 0, v.constant(1, "uint8"), 1)
    shapes = [(16, 64)] * 4 + [(16, GROUP)] * 2 + [(GROUP // 4, 64)]
    for tile, (rows, width) in enumerate(shapes):
        v.store(bytes_, 16 + 2 * tile, v.constant(width, "uint8"), 1)
        v.store(bytes_, 48 + tile, v.constant(rows, "uint8"), 1)
    _emit_instruction("ldtilecfg", T.address_of(bytes_[0]))


def _emit_load(tile: int, buffer: v.Buffer, byte: v.Expr, stride: int) -> None:
    """Load a tile whose rows are ``stride`` bytes apart."""
    at = T.address_of(buffer[byte])
    _emit_instruction("tileloadd64", _name_tile(tile), at, T.int64(stride))


def _name_tile(number: int) -> v.Expr:
    return T.IntImm("int8", number)


def _emit_instruction(name: str, *operands: v.Expr) -> None:
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))
