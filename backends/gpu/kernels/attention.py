"""Attention over keys and values that are kept on the device.

``keep`` writes vectors of tokens to the KV cache, ``attend`` mixes the values of spans of a token's
context, and ``join`` joins the spans.  A word is a float32, two fp16 or four int8 elements.  The
last two share ``span_sums`` float32 [spans, T, heads, value_width] and ``span_tops`` float32
[spans, T, heads, 2].  With several ``spans`` of a token's context enough work groups run."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.arguments import Arguments, divide
from pi2.backends.gpu.kernels.code import narrow_half, widen_half
from pi2.backends.gpu.kernels.ffn import compute_tanh
from pi2.backends.gpu.kernels.specification import Axis

_KEYS = 128
"""Keys of a tile, and threads of a work group of ``attend``."""
_KEEPERS = 64
"""Threads of a work group that keeps a vector."""
_LOWEST = -1e30
_LARGEST_CODE = 127.0
_EACH = {"fp32": 1, "fp16": 2, "int8": 4}
"""Elements of a word."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys or values in the KV cache, ``pitch`` elements from one position to the next."""

    kind: str
    pitch: int
    buffer: c.Buffer
    scales: c.Buffer | None
    strides: list[c.Expr]
    """Elements from one sequence to the next, and from one head."""

    @classmethod
    def of(cls, own: Arguments, name: str, pitch: int) -> Kept:
        """Return a kind of an instruction, ``key`` or ``value``."""

        def get(part: str) -> c.Expr:
            return getattr(own, f"{name}_{part}")

        scales = get("scales").buffer if own.step.format == "int8" else None
        strides = [get("sequence_stride"), get("head_stride")]
        return cls(own.step.format, pitch, get("cache").buffer, scales, strides)

    @property
    def each(self) -> int:
        return _EACH[self.kind]

    def find(self, sequence: c.Expr, head: c.Expr, position: c.Expr) -> c.Expr:
        """Return the first word of a vector."""
        begin = sequence * self.strides[0] + head * self.strides[1] + position * self.pitch
        return divide(begin, self.each)

    def load(self, first: c.Expr, word: c.Expr) -> list[c.Expr]:
        """Return the elements of a word, without a scale."""
        packed = c.let(self.buffer[first + word])
        if self.kind == "fp32":
            return [c.let(T.reinterpret(packed, dtype="float32"))]
        if self.kind == "fp16":
            return [c.let(widen_half(packed, high)) for high in (False, True)]
        codes = []
        for byte in range(4):
            shifted = c.let(T.shift_left(packed, T.uint32(24 - 8 * byte)))
            signed = T.shift_right(T.reinterpret(shifted, dtype="int32"), T.int32(24))
            codes.append(c.let(T.cast(signed, "float32")))
        return codes

    def load_scale(self, first: c.Expr) -> c.Expr:
        if self.scales is None:
            return c.number(1.0)
        return c.let(self.scales[T.floordiv(first * self.each, self.pitch)])

    def put(self, vector: c.Buffer, thread: c.Expr, first: c.Expr) -> None:
        """Keep a vector that the work group shares."""
        words, scale = self.pitch // self.each, None
        if self.scales is not None:
            scale = _find_scale(vector, self.pitch)
            with c.when(thread == 0):
                c.store(self.scales, T.floordiv(first * self.each, self.pitch), scale)
        with c.walk(words, thread, _KEEPERS) as word:
            c.store(self.buffer, first + word, self._pack(vector, word, scale))

    def _pack(self, elements: c.Buffer, word: c.Expr, scale: c.Expr | None) -> c.Expr:
        values = [c.let(elements[word * self.each + index]) for index in range(self.each)]
        if self.kind == "fp32":
            return T.reinterpret(values[0], dtype="uint32")
        if self.kind == "fp16":
            low, high = (c.let(narrow_half(value)) for value in values)
            return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))
        assert scale is not None
        safe = T.max(scale, c.number(2.0**-24))
        factor = c.let(T.Select(scale > c.number(0.0), c.number(1.0) / safe, c.number(0.0)))
        packed: c.Expr = T.uint32(0)
        for byte, value in enumerate(values):
            # Adding 2^23 rounds to the nearest integer, ties to even; adding 128, whose bit is
            # turned over again, keeps the sum above it.
            rounded = c.let(value * factor + c.number(2**23 + 128))
            code = T.bitwise_and(T.reinterpret(rounded, dtype="uint32"), T.uint32(255))
            packed = T.bitwise_or(packed, T.shift_left(code, T.uint32(8 * byte)))
        return T.bitwise_xor(packed, T.uint32(0x80808080))


def _find_scale(elements: c.Buffer, count: int) -> c.Expr:
    """Return the scale of a vector that the work group shares, as fp16 rounds it."""
    top = c.Cell(c.number(0.0))
    with T.serial(count) as index:
        top.set(T.max(top.get(), T.abs(elements[index])))
    bits = narrow_half(c.let(top.get() * c.number(1.0 / _LARGEST_CODE)))
    return c.let(widen_half(c.let(bits), False))


def emit_keep(own: Arguments) -> None:
    """A work group keeps a head's key and value; latent vectors are both."""
    own.kernel.block = (_KEEPERS, 1, 1)
    names = ["key", *(["value"] if own.value_width else [])]
    kept = {name: Kept.of(own, name, getattr(own, f"{name}_width")) for name in names}
    with own.kernel.run(Axis(number="heads"), Axis(number="tokens")) as place:
        head, token, thread = *place.group, place.thread[0]
        sequence, position = c.let(own.sequences[token]), c.let(own.positions[token])
        for name, target in kept.items():
            shared = c.share(target.pitch)
            x = getattr(own, f"{name}s").skip(token * own.x_stride + head * target.pitch)
            with c.walk(target.pitch, thread, _KEEPERS) as element:
                c.store(shared, element, x[element])
            c.wait_for_group()
            target.put(shared, thread, target.find(sequence, head, position))


_SPANS = "span_sums span_tops"
"""Sums of spans, and their largest scores with sums of weights."""


def emit_attend(own: Arguments) -> None:
    """A work group mixes the values of a span of a token's context for a head."""
    own.kernel.block = (_KEYS, 1, 1)
    each = _EACH[own.step.format]
    words = -(-own.value_width // each)
    slices, columns = max(1, _KEYS // words), -(-words // _KEYS)
    """Parts of the keys, and words of a value that a thread has."""
    spans, partials = own.spans, own.kernel.take_arrays(_SPANS)
    keys, values = Kept.of(own, "key", own.key_width), Kept.of(own, "value", own.value_stride)
    with own.kernel.run(Axis(times=own.heads, number="spans"), Axis(number="tokens")) as place:
        token, thread = place.group[1], place.thread[0]
        head = c.let(T.floormod(place.group[0], own.heads))
        span = divide(place.group[0], own.heads)
        shares = divide(head, own.group)
        sequence, position = c.let(own.sequences[token]), c.let(own.positions[token])
        first = _find_first(position, own.window, is_chunked=bool(own.is_chunked))
        length = divide(position + 1 - first + spans - 1, spans)
        begin = c.let(first + span * length)
        end = c.let(T.min(begin + length, position + 1))
        query, source = (
            c.share(own.key_width),
            own.queries.skip(token * own.query_stride + head * own.key_width),
        )
        with c.walk(own.key_width, thread, _KEYS) as element:
            c.store(query, element, source[element] * own.scale)
        weights = c.share(_KEYS)
        top, total = c.Cell(c.number(_LOWEST)), c.Cell(c.number(0.0))
        slice_number, column = divide(thread, words), c.let(T.floormod(thread, words))
        sums = [c.make_zeros(each) for _ in range(columns)]
        c.wait_for_group()
        with T.serial(c.divide_up(length, _KEYS)) as tile:
            start = c.let(begin + tile * _KEYS)
            at = c.let(start + thread)
            vector = keys.find(sequence, shares, T.min(at, position))
            score = _emit_score(keys, vector, at < end, query, own.cap)
            c.store(weights, thread, score.get())
            c.wait_for_group()
            highest = c.Cell(top.get())
            with T.serial(_KEYS) as index:
                highest.set(T.max(highest.get(), weights[index]))
            fading = c.let(T.exp(top.get() - highest.get()))
            top.set(highest.get())
            total.set(total.get() * fading)
            for cells in sums:
                for cell in cells:
                    cell.set(cell.get() * fading)
            c.wait_for_group()
            inside = start + thread < end
            weight = T.exp(score.get() - highest.get())
            c.store(weights, thread, T.Select(inside, c.let(weight), c.number(0.0)))
            c.wait_for_group()
            with T.serial(-(-_KEYS // slices)) as turn:
                index = c.let(turn * slices + slice_number)
                is_own = T.And(slice_number < slices, index < _KEYS)
                with c.when(T.And(is_own, start + index < end)):
                    vector = values.find(sequence, shares, start + index)
                    weight = c.let(weights[index])
                    total.add(weight)
                    scaled = c.let(weight * values.load_scale(vector))
                    for number, cells in enumerate(sums):
                        word = c.let(T.min(column + number * _KEYS, words - 1))
                        for cell, value in zip(cells, values.load(vector, word), strict=True):
                            cell.add(value * scaled)
            c.wait_for_group()
        row = c.let((span * own.tokens + token) * own.heads + head)
        _emit_partial(own, partials, (sums, total, top), slices, thread, row)


def _find_first(position: c.Expr, window: c.Expr, *, is_chunked: bool) -> c.Expr:
    """Return the first token that a query at ``position`` sees."""
    size = c.let(T.max(window, 1))
    begin = T.floordiv(position, size) * size if is_chunked else T.max(position + 1 - size, 0)
    return c.let(T.Select(window > 0, c.let(begin), T.int32(0)))


def _emit_score(keys: Kept, vector: c.Expr, inside: c.Expr, query: c.Buffer, cap: c.Expr) -> c.Cell:
    """Return the score of a key; of one that is not ``inside`` the lowest."""
    score = c.Cell(c.number(_LOWEST))
    with c.when(inside):
        dot = c.Cell(c.number(0.0))
        with T.serial(keys.pitch // keys.each) as word:
            for index, value in enumerate(keys.load(vector, word)):
                dot.add(value * query[word * keys.each + index])
        found = c.let(dot.get() * keys.load_scale(vector))
        is_capped = cap > c.number(0.0)
        size = c.let(T.Select(is_capped, cap, c.number(1.0)))
        capped = c.let(size * compute_tanh(c.let(found / size)))
        score.set(T.Select(is_capped, capped, found))
    return score


def _emit_partial(
    own: Arguments,
    spans: list[c.Buffer],
    found: tuple[list[list[c.Cell]], c.Cell, c.Cell],
    slices: int,
    thread: c.Expr,
    row: c.Expr,
) -> None:
    """Write sums of weighted values of a span, the total of weights, and the largest score."""
    each, size, (sums, total, top) = _EACH[own.step.format], own.value_width, found
    words = -(-size // each)
    partials, tops = spans
    # The last place of a slice is its sum of weights.
    pitch = len(sums) * _KEYS * each if slices == 1 else words * each
    shared = c.share(slices * (pitch + 1))
    slice_number = divide(thread, words) if slices > 1 else T.int32(0)
    column = c.let(T.floormod(thread, words)) if slices > 1 else thread
    with c.when(slice_number < slices):
        base = c.let(slice_number * (pitch + 1))
        for number, cells in enumerate(sums):
            for index, cell in enumerate(cells):
                c.store(shared, base + (column + number * _KEYS) * each + index, cell.get())
        with c.when(column == 0):
            c.store(shared, base + pitch, total.get())
    c.wait_for_group()

    def add_up(element: c.Expr) -> c.Expr:
        total = c.Cell(c.number(0.0))
        for piece in range(slices):
            total.add(shared[piece * (pitch + 1) + element])
        return total.get()

    with c.walk(size, thread, _KEYS) as element:
        c.store(partials, row * size + element, add_up(element))
    with c.when(thread == 0):
        c.store(tops, row * 2, top.get())
        c.store(tops, row * 2 + 1, add_up(T.int32(pitch)))


def emit_join(own: Arguments) -> None:
    """A thread joins the spans of an element."""
    own.kernel.block = (_KEYS, 1, 1)
    size = own.value_width
    partials, tops = own.kernel.take_arrays(_SPANS)
    groups = Axis(times=-(-own.heads * size // _KEYS))
    with own.kernel.run(groups, Axis(number="tokens")) as place:
        token = place.group[1]
        element = c.let(place.group[0] * _KEYS + place.thread[0])
        with c.when(element < own.heads * size):
            head, inside = divide(element, size), c.let(T.floormod(element, size))
            sink = c.let(own.sinks[head]) if own.has_sinks else None
            top = c.Cell(c.number(_LOWEST) if sink is None else sink)
            total, found = c.Cell(c.number(0.0)), c.Cell(c.number(0.0))
            with T.serial(own.spans) as span:
                row = c.let((span * own.tokens + token) * own.heads + head)
                top.set(T.max(top.get(), tops[row * 2]))
            with T.serial(own.spans) as span:
                row = c.let((span * own.tokens + token) * own.heads + head)
                share = c.let(T.exp(tops[row * 2] - top.get()))
                total.add(share * tops[row * 2 + 1])
                found.add(share * partials[row * size + inside])
            if sink is not None:
                total.add(T.exp(sink - top.get()))
            own.y.put(token * own.y_stride + element, found.get() / total.get())
