"""Embeddings of tokens out of a matrix in tiles, which the head may share.

``embed``: ids int32 [T], matrix weights in tiles, scales, x float32 [T, length]; tokens.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.few import ROWS, VECTOR, Tiles
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import EmbeddingKernels
from pi2.backends.gpu.kernels.weights import WORDS, Weights, list_elements, unpack_word
from pi2.plan.weights.layout import GROUP

_THREADS = 64


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
