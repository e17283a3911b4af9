"""Products of inputs with a matrix in tiles: projections, predictors and the head.

``NAME_N``: inputs float32, matrix weights in tiles, scales, [biases float32 [rows]], outputs
float32; rows, tokens, and `NUMBERS`.  NAME is `ProductKernels.name`, N the number of tokens that a
work group computes with.  The rows are divided into ``blocks`` equal parts, each of which is
multiplied with its own inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.code import Weights, count_words, place_elements, unpack_word
from pi2.backends.gpu.kernels.specification import Axis, ProductKernels
from pi2.plan.weights.layout import GROUP, Precision

ROWS = 32
"""Rows of a tile, and threads of a work group along its first axis."""
SLICES = 8
"""Threads that share a row."""
VECTOR = 4
"""Words that a thread reads together."""
BLOCK = (ROWS, SLICES, 1)

Finish = Callable[[c.Expr, c.Expr, list[c.Expr]], None]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Weights in tiles of 32 rows, each with ``parts`` vectors."""

    weights: Weights
    parts: int
    length: int

    @property
    def groups(self) -> int:
        return self.length // GROUP

    def load_group(self, tile: c.Expr, part: int, group: c.Expr, row: c.Expr) -> list[c.Expr]:
        vectors = count_words(self.weights.precision) // VECTOR
        first = c.let(((tile * self.parts + part) * self.groups + group) * vectors)
        words: list[c.Expr] = []
        for vector in range(vectors):
            words += self.weights.load((first + vector) * ROWS + row)
        return words

    def load_scale(self, tile: c.Expr, part: int, group: c.Expr, row: c.Expr) -> c.Expr:
        return self.weights.load_scale(
            ((tile * self.parts + part) * self.groups + group) * ROWS + row
        )


def emit_few(
    tiles: Tiles,
    inputs: c.Buffer,
    place: c.Place,
    tile: c.Expr,
    firsts: Sequence[c.Expr],
    finish: Finish,
) -> None:
    """Multiply the rows of ``tile`` with tokens whose ``inputs`` float32x4 begin at ``firsts``;
    ``finish`` gets row, token and one value of each part."""
    row, part_of_row, _ = place.thread
    sums = [c.make_zeros(tiles.parts) for _ in firsts]
    with T.serial(-(-tiles.groups // SLICES)) as turn:
        group = c.let(turn * SLICES + part_of_row)
        with c.when(group < tiles.groups):
            _add_group(tiles, inputs, tile, group, row, firsts, sums)
    values = len(firsts) * tiles.parts
    shared = c.share(values * SLICES * ROWS)
    for index, cell in enumerate(cell for of_token in sums for cell in of_token):
        c.store(shared, (index * SLICES + part_of_row) * ROWS + row, cell.get())
    c.wait_for_group()
    with c.when(part_of_row < len(firsts)):
        results = []
        for part in range(tiles.parts):
            first = c.let((part_of_row * tiles.parts + part) * (SLICES * ROWS) + row)
            total = c.Cell(shared[first])
            for piece in range(1, SLICES):
                total.add(shared[first + piece * ROWS])
            results.append(total.get())
        finish(row, part_of_row, results)


def _add_group(
    tiles: Tiles,
    inputs: c.Buffer,
    tile: c.Expr,
    group: c.Expr,
    row: c.Expr,
    inputs_of: Sequence[c.Expr],
    sums: list[list[c.Cell]],
) -> None:
    precision = tiles.weights.precision
    parts = range(tiles.parts)
    # All loads come first: they are under way together.
    words = [tiles.load_group(tile, part, group, row) for part in parts]
    scales = [tiles.load_scale(tile, part, group, row) for part in parts]
    found = [c.make_zeros(tiles.parts) for _ in inputs_of]
    firsts = [c.let(begin + group * (GROUP // 4)) for begin in inputs_of]
    # As many words as hold whole vectors of 4 inputs.
    step = max(1, 4 // len(place_elements(precision, 0)))
    for start in range(0, count_words(precision), step):
        span = range(start, start + step)
        elements = [element for word in span for element in place_elements(precision, word)]
        numbers = [
            [value for word in span for value in unpack_word(precision, words[part][word])]
            for part in parts
        ]
        for index in range(0, len(elements), 4):
            assert elements[index] % 4 == 0
            for first, row_sums in zip(firsts, found, strict=True):
                vector = c.let(inputs[first + elements[index] // 4])
                for lane in range(4):
                    value = c.let(c.take_lane(vector, lane))
                    for part in parts:
                        row_sums[part].add(numbers[part][index + lane] * value)
    for row_sums, totals in zip(found, sums, strict=True):
        for part in parts:
            totals[part].add(row_sums[part].get() * scales[part])


TOKENS = 64
"""Tokens of a work group."""
COLUMNS = 64
"""Columns of a work group: two *strips* of 32."""
STRIP = 32
SIDE = 16
"""Threads of a work group along both axes."""
TILE_BLOCK = (SIDE, SIDE, 1)
_THREADS = SIDE * SIDE
_EACH = TOKENS // SIDE
"""Tokens, and columns, of a thread."""
_PITCH = COLUMNS + 1
"""Elements from one term to the next: neighbouring terms are in different banks."""


class Panels:
    """The shared memory of a work group."""

    def __init__(self) -> None:
        self.weights = c.share(GROUP * _PITCH)
        self.inputs = c.share(GROUP * _PITCH)

    def load_word(
        self,
        weights: Weights,
        places: tuple[c.Expr, c.Expr],
        word: c.Expr,
        first: c.Expr,
        stride: int = _PITCH,
    ) -> None:
        """Unpack a word of weights; ``places``: the word's, and its scale's. It is number ``word``
        of its group, whose elements go to ``first`` plus multiples of ``stride``."""
        at, scale_at = places
        (packed,) = weights.load(at)
        scale = weights.load_scale(scale_at)
        elements = [c.let(element) for element in place_elements(weights.precision, word)]
        for element, value in zip(elements, unpack_word(weights.precision, packed), strict=True):
            c.store(self.weights, first + element * stride, value * scale)


def count_thread(place: c.Place) -> c.Expr:
    return c.let(place.thread[1] * SIDE + place.thread[0])


def emit_many(
    place: c.Place,
    steps: c.Expr,
    load: Callable[[Panels, c.Expr], None],
    finish: Callable[[c.Expr, int, list[c.Expr]], None],
) -> None:
    """Add up ``steps`` times 32 terms that ``load`` brings into both panels; ``finish(token, half,
    sums)`` gets a token below 64, and the sums of column ``16 half + x`` of every strip."""
    x, y, _ = place.thread
    panels = Panels()
    sums = [c.make_zeros(_EACH) for _ in range(_EACH)]
    with T.serial(steps) as step:
        load(panels, c.let(step))
        c.wait_for_group()
        with T.serial(GROUP) as term:
            row = c.let(term * _PITCH)
            values = [c.let(panels.inputs[row + y + SIDE * index]) for index in range(_EACH)]
            columns = [c.let(panels.weights[row + x + SIDE * index]) for index in range(_EACH)]
            for value, cells in zip(values, sums, strict=True):
                for column, cell in zip(columns, cells, strict=True):
                    cell.add(value * column)
        c.wait_for_group()
    for index, cells in enumerate(sums):
        token = c.let(y + SIDE * index)
        for half in range(STRIP // SIDE):
            strips = range(COLUMNS // STRIP)
            finish(token, half, [cells[strip * 2 + half].get() for strip in strips])


def emit_load_inputs(
    panels: Panels, place: c.Place, read: Callable[[c.Expr, c.Expr], c.Expr]
) -> None:
    """Fill the panel of inputs; ``read(token, term)`` gives one, of a token below 64 and a term
    below 32.  Neighbouring threads read neighbouring terms."""
    thread = count_thread(place)
    term = c.let(T.floormod(thread, GROUP))
    first = c.let(T.floordiv(thread, GROUP))
    for index in range(TOKENS * GROUP // _THREADS):
        token = c.let(first + index * (_THREADS // GROUP))
        c.store(panels.inputs, term * _PITCH + token, read(token, term))


def emit_load_tiles(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    strips: Sequence[c.Expr],
    group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with a group of the rows of two tiles' parts, ``strips``: their
    numbers among all parts of all tiles."""
    words = count_words(weights.precision)
    thread = count_thread(place)
    for start in range(0, len(strips) * STRIP * words, _THREADS):
        index = c.let(thread + start)
        strip = c.let(T.floordiv(index, STRIP * words))
        in_strip = c.let(T.floormod(index, STRIP * words))
        # Vectors of 4 words, of one row after the other.
        vector, rest = T.floordiv(in_strip, STRIP * 4), c.let(T.floormod(in_strip, STRIP * 4))
        row = c.let(T.floordiv(rest, 4))
        word = c.let(vector * 4 + T.floormod(rest, 4))
        part = c.let(T.Select(strip == 0, strips[0], strips[1]))
        block = c.let(part * groups + group)
        places = block * (STRIP * words) + in_strip, block * STRIP + row
        panels.load_word(weights, places, word, c.let(strip * STRIP + row))


def emit_load_vectors(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    find_row: Callable[[c.Expr, c.Expr], c.Expr],
    group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with a group of 64 vectors in rows: ``find_row(strip, column)``
    says which row the one of a strip's column below 32 is."""
    words = count_words(weights.precision)
    thread = count_thread(place)
    for start in range(0, COLUMNS * words, _THREADS):
        index = c.let(thread + start)
        column = c.let(T.floordiv(index, words))
        word = c.let(T.floormod(index, words))
        strip, in_strip = c.let(T.floordiv(column, STRIP)), c.let(T.floormod(column, STRIP))
        block = c.let(find_row(strip, in_strip) * groups + group)
        panels.load_word(weights, (block * words + word, block), word, column)


def emit_load_rows(
    panels: Panels,
    place: c.Place,
    weights: Weights,
    read_row: Callable[[c.Expr], c.Expr],
    first_group: c.Expr,
    groups: int,
) -> None:
    """Fill the panel of weights with two groups, from ``first_group`` on, of 32 vectors in rows;
    ``read_row(term)`` says which row a term below 32 is."""
    words = count_words(weights.precision)
    thread = count_thread(place)
    for start in range(0, GROUP * 2 * words, _THREADS):
        index = c.let(thread + start)
        term = c.let(T.floordiv(index, 2 * words))
        in_row = c.let(T.floormod(index, 2 * words))
        strip = c.let(T.floordiv(in_row, words))
        word = c.let(T.floormod(in_row, words))
        # A group beyond the last is read again and not used.
        group = c.let(T.min(first_group + strip, groups - 1))
        block = c.let(read_row(term) * groups + group)
        first = c.let(term * _PITCH + strip * STRIP)
        panels.load_word(weights, (block * words + word, block), word, first, 1)


FEW = (1, 4)
"""Tokens of the kernels that read weights once for each that many."""
_TILES = COLUMNS // STRIP


Store = Callable[[c.Expr, c.Expr, c.Expr, list[c.Expr]], None]
"""Writes the products of a token and of a row's vectors: token, number of rows, row, products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Rows of vectors of ``length`` elements that kernels multiply."""

    name: str
    """Begins the names of its arrays."""
    count: str
    """Names the number of its rows."""
    length: int
    precision: Precision
    make: Callable[[c.Kernel], Store]
    """Adds the parameters of the results, and returns what writes them."""
    parts: int = 1
    """Vectors of a row, at most 2."""
    blocks: int = 1
    """Equal parts of the rows with inputs of their own."""
    in_rows: bool = False
    """Whether vectors are in rows instead of in tiles."""
    is_placed: bool = False
    """Whether `NUMBERS` say where rows and vectors are."""


NUMBERS = (
    *("inputs_at", "inputs_stride", "inputs_each", "tile", "begin"),
    *("biases_at", "outputs_at", "outputs_stride", "outputs_each"),
)
"""First elements of inputs and outputs, and steps between tokens and between blocks; the first
tile of the rows, and the first row in it: ``rows`` counts from that tile's first one on."""


class _Inputs:
    """Place of inputs: tokens follow each other, unless numbers say where they are."""

    def __init__(self, kernel: c.Kernel, matrix: Matrix) -> None:
        self._matrix = matrix
        self._numbers: dict[str, c.Expr] = {}
        if matrix.is_placed:
            self._numbers = {name: kernel.take_number(name) for name in NUMBERS[:5]}

        self.tile, self.begin = (self._numbers.get(name, T.int32(0)) for name in ("tile", "begin"))

    def find(self, token: c.Expr, block: c.Expr | None, vector: int) -> c.Expr:
        """Return the first of a token's inputs, in vectors of so many."""
        if not self._numbers:
            return c.let(token * (self._matrix.length // vector))
        at, stride, each = (self._numbers[name] for name in NUMBERS[:3])
        first = at + token * stride + (0 if block is None else block * each)
        return c.let(T.floordiv(first, vector))


def make_product(name: str, matrix: Matrix, fp16: bool, count: int) -> c.Kernel:
    """Make ``NAME_N`` for N tokens: few, or `TOKENS`."""
    if count == TOKENS:
        return _multiply_many(name, matrix, fp16)
    with c.Kernel.declare(f"{name}_{count}", BLOCK) as kernel:
        inputs = kernel.take_array("inputs", "float32x4")
        weights = Weights.take(kernel, matrix.name, matrix.precision, VECTOR, fp16)
        store = matrix.make(kernel)
        rows, tokens = kernel.take_numbers(f"{matrix.count} tokens")
        source = _Inputs(kernel, matrix)
        axes = Axis(number=matrix.count, per=ROWS), Axis(number="tokens", per=count)
        with kernel.run(*axes) as place:
            tile = place.group[0]
            base = c.let(place.group[1] * count)
            block = None
            if matrix.blocks > 1:
                own = T.min(tile * ROWS + place.thread[0], rows - 1)
                block = c.let(T.floordiv(own * matrix.blocks, rows))
            named = [T.min(base + turn, tokens - 1) for turn in range(count)]
            firsts = [source.find(token, block, 4) for token in named]

            def finish(row: c.Expr, turn: c.Expr, products: list[c.Expr]) -> None:
                token, row = c.let(base + turn), c.let(tile * ROWS + row)
                with c.when(T.And(token < tokens, T.And(row >= source.begin, row < rows))):
                    store(token, rows, row - source.begin, products)

            tiles = Tiles(weights, matrix.parts, matrix.length)
            emit_few(tiles, inputs, place, c.let(source.tile + tile), firsts, finish)
    return kernel


def _multiply_many(name: str, matrix: Matrix, fp16: bool) -> c.Kernel:
    """Make ``NAME_64``: two vectors of 32 rows, or one of 64."""
    groups, parts, tiles = matrix.length // GROUP, matrix.parts, _TILES // matrix.parts
    with c.Kernel.declare(f"{name}_{TOKENS}", TILE_BLOCK) as kernel:
        inputs = kernel.take_array("inputs")
        weights = Weights.take(kernel, matrix.name, matrix.precision, 1, fp16)
        store = matrix.make(kernel)
        rows, tokens = kernel.take_numbers(f"{matrix.count} tokens")
        source = _Inputs(kernel, matrix)
        axes = Axis(number=matrix.count, per=ROWS * tiles), Axis(number="tokens", per=TOKENS)
        with kernel.run(*axes) as place:
            base = c.let(place.group[1] * TOKENS)
            first = c.let(place.group[0] * tiles)
            # A tile beyond the last is read again and not used.
            last = c.let(T.floordiv(rows - 1, ROWS))
            found = [c.let(source.tile + T.min(first + index, last)) for index in range(tiles)]
            strips = [c.let(tile * parts + part) for tile in found for part in range(parts)]

            def find_vector(strip: c.Expr, column: c.Expr) -> c.Expr:
                """The number of a vector among all, if they are in rows."""
                tile, part = (strip, T.int32(0)) if parts == 1 else (T.int32(0), strip)
                return T.min((first + tile) * ROWS + column, rows - 1) * parts + part

            def load(panels: Panels, group: c.Expr) -> None:
                if matrix.in_rows:
                    emit_load_vectors(panels, place, weights, find_vector, group, groups)
                else:
                    emit_load_tiles(panels, place, weights, strips, group, groups)

                def read(token: c.Expr, term: c.Expr) -> c.Expr:
                    row = T.min(base + token, tokens - 1)
                    return inputs[source.find(row, None, 1) + group * GROUP + term]

                emit_load_inputs(panels, place, read)

            def finish(token: c.Expr, half: int, products: list[c.Expr]) -> None:
                token, column = c.let(base + token), c.let(place.thread[0] + half * SIDE)
                for index in range(tiles):
                    row = c.let((first + index) * ROWS + column)
                    is_own = T.And(row >= source.begin, row < rows)
                    with c.when(T.And(token < tokens, is_own)):
                        own = products[index * parts : (index + 1) * parts]
                        store(token, rows, row - source.begin, own)

            emit_many(place, T.int32(groups), load, finish)
    return kernel


def list_product_kernels(product: ProductKernels, fp16: bool) -> Iterator[c.Kernel]:
    matrix = Matrix(
        name="matrix",
        count="rows",
        length=product.length,
        precision=product.precision,
        make=lambda kernel: _take_outputs(kernel, product),
        blocks=product.blocks,
        is_placed=True,
    )
    for tokens in FEW if product.blocks > 1 else (*FEW, TOKENS):
        yield make_product(product.name, matrix, fp16, tokens)


def _take_outputs(kernel: c.Kernel, product: ProductKernels) -> Store:
    biases = kernel.take_array("biases") if product.bias else None
    outputs = kernel.take_array("outputs")
    names = [name for name in NUMBERS[5:] if product.bias or name != "biases_at"]
    numbers = {name: kernel.take_number(name) for name in names}
    factor = kernel.take_number("factor", "float32")

    def store(token: c.Expr, rows: c.Expr, row: c.Expr, products: list[c.Expr]) -> None:
        value, row = products[0], c.let(row)
        index = numbers["outputs_at"] + token * numbers["outputs_stride"] + row
        if product.blocks > 1:
            size = c.let(T.floordiv(rows, product.blocks))
            index = index + T.floordiv(row, size) * (numbers["outputs_each"] - size)
        index = c.let(index)
        if biases is not None:
            value = c.let(value + biases[numbers["biases_at"] + row])
        if product.relu:
            value = T.max(value, c.number(0.0))
        value = value * factor
        c.store(outputs, index, outputs[index] + value if product.adds else value)

    return store
