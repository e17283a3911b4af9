"""Embeddings of tokens out of a matrix in tiles, which the head may share.

``embed``: ids int32 [T], matrix weights in tiles, scales, x float32 [T, length]; tokens.
``add_positions``: places int32 [T, 2] (a token's sequence and position), positions uint32 [context,
length / 2] (two fp16 each), x; tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.few import ROWS, VECTOR, Tiles
from pi2.backends.gpu.kernels.halves import widen_half
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import EmbeddingKernels
from pi2.backends.gpu.kernels.weights import WORDS, Weights, list_elements, unpack_word
from pi2.plan.weights.layout import GROUP

_THREADS = 64


def list_embedding_kernels(embedding: EmbeddingKernels, fp16: bool) -> Iterator[c.Kernel]:
    """Make all of them."""
    yield make_embed(embedding, fp16)
    if embedding.positions:
        yield make_add_positions(embedding)


def make_embed(embedding: EmbeddingKernels, fp16: bool) -> c.Kernel:
    """Make ``embed``: a thread for a group of a token's vector."""
    kernel = c.Kernel("embed", (_THREADS, 1, 1))
    groups = embedding.length // GROUP
    precision = embedding.precision
    with kernel.declare():
        ids = kernel.take_array("ids", "int32")
        weights = Weights.take(kernel, "matrix", precision, VECTOR, fp16)
        x = kernel.take_array("x", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=-(-groups // _THREADS)), Axis(number="tokens")) as place:
            group = c.let(place.group[0] * _THREADS + place.thread[0])
            token = place.group[1]
            with c.when(group < groups):
                row = c.let(ids[token])
                tile, in_tile = c.let(T.floordiv(row, ROWS)), c.let(T.floormod(row, ROWS))
                tiles = Tiles(weights, 1, embedding.length)
                words = tiles.load_group(tile, 0, group, in_tile)
                scale = tiles.load_scale(tile, 0, group, in_tile)
                factor = c.let(scale * c.number(embedding.factor))
                first = c.let(token * embedding.length + group * GROUP)
                for number in range(WORDS[precision]):
                    elements = list_elements(precision, number)
                    values = unpack_word(precision, words[number])
                    for element, value in zip(elements, values, strict=True):
                        c.store(x, first + element, value * factor)
    return kernel


def make_add_positions(embedding: EmbeddingKernels) -> c.Kernel:
    """Make ``add_positions``: a thread for two elements of a token's vector."""
    kernel = c.Kernel("add_positions", (_THREADS, 1, 1))
    words = embedding.length // 2
    with kernel.declare():
        places = kernel.take_array("places", "int32")
        positions = kernel.take_array("positions", "uint32")
        x = kernel.take_array("x", "float32")
        kernel.take_number("tokens")
        with kernel.run(Axis(times=-(-words // _THREADS)), Axis(number="tokens")) as place:
            word, token = c.let(place.group[0] * _THREADS + place.thread[0]), place.group[1]
            with c.when(word < words):
                packed = c.let(positions[places[token * 2 + 1] * words + word])
                first = c.let(token * embedding.length + word * 2)
                for half in range(2):
                    value = widen_half(packed, half == 1)
                    c.store(x, first + half, x[first + half] + value)
    return kernel
