"""The arrangement of weights on a GPU, element by element."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.arrays import F32, U32, Scales
from pi2.backends.gpu.kernels.specification import FfnKernels
from pi2.backends.gpu.packing import pack_matrix, pack_neurons
from pi2.backends.gpu.sizes import TILE, count_tile_bytes
from pi2.formats import find_packing
from pi2.plan.weights.bundles import slice_part, unpack_part
from pi2.plan.weights.layout import GROUP, Precision
from tests.helpers.gpu import RandomNeurons

LENGTH = 32 * (16 + 8 + 4 + 1)
"""A block of 16 groups, then 8, 4 and 1."""
WORDS = {"int4": 4, "int8": 8, "fp16": 16}


def read_word(word: int, precision: Precision) -> list[tuple[int, float]]:
    """Elements of a word of a group, as the kernels' documentation says: place within the word's
    own elements, and number."""
    if precision == "int4":
        low = [(b, float((word >> 8 * b) & 15) - 8) for b in range(4)]
        return low + [(16 + b, float((word >> (8 * b + 4)) & 15) - 8) for b in range(4)]
    data = word.to_bytes(4, "little")
    if precision == "int8":
        return [(b, float(value)) for b, value in enumerate(np.frombuffer(data, np.int8))]
    return [(b, float(value)) for b, value in enumerate(np.frombuffer(data, np.float16))]


def read_group(words: list[int], precision: Precision) -> list[float]:
    values = [0.0] * GROUP
    step = 4 if precision == "int4" else GROUP // len(words)
    for number, word in enumerate(words):
        for element, value in read_word(word, precision):
            values[step * number + element] = value
    return values


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_words_of_a_group_hold_its_elements_in_order(precision: Precision) -> None:
    rows = np.random.default_rng(1).standard_normal((3, LENGTH)).astype(np.float32)
    weights, scales = find_packing(precision).quantize(rows)
    wanted = find_packing(precision).dequantize(weights, scales, LENGTH)
    words = find_packing(precision).order_words(weights, LENGTH)
    assert words.shape == (3, LENGTH // GROUP, WORDS[precision])
    for row in range(3):
        for group in range(LENGTH // GROUP):
            scale = 1.0 if scales is None else float(scales[row, group])
            found = np.array(read_group(words[row, group].tolist(), precision), np.float32) * scale
            np.testing.assert_array_equal(found, wanted[row, group * GROUP : (group + 1) * GROUP])


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_a_matrix_in_tiles_has_one_vector_of_each_row_then_the_next(precision: Precision) -> None:
    rows = np.random.default_rng(2).standard_normal((41, 96)).astype(np.float32)
    weights, scales = find_packing(precision).quantize(rows)
    words, tile_scales = pack_matrix(weights, scales, 96, precision)
    vectors = words.reshape(2, -1, TILE, 4)
    ordered = find_packing(precision).order_words(weights, 96).reshape(41, -1, 4)
    for row in (0, 31, 32, 40):
        np.testing.assert_array_equal(vectors[row // TILE, :, row % TILE], ordered[row])
    assert not vectors[1, :, 9:].any(), "what fills up the last tile is zero"
    if scales is not None and tile_scales is not None:
        by_row = tile_scales.reshape(2, 3, TILE)
        np.testing.assert_array_equal(by_row[1, :, 8], scales[40])


def unpack_rows(words: U32, scales: Scales | None, hidden: int, precision: Precision) -> F32:
    """Vectors that lie in rows."""
    groups = words.reshape(-1, hidden // GROUP, WORDS[precision])
    values = np.array(
        [[read_group(group.tolist(), precision) for group in row] for row in groups], np.float32
    )
    if scales is not None:
        values *= scales.reshape(-1, hidden // GROUP, 1).astype(np.float32)
    return values.reshape(-1, hidden)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_neurons_keep_their_down_vectors_biases_and_experts(precision: Precision) -> None:
    ffn = FfnKernels(hidden=96, precision=precision, activation="relu", bias=True, experts=5)
    neurons = RandomNeurons(ffn, count=37)
    packed = pack_neurons(neurons.bundles, neurons.layout)
    found = unpack_rows(packed.down_weights, packed.down_scales, 96, precision)
    np.testing.assert_array_equal(found[:37], unpack_part(neurons.bundles, neurons.layout, 2))
    assert packed.biases is not None and packed.experts is not None
    assert packed.biases.shape == (64 * 2,) and packed.experts.shape == (64,)
    assert not packed.biases[2 * 37 :].any() and not packed.experts[37:].any()


@pytest.mark.parametrize("gated", [True, False])
def test_gates_of_a_tile_come_before_its_up_rows(gated: bool) -> None:
    ffn = FfnKernels(hidden=64, precision="int8", activation="relu", gated=gated)
    neurons = RandomNeurons(ffn, count=64)
    packed = pack_neurons(neurons.bundles, neurons.layout)
    tiles = packed.gate_up_weights.reshape(2, ffn.parts, -1, TILE, 4)
    for part in range(ffn.parts):
        weights, _ = slice_part(neurons.bundles, neurons.layout, part)
        ordered = find_packing("int8").order_words(weights, 64).reshape(64, -1, 4)
        np.testing.assert_array_equal(tiles[1, part, :, 3], ordered[35])


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_pieces_of_whole_tiles_are_contiguous(precision: Precision) -> None:
    ffn = FfnKernels(hidden=96, precision=precision, activation="relu", bias=True, experts=2)
    neurons = RandomNeurons(ffn, count=96)
    whole = pack_neurons(neurons.bundles, neurons.layout).list_arrays()
    piece = pack_neurons(neurons.bundles[32:64], neurons.layout).list_arrays()
    sizes = count_tile_bytes(neurons.layout)
    assert sizes.keys() == whole.keys()
    for name, array in whole.items():
        data = array.tobytes()
        assert len(data) == 3 * sizes[name]
        assert piece[name].tobytes() == data[sizes[name] : 2 * sizes[name]]
