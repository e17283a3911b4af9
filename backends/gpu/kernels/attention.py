"""Attention over keys and values that are kept on the device.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``keep``                qkv float32 [T, rows] (queries become the rotated ones), places,
                        [query_norm, key_norm float32 [head_dim]], [growth float32 [context]],
                        cosines, sines float32 [context, head_dim / 2], keys, values, [key scales,
                        value scales]; context, tokens
``attend``              qkv, places, keys, values, [key scales, value scales], partials float32
                        [spans, T, heads, width of values], tops float32 [spans, T, heads, 2];
                        context, spans, tokens
``mix``                 partials, tops, [sinks float32 [heads]], [qkv, whose last rows are gates],
                        mixed float32 [T, width]; spans, tokens
======================  ==========================================================================

With latent attention (`pi2.backends.gpu.kernels.latent`) ``attend`` takes absorbed float32 [T,
heads, rank] and turned instead of qkv, and keys are values, too; ``mix`` fills up each head's
vector.
``places`` int32 [T, 2] are every token's sequence and position: so tokens of a chunk and of several
sequences are the same to the kernels.  Keys and values lie as [sequences, kv_heads, context]
vectors of whole words: float32, two fp16 or four int8 in each.  ``spans`` is how many parts a
token's context is divided into, so that enough work groups run."""

from collections.abc import Iterator
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.ffn import compute_tanh
from pi2.backends.gpu.kernels.latent import THREADS, KeptVectors, keep_vector, list_latent_kernels
from pi2.backends.gpu.kernels.specification import AttentionKernels, Axis

_KEYS = 128
"""Keys of a tile, and threads of a work group of ``attend``."""
_LOWEST = -1e30


def list_attention_kernels(attention: AttentionKernels, number: int = 0) -> Iterator[c.Kernel]:
    """Make the kernels of kind ``number``, with which their names end."""
    if attention.latent is None:
        yield make_keep(attention, number)
    else:
        yield from list_latent_kernels(attention, attention.latent, number)
    yield make_attend(attention, number)
    yield make_mix(attention, number)


def make_keep(attention: AttentionKernels, number: int) -> c.Kernel:
    """Make ``keep``: a work group for every query, key and value head of a token."""
    kernel = c.Kernel(f"keep_{number}", (THREADS, 1, 1))
    size, half = attention.head_dim, attention.head_dim // 2
    with kernel.declare():
        qkv = kernel.take_array("qkv", "float32")
        places = kernel.take_array("places", "int32")
        norms = None
        if attention.head_norm:
            norms = [kernel.take_array(f"{name}_norm", "float32") for name in ("query", "key")]
        growth = kernel.take_array("growth", "float32") if attention.growth else None
        cosines = kernel.take_array("cosines", "float32")
        sines = kernel.take_array("sines", "float32")
        keys = KeptVectors.take(kernel, attention, "keys")
        values = KeptVectors.take(kernel, attention, "values")
        context = kernel.take_number("context")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=attention.vectors), Axis(number="tokens")) as place:
            vector, token, thread = place.group[0], place.group[1], place.thread[0]
            sequence, position = c.let(places[token * 2]), c.let(places[token * 2 + 1])
            first = c.let(token * attention.qkv_pitch + vector * size)
            is_value = c.let(T.cast(vector >= attention.heads + attention.kv_heads, "int32"))
            is_key = c.let(T.cast(vector >= attention.heads, "int32") - is_value)
            shared = c.share(size)
            turns = -(-half // THREADS)
            with c.walk(size, thread, THREADS) as element:
                c.store(shared, element, qkv[first + element])
            c.wait_for_group()
            norm = None
            if norms is not None and not attention.norm_after:
                norm = _find_norm(attention, shared)
            turned: list[tuple[c.Expr, c.Expr, c.Cell, c.Cell]] = []
            for turn_number in range(turns):
                pair = c.let(thread + turn_number * THREADS)
                index = c.let(T.min(pair, half - 1))
                ends = [c.let(shared[index]), c.let(shared[index + half])]
                if norms is not None and norm is not None:
                    ends = _normalise_ends(ends, norm, norms, index, half, is_key, is_value)
                cosine = c.let(cosines[position * half + index])
                sine = c.let(sines[position * half + index])
                low = ends[0] * cosine - ends[1] * sine
                high = ends[1] * cosine + ends[0] * sine
                turned.append(
                    (
                        pair,
                        index,
                        c.Cell(T.Select(is_value == 1, ends[0], low)),
                        c.Cell(T.Select(is_value == 1, ends[1], high)),
                    )
                )
            c.wait_for_group()
            _store_pairs(shared, turned, half)
            if norms is not None and attention.norm_after:
                norm = _find_norm(attention, shared)
                for _, index, *cells in turned:
                    ends = [c.let(cell.get()) for cell in cells]
                    ends = _normalise_ends(ends, norm, norms, index, half, is_key, is_value)
                    for cell, value in zip(cells, ends, strict=True):
                        cell.set(value)
                c.wait_for_group()
                _store_pairs(shared, turned, half)
            with c.when(vector < attention.heads):
                with T.serial(-(-size // THREADS)) as turn:
                    element = c.let(turn * THREADS + thread)
                    with c.when(element < size):
                        query = c.let(shared[element])
                        if growth is not None:
                            query = c.let(query * growth[position])
                        c.store(qkv, first + element, query)
            kinds = []
            for kept, is_kind, start in (
                (keys, is_key, attention.heads),
                (values, is_value, attention.heads + attention.kv_heads),
            ):
                target = kept.find(sequence, vector - start, position, context)
                kinds.append((kept, is_kind == 1, target))
            keep_vector(attention, shared, thread, kinds)
    return kernel


def _find_norm(attention: AttentionKernels, vector: c.Buffer) -> c.Expr:
    """Return what makes the root mean square of a head's vector, shared by the work group, 1."""
    size, total = attention.head_dim, c.Cell(c.number(0.0))
    with T.serial(size) as element:
        total.add(vector[element] * vector[element])
    mean = total.get() * c.number(1.0 / size)
    return c.let(c.number(1.0) / T.sqrt(mean + c.number(attention.epsilon)))


def _normalise_ends(
    ends: list[c.Expr],
    norm: c.Expr,
    weights: list[c.Buffer],
    first: c.Expr,
    half: int,
    is_key: c.Expr,
    is_value: c.Expr,
) -> list[c.Expr]:
    """Return both elements of a pair, the first of which is ``first``, times the norm and the
    weights of queries or keys; values stay as they are."""
    found = []
    for number, end in enumerate(ends):
        of_query, of_key = (own[first + number * half] for own in weights)
        weight = T.Select(is_key == 1, of_key, of_query)
        found.append(c.let(T.Select(is_value == 1, end, end * norm * weight)))
    return found


def _store_pairs(
    vector: c.Buffer, pairs: list[tuple[c.Expr, c.Expr, c.Cell, c.Cell]], half: int
) -> None:
    for pair, _, low, high in pairs:
        with c.when(pair < half):
            c.store(vector, pair, low.get())
            c.store(vector, pair + half, high.get())
    c.wait_for_group()


def make_attend(attention: AttentionKernels, number: int) -> c.Kernel:
    """Make ``attend``: a work group for a head of a token, and a span of its context."""
    kernel = c.Kernel(f"attend_{number}", (_KEYS, 1, 1))
    words, each = attention.value_words, attention.elements_per_word
    slices = max(1, _KEYS // words)
    columns = -(-words // _KEYS)
    """Words of a value that a thread has."""
    with kernel.declare():
        queries = _Queries(kernel, attention)
        places = kernel.take_array("places", "int32")
        keys = KeptVectors.take(kernel, attention, "keys")
        is_latent = attention.latent is not None
        values = keys if is_latent else KeptVectors.take(kernel, attention, "values")
        partials = kernel.take_array("partials", "float32")
        tops = kernel.take_array("tops", "float32")
        context, spans = kernel.take_number("context"), kernel.take_number("spans")
        tokens = kernel.take_number("tokens")
        with kernel.run(
            Axis(times=attention.heads, number="spans"), Axis(number="tokens")
        ) as place:
            token, thread = place.group[1], place.thread[0]
            head = c.let(T.floormod(place.group[0], attention.heads))
            span = c.let(T.floordiv(place.group[0], attention.heads))
            kv_head = c.let(T.floordiv(head, attention.heads // attention.kv_heads))
            sequence, position = c.let(places[token * 2]), c.let(places[token * 2 + 1])
            first = _find_first(attention, position)
            length = c.let(T.floordiv(position + 1 - first + spans - 1, spans))
            begin = c.let(first + span * length)
            end = c.let(T.min(begin + length, position + 1))
            query = queries.load(token, head, thread)
            weights = c.share(_KEYS)
            top, total = c.Cell(c.number(_LOWEST)), c.Cell(c.number(0.0))
            slice_number = c.let(T.floordiv(thread, words))
            column = c.let(T.floormod(thread, words))
            sums = [c.make_zeros(each) for _ in range(columns)]
            c.wait_for_group()
            with T.serial(c.divide_up(length, _KEYS)) as tile:
                start = c.let(begin + tile * _KEYS)
                own = c.let(start + thread)
                vector = keys.find(sequence, kv_head, T.min(own, position), context)
                score = _emit_score(keys, c.let(vector), own < end, query)
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
                    with c.when(
                        T.And(T.And(slice_number < slices, index < _KEYS), start + index < end)
                    ):
                        vector = c.let(values.find(sequence, kv_head, start + index, context))
                        weight = c.let(weights[index])
                        total.add(weight)
                        scaled = c.let(weight * values.load_scale(vector))
                        for number, cells in enumerate(sums):
                            word = c.let(T.min(column + number * _KEYS, words - 1))
                            for cell, value in zip(cells, values.load(vector, word), strict=True):
                                cell.add(value * scaled)
                c.wait_for_group()
            row = c.let((span * tokens + token) * attention.heads + head)
            found = _Found(sums, total, top)
            _emit_partial(attention, found, slices, thread, row, partials, tops)
    return kernel


def _find_first(attention: AttentionKernels, position: c.Expr) -> c.Expr:
    """Return the first token that a query at ``position`` sees."""
    window = attention.window
    if window is None:
        return c.let(T.int32(0))
    if attention.chunked:
        return c.let(T.floordiv(position, window) * window)
    return c.let(T.max(position - (window - 1), 0))


class _Queries:
    """Place of the queries that ``attend`` reads."""

    def __init__(self, kernel: c.Kernel, attention: AttentionKernels) -> None:
        self._attention = attention
        heads, latent = attention.heads, attention.latent
        self._parts: list[tuple[c.Buffer, int, int]] = []
        """Arrays, the elements that each has of a head's query, and of all vectors of a token."""
        if latent is None:
            qkv = kernel.take_array("qkv", "float32")
            self._parts.append((qkv, attention.head_dim, attention.qkv_pitch))
        else:
            for name, size in (("absorbed", latent.rank), ("turned", latent.rotated)):
                self._parts.append((kernel.take_array(name, "float32"), size, heads * size))

    def load(self, token: c.Expr, head: c.Expr, thread: c.Expr) -> c.Buffer:
        """Return a head's query, shared by the work group, times the scale."""
        query = c.share(self._attention.head_dim)
        begin = 0
        for array, size, pitch in self._parts:
            first = c.let(token * pitch + head * size)
            with c.walk(size, thread, _KEYS) as element:
                scaled = array[first + element] * c.number(self._attention.scale)
                c.store(query, element + begin, scaled)
            begin += size
        return query


def _emit_score(keys: KeptVectors, vector: c.Expr, inside: c.Expr, query: c.Buffer) -> c.Cell:
    """Return the score of a key; of one that is not ``inside`` the lowest."""
    attention = keys.attention
    each = attention.elements_per_word
    score = c.Cell(c.number(_LOWEST))
    with c.when(inside):
        dot = c.Cell(c.number(0.0))
        with T.serial(attention.row_words) as word:
            for index, value in enumerate(keys.load(vector, word)):
                dot.add(value * query[word * each + index])
        found = c.let(dot.get() * keys.load_scale(vector))
        if attention.score_cap is not None:
            cap = attention.score_cap
            found = c.number(cap) * compute_tanh(c.let(found * c.number(1.0 / cap)))
        score.set(found)
    return score


@dataclass(frozen=True, slots=True)
class _Found:
    """Sums of weighted values of a span, the total of weights and the largest score."""

    sums: list[list[c.Cell]]
    total: c.Cell
    top: c.Cell


def _emit_partial(
    attention: AttentionKernels,
    of_span: _Found,
    slices: int,
    thread: c.Expr,
    row: c.Expr,
    partials: c.Buffer,
    tops: c.Buffer,
) -> None:
    words, each, sums = attention.value_words, attention.elements_per_word, of_span.sums
    size = attention.value_width
    # The last place of a slice is its sum of weights.
    pitch = len(sums) * _KEYS * each if slices == 1 else words * each
    shared = c.share(slices * (pitch + 1))
    slice_number = c.let(T.floordiv(thread, words)) if slices > 1 else T.int32(0)
    column = c.let(T.floormod(thread, words)) if slices > 1 else thread
    with c.when(slice_number < slices):
        base = c.let(slice_number * (pitch + 1))
        for number, cells in enumerate(sums):
            for index, cell in enumerate(cells):
                c.store(shared, base + (column + number * _KEYS) * each + index, cell.get())
        with c.when(column == 0):
            c.store(shared, base + pitch, of_span.total.get())
    c.wait_for_group()
    with T.serial(-(-size // _KEYS)) as turn:
        element = c.let(turn * _KEYS + thread)
        with c.when(element < size):
            found = c.Cell(c.number(0.0))
            for piece in range(slices):
                found.add(shared[piece * (pitch + 1) + element])
            c.store(partials, row * size + element, found.get())
    with c.when(thread == 0):
        found = c.Cell(c.number(0.0))
        for piece in range(slices):
            found.add(shared[piece * (pitch + 1) + pitch])
        c.store(tops, row * 2, of_span.top.get())
        c.store(tops, row * 2 + 1, found.get())


def make_mix(attention: AttentionKernels, number: int) -> c.Kernel:
    """Make ``mix``: joins the spans; what fills up the width is 0."""
    width = attention.width
    kernel = c.Kernel(f"mix_{number}", (_KEYS, 1, 1))
    size, pitch = attention.value_width, attention.mixed_pitch
    with kernel.declare():
        partials = kernel.take_array("partials", "float32")
        tops = kernel.take_array("tops", "float32")
        sinks = kernel.take_array("sinks", "float32") if attention.sinks else None
        qkv = kernel.take_array("qkv", "float32") if attention.output_gate else None
        mixed = kernel.take_array("mixed", "float32")
        spans, tokens = kernel.take_number("spans"), kernel.take_number("tokens")
        groups = Axis(times=-(-width // _KEYS))
        with kernel.run(groups, Axis(number="tokens")) as place:
            token = place.group[1]
            element = c.let(place.group[0] * _KEYS + place.thread[0])
            with c.when(element < width):
                head = c.let(T.min(T.floordiv(element, pitch), attention.heads - 1))
                in_head = c.let(T.floormod(element, pitch))
                in_value = c.let(T.min(in_head, size - 1))
                top = c.Cell(c.number(_LOWEST) if sinks is None else sinks[head])
                total, found = c.Cell(c.number(0.0)), c.Cell(c.number(0.0))
                with T.serial(spans) as span:
                    row = c.let((span * tokens + token) * attention.heads + head)
                    top.set(T.max(top.get(), tops[row * 2]))
                with T.serial(spans) as span:
                    row = c.let((span * tokens + token) * attention.heads + head)
                    share = c.let(T.exp(tops[row * 2] - top.get()))
                    total.add(share * tops[row * 2 + 1])
                    found.add(share * partials[row * size + in_value])
                if sinks is not None:
                    total.add(T.exp(sinks[head] - top.get()))
                value = c.let(found.get() / total.get())
                if qkv is not None:
                    begin = token * attention.qkv_pitch + attention.vectors * size
                    gate = c.let(qkv[begin + head * size + in_value])
                    value = value / (c.number(1.0) + T.exp(c.number(0.0) - gate))
                is_inside = T.And(element < attention.heads * pitch, in_head < size)
                c.store(mixed, token * width + element, T.Select(is_inside, value, c.number(0.0)))
    return kernel
