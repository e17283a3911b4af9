"""Latent attention: the KV cache has one vector of a token, of which keys and values of all heads
are made.

======================  ==========================================================================
kernel                  parameters: arrays, then numbers
======================  ==========================================================================
``latent_norm``         qkv float32 [T, rows], norm weights float32 [query rank, filled up], made
                        float32 [T, query rank, filled up]; tokens
``keep``                qkv, [queries float32 [T, heads, plain + rotated]], places, norm weights
                        float32 [rank], cosines, sines float32 [context, rotated / 2], plain float32
                        [T, heads, plain, filled up], turned float32 [T, heads, rotated], keys,
                        [key scales]; context, tokens
======================  ==========================================================================

Rows of qkv are those of queries, or of what they are made of, then of the vector that is kept, then
of the rotated key.  `pi2.backends.gpu.kernels.attention` has what follows: the vector is key and
value of one head that all queries share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.code import narrow_half, widen_half
from pi2.backends.gpu.kernels.specification import AttentionKernels, Axis
from pi2.plan.documents.model_mixing import Latent
from pi2.plan.weights.layout import fill_groups

_LARGEST_CODE = 127.0


@dataclass(frozen=True, slots=True)
class KeptVectors:
    """Keys or values, or what latent attention keeps as both."""

    attention: AttentionKernels
    buffer: c.Buffer
    scales: c.Buffer | None

    @classmethod
    def take(cls, kernel: c.Kernel, attention: AttentionKernels, name: str) -> KeptVectors:
        buffer = kernel.take_array(name, "uint32")
        int8 = attention.kv == "int8"
        return cls(
            attention, buffer, kernel.take_array(f"{name}_scales", "float32") if int8 else None
        )

    def find(self, sequence: c.Expr, head: c.Expr, position: c.Expr, context: c.Expr) -> c.Expr:
        return (sequence * self.attention.kv_heads + head) * context + position

    def load(self, vector: c.Expr, word: c.Expr) -> list[c.Expr]:
        """Return the elements of a word, without a scale."""
        packed = c.let(self.buffer[vector * self.attention.row_words + word])
        if self.attention.kv == "fp32":
            return [c.let(T.reinterpret(packed, dtype="float32"))]
        if self.attention.kv == "fp16":
            return [c.let(widen_half(packed, high)) for high in (False, True)]
        codes = []
        for byte in range(4):
            shifted = c.let(T.shift_left(packed, T.uint32(24 - 8 * byte)))
            signed = T.shift_right(T.reinterpret(shifted, dtype="int32"), T.int32(24))
            codes.append(c.let(T.cast(signed, "float32")))
        return codes

    def load_scale(self, vector: c.Expr) -> c.Expr:
        return c.number(1.0) if self.scales is None else c.let(self.scales[vector])


def find_kept_scale(attention: AttentionKernels, elements: c.Buffer) -> c.Expr:
    """Return the scale of the vector ``elements`` float32 [head_dim], shared, as fp16 rounds it."""
    top = c.Cell(c.number(0.0))
    with T.serial(attention.head_dim) as index:
        top.set(T.max(top.get(), T.abs(elements[index])))
    bits = narrow_half(c.let(top.get() * c.number(1.0 / _LARGEST_CODE)))
    return c.let(widen_half(c.let(bits), False))


def pack_word(
    attention: AttentionKernels, elements: c.Buffer, word: c.Expr, scale: c.Expr | None
) -> c.Expr:
    each = attention.elements_per_word
    values = [c.let(elements[word * each + index]) for index in range(each)]
    if attention.kv == "fp32":
        return T.reinterpret(values[0], dtype="uint32")
    if attention.kv == "fp16":
        low, high = (c.let(narrow_half(value)) for value in values)
        return T.bitwise_or(low, T.shift_left(high, T.uint32(16)))
    assert scale is not None
    safe = T.max(scale, c.number(2.0**-24))
    factor = c.let(T.Select(scale > c.number(0.0), c.number(1.0) / safe, c.number(0.0)))
    packed: c.Expr = T.uint32(0)
    for byte, value in enumerate(values):
        # Adding 2^23 rounds to the nearest integer, ties to even; adding 128, whose bit is turned
        # over again, keeps the sum above it.
        rounded = c.let(value * factor + c.number(2**23 + 128))
        code = T.bitwise_and(T.reinterpret(rounded, dtype="uint32"), T.uint32(255))
        packed = T.bitwise_or(packed, T.shift_left(code, T.uint32(8 * byte)))
    return T.bitwise_xor(packed, T.uint32(0x80808080))


THREADS = 64
"""Of a work group that keeps a vector."""


def keep_vector(
    attention: AttentionKernels,
    vector: c.Buffer,
    thread: c.Expr,
    kinds: Sequence[tuple[KeptVectors, c.Expr, c.Expr]],
) -> None:
    """Keep a vector that the work group shares, in each of ``kinds``: where, whether, and which of
    the vectors there it is."""
    scale = find_kept_scale(attention, vector) if attention.kv == "int8" else None
    for turn in range(-(-attention.row_words // THREADS)):
        word = c.let(thread + turn * THREADS)
        inside = word < attention.row_words
        read = c.let(T.min(word, attention.row_words - 1))
        packed = c.let(pack_word(attention, vector, read, scale))
        for kept, is_wanted, target in kinds:
            # One condition: PoCL 3.1 stores too much where one is within another.
            with c.when(T.And(is_wanted, inside)):
                c.store(kept.buffer, target * attention.row_words + word, packed)
            if kept.scales is not None and scale is not None and turn == 0:
                with c.when(T.And(is_wanted, thread == 0)):
                    c.store(kept.scales, target, scale)


def list_latent_kernels(
    attention: AttentionKernels, latent: Latent, number: int
) -> Iterator[c.Kernel]:
    """Make the kernels before ``attend`` of kind ``number``, with which their names end."""
    if latent.query_rank is not None:
        yield make_latent_norm(attention, latent, latent.query_rank, number)
    yield make_latent_keep(attention, latent, number)


def make_latent_norm(
    attention: AttentionKernels, latent: Latent, query_rank: int, number: int
) -> c.Kernel:
    """Make ``latent_norm``: a work group normalises what a token's queries are made of."""
    kernel = c.Kernel(f"latent_norm_{number}", (THREADS, 1, 1))
    filled = fill_groups(query_rank)
    with kernel.declare():
        qkv = kernel.take_array("qkv", "float32")
        weights = kernel.take_array("weights", "float32")
        made = kernel.take_array("made", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(number="tokens")) as place:
            first = c.let(place.group[0] * attention.latent_rows)
            thread, epsilon = place.thread[0], latent.epsilon
            factor = c.find_norm(
                lambda index: qkv[first + index], query_rank, epsilon, thread, THREADS
            )
            with c.walk(filled, thread, THREADS) as element:
                # Weights are 0 where the vector is filled up.
                value = qkv[first + T.min(element, query_rank - 1)] * factor * weights[element]
                c.store(made, place.group[0] * filled + element, value)
    return kernel


def make_latent_keep(attention: AttentionKernels, latent: Latent, number: int) -> c.Kernel:
    """Make ``keep``: a work group for a head's query, and one for the token's latent vector."""
    kernel = c.Kernel(f"keep_{number}", (THREADS, 1, 1))
    heads, rows, half = attention.heads, attention.latent_rows, latent.rotated // 2
    with kernel.declare():
        qkv = kernel.take_array("qkv", "float32")
        made = latent.query_rank is not None
        queries = kernel.take_array("queries", "float32") if made else qkv
        places = kernel.take_array("places", "int32")
        weights = kernel.take_array("weights", "float32")
        cosines = kernel.take_array("cosines", "float32")
        sines = kernel.take_array("sines", "float32")
        plain = kernel.take_array("plain", "float32")
        turned = kernel.take_array("turned", "float32")
        keys = KeptVectors.take(kernel, attention, "keys")
        context = kernel.take_number("context")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=heads + 1), Axis(number="tokens")) as place:
            group, token, thread = place.group[0], place.group[1], place.thread[0]
            sequence, position = c.let(places[token * 2]), c.let(places[token * 2 + 1])
            head = c.let(T.min(group, heads - 1))
            is_query = group < heads
            # Of a query.
            pitch = heads * latent.key if made else rows
            begin = c.let(token * pitch + head * latent.key)
            filled = fill_groups(latent.plain)
            with T.serial(-(-filled // THREADS)) as turn:
                element = c.let(turn * THREADS + thread)
                value = c.let(queries[begin + T.min(element, latent.plain - 1)])
                with c.when(T.And(is_query, element < filled)):
                    kept = T.Select(element < latent.plain, value, c.number(0.0))
                    c.store(plain, (token * heads + head) * filled + element, kept)
            # Of the token.
            first = c.let(token * rows + (rows - latent.kept))
            factor = c.find_norm(
                lambda index: qkv[first + index], latent.rank, latent.epsilon, thread, THREADS
            )
            shared = c.share(latent.kept)
            with c.walk(latent.rank, thread, THREADS) as element:
                c.store(shared, element, qkv[first + element] * factor * weights[element])
            for turn_number in range(-(-half // THREADS)):
                pair = c.let(thread + turn_number * THREADS)
                index = c.let(T.min(pair, half - 1))
                cosine = c.let(cosines[position * half + index])
                sine = c.let(sines[position * half + index])
                low, high = _turn(queries, c.let(begin + latent.plain), index, half, cosine, sine)
                with c.when(T.And(is_query, pair < half)):
                    target = c.let((token * heads + head) * latent.rotated + pair)
                    c.store(turned, target, low)
                    c.store(turned, target + half, high)
                low, high = _turn(qkv, c.let(first + latent.rank), index, half, cosine, sine)
                with c.when(pair < half):
                    c.store(shared, latent.rank + pair, low)
                    c.store(shared, latent.rank + half + pair, high)
            c.wait_for_group()
            target = c.let(keys.find(sequence, T.int32(0), position, context))
            keep_vector(attention, shared, thread, [(keys, group == heads, target)])
    return kernel


def _turn(
    vectors: c.Buffer, first: c.Expr, index: c.Expr, half: int, cosine: c.Expr, sine: c.Expr
) -> tuple[c.Expr, c.Expr]:
    low, high = c.let(vectors[first + index]), c.let(vectors[first + index + half])
    return c.let(low * cosine - high * sine), c.let(high * cosine + low * sine)
