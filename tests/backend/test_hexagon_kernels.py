"""Kernels of Hexagon NPUs under the emulator, against numpy: equal integer sums, bit by bit."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pi2.arrays import F32, U8
from pi2.backends.hexagon.packing import pack_neurons, pack_rows
from pi2.backends.hexagon.specification import (
    FfnGraph,
    FfnShape,
    HexagonSpec,
    ProductGraph,
    choose_weights,
)
from pi2.formats import find_packing
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.bundles import assemble_bundles, slice_part, unpack_part
from pi2.plan.weights.layout import BundleLayout, Precision, lay_out_bundle, round_up
from tests.helpers.bundles import pack_bundles
from tests.helpers.hexagon import Bench, multiply_exactly, require_emulator, round_tokens

TOKENS = (1, 2, 4, 8, 24)
LENGTHS = (32, 96, 256)
ROWS = 41
"""One tile, and nine rows of another."""
SHAPE = FfnShape(hidden=96, weights="int4", options=Ffn(activation="drelu"))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    require_emulator()
    products = tuple(
        ProductGraph(
            tokens=tokens, rows=round_up(ROWS, 32), length=round_up(length, 64), weights=weights
        )
        for tokens in TOKENS
        for length in LENGTHS
        for weights in ("int4", "int8")
    )
    graphs = tuple(FfnGraph(tokens=tokens, neurons=64) for tokens in (1, 8))
    made = Bench(HexagonSpec(version="v68", ffn=SHAPE, graphs=graphs, products=products))
    yield made
    made.close()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_products_are_those_of_whole_numbers(
    bench: Bench, precision: Precision, length: int, tokens: int
) -> None:
    random = np.random.default_rng(length + tokens)
    rows = random.standard_normal((ROWS, length)).astype(np.float32)
    rows[3] = 0
    weights, scales = find_packing(precision).quantize(rows)
    inputs = random.standard_normal((max(1, tokens - 1), length)).astype(np.float32)
    inputs[0, 0] = 100  # others are small beside it
    graph = ProductGraph(
        tokens=tokens,
        rows=round_up(ROWS, 32),
        length=round_up(length, 64),
        weights=choose_weights(precision),
    )
    found = bench.multiply(graph, pack_rows(weights, scales, length, precision), inputs)
    whole, token_scales = round_tokens(inputs)
    sums, row_scales = multiply_exactly(weights, scales, length, precision, whole)
    assert np.abs(sums).max() < 2**31
    expected = sums.astype(np.float32) * (row_scales[None] * token_scales[:, None])
    np.testing.assert_array_equal(found[:, :ROWS], expected)
    np.testing.assert_array_equal(found[:, ROWS:], 0)


def test_the_largest_sums_do_not_overflow(bench: Bench) -> None:
    """All codes -8 and all inputs -127: no sum of a row's products can be larger."""
    length = 256
    weights = np.zeros((32, length // 2), np.uint8)  # a nibble of 0 stands for -8
    scales = np.ones((32, length // 32), np.float16)
    inputs = np.full((1, length), -127, np.float32)
    graph = ProductGraph(tokens=1, rows=64, length=length, weights="int4")
    found = bench.multiply(graph, pack_rows(weights, scales, length, "int4"), inputs)
    np.testing.assert_allclose(found[0, :32], 8 * 127 * length, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("first", "count"), [(0, 64), (0, 5), (32, 64), (64, 33)])
def test_the_ffn_rounds_values_and_adds_whole_numbers(
    bench: Bench, tokens: int, first: int, count: int
) -> None:
    """Up to the rounding of values to bytes everything is known; one of them may round the other
    way, where the NPU's float differs in its last bit."""
    random = np.random.default_rng(first + count + tokens)
    layout = lay_out_bundle(SHAPE.hidden, "int4")
    parts = [random.standard_normal((97, SHAPE.hidden)).astype(np.float32) for _ in range(3)]
    bundles = pack_bundles(parts[0], parts[1], parts[2], layout)
    room = 128
    arrays = pack_neurons(bundles, layout, SHAPE, room)
    inputs = random.standard_normal((tokens, SHAPE.hidden)).astype(np.float32)
    graph = FfnGraph(tokens=1 if tokens == 1 else 8, neurons=64)
    found = bench.feed_forward(graph, arrays, inputs, room, first, count)

    gate, up = multiply_inputs(bundles, layout, inputs)
    values = np.maximum(gate, 0) * np.maximum(up, 0)
    expect_sums(found, values, bundles, layout, slice(first, min(first + count, 97)))


def test_experts_may_read_what_is_weighed_and_cut_gates_and_ups() -> None:
    """As Llama 4's and gpt-oss's do."""
    require_emulator()
    options = Ffn(activation="silu", slope=1.7, limit=1.5, up_offset=1.0)
    shape = replace(SHAPE, options=options, experts=2, weighs_input=True)
    graph = FfnGraph(tokens=8, neurons=64)
    random = np.random.default_rng(5)
    layout = lay_out_bundle(shape.hidden, "int4", mixed=True)
    parts = [random.standard_normal((64, shape.hidden)).astype(np.float32) for _ in range(3)]
    packed = [find_packing("int4").quantize(part) for part in parts]
    experts = random.integers(0, 2, 64).astype(np.int32)
    bundles = assemble_bundles(packed, layout, experts=experts)
    inputs = random.standard_normal((7, shape.hidden)).astype(np.float32)
    routes = random.uniform(0.1, 0.4, (7, 2)).astype(np.float32)
    own = Bench(HexagonSpec(version="v68", ffn=shape, graphs=(graph,), products=()))
    arrays = pack_neurons(bundles, layout, shape, 64)
    found = own.feed_forward(graph, arrays, inputs, 64, 0, 64, routes)
    own.close()

    gate, up = (part * routes[:, experts] for part in multiply_inputs(bundles, layout, inputs))
    gate = np.minimum(gate, 1.5)
    values = gate / (1 + np.exp(-1.7 * gate)) * (np.clip(up, -1.5, 1.5) + 1)
    expect_sums(found, values.astype(np.float32), bundles, layout, slice(0, 64))


def multiply_inputs(bundles: U8, layout: BundleLayout, inputs: F32) -> list[F32]:
    """Products [tokens, n] of gates and of ups with rounded inputs."""
    whole, scales = round_tokens(inputs)
    products = []
    for part in range(2):
        weights, part_scales = slice_part(bundles, layout, part)
        sums, rows = multiply_exactly(weights, part_scales, layout.hidden, "int4", whole)
        products.append(sums.astype(np.float32) * (rows[None] * scales[:, None]))
    return products


def expect_sums(found: F32, values: F32, bundles: U8, layout: BundleLayout, chosen: slice) -> None:
    """The sums of the ``chosen`` neurons, whose values are rounded to bytes."""
    rounded, value_scales = round_tokens(values[:, chosen])
    down = unpack_part(bundles, layout, 2)
    columns = np.abs(down).max(axis=0) / np.float32(127)
    codes = np.clip(np.rint(down / columns), -127, 127).astype(np.int64)
    sums = rounded @ codes[chosen]
    expected = sums.astype(np.float32) * (columns[None] * value_scales[:, None])
    step = columns.max() * value_scales.max() * 127
    assert np.abs(found - expected).max() <= 1.01 * step
    assert (np.abs(found - expected) <= 1e-5 * np.abs(expected).max()).mean() > 0.9
