"""Packed matrices times activations, for shapes, precisions and schedules of every kind."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi2.backends.blocks.room import make_tables
from pi2.formats import find_format, find_packing, name_packings
from pi2.plan.weights.layout import Precision
from tests.helpers.blocks import make_blocks, put_edges
from tests.helpers.kernels import (
    align,
    allocate,
    allocate_activations,
    compile_kernel,
    list_runnable_isas,
    make_isa,
    make_multiply,
    measure_error,
    put_in_lane_order,
    quantize_activations,
)

LENGTHS = st.sampled_from([32, 64, 96, 160, 256, 320, 480, 512, 544, 1024, 1504])
PRECISIONS = st.sampled_from(["int4", "int8", "fp16", "ternary"])


@pytest.mark.parametrize("isa", list_runnable_isas())
@settings(max_examples=6)
@given(
    length=LENGTHS, precision=PRECISIONS, planes=st.sampled_from([1, 2, 4]),
    threads=st.sampled_from([1, 3]), rows=st.integers(1, 150), tokens=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_a_product_is_what_float64_says_of_the_same_codes(
    isa: str, length: int, precision: Precision, planes: int, threads: int, rows: int, tokens: int,
    seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    weights, scales = find_packing(precision).quantize(
        rng.standard_normal((rows, length)).astype(np.float32)
    )
    x = (rng.standard_normal((tokens, length)) * 10 ** rng.uniform(-3, 3)).astype(np.float32)
    arrays, stands_for = quantize_activations(x, planes)
    y = allocate("float32", tokens, rows)
    schedule = make_isa(isa)
    kernel = compile_kernel(make_multiply(schedule, length, precision, planes, threads), schedule)
    packed_scales = weights if scales is None else align(scales)
    kernel(rows, tokens, weights, packed_scales.view(np.uint8).copy(), *arrays, y)
    plain = find_packing(precision).dequantize(weights, scales, length).astype(np.float64)
    inputs = x.astype(np.float64) if precision == "fp16" else stands_for
    # Relative to the largest sum of magnitudes: products may cancel.
    magnitude = float((np.abs(inputs) @ np.abs(plain).T).max())
    assert np.abs(y - inputs @ plain.T).max() <= 1e-6 * magnitude


@pytest.mark.parametrize(
    ("isa", "precision"),
    [
        *((list_runnable_isas()[-1], name) for name in name_packings("gates") if name != "int4"),
        *product(list_runnable_isas()[:-1], ("q5_k", "q6_k", "iq2_xs", "q5_1")),
    ],
)
def test_blocks_of_files_meet_values_that_are_not_rounded(isa: str, precision: Precision) -> None:
    rng = np.random.default_rng(3)
    rows, tokens, length = 9, 5, 512
    own = find_format(precision)
    weights = make_blocks(own, rows * length // own.block, rng).reshape(rows, -1)
    put_edges(own, weights)
    x = rng.standard_normal((tokens, length)).astype(np.float32)
    schedule = make_isa(isa)
    kernel = compile_kernel(make_multiply(schedule, length, precision, 1, 2), schedule)
    arrays, _ = quantize_activations(x, 1)
    y = allocate("float32", tokens, rows)
    kernel(rows, tokens, weights, make_tables(precision), *arrays, y)
    plain = own.decode(weights).reshape(rows, length).astype(np.float64)
    wrong = np.abs(y - x.astype(np.float64) @ plain.T)
    assert (wrong <= 1e-6 * (np.abs(x) @ np.abs(plain).T) + 1e-30).all()


@pytest.mark.parametrize("isa", list_runnable_isas())
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_the_largest_codes_do_not_overflow(isa: str, precision: Precision) -> None:
    # Every weight and every activation at its extreme, all products of one sign.
    length = 512
    lowest = -8 if precision == "int4" else -127
    rows = np.full((2, length), lowest, np.float32)
    rows[1] = 7 if precision == "int4" else 127
    weights, scales = find_packing(precision).quantize(rows)
    x = np.full((2, length), -1.0, np.float32)
    x[1] = 1.0
    arrays, stands_for = quantize_activations(x, 2)
    y = allocate("float32", 2, 2)
    assert scales is not None
    kernel = compile_kernel(make_multiply(make_isa(isa), length, precision, 2, 1), make_isa(isa))
    kernel(2, 2, weights, scales.view(np.uint8), *arrays, y)
    plain = find_packing(precision).dequantize(weights, scales, length).astype(np.float64)
    assert measure_error(y, stands_for @ plain.T) < 1e-6


@pytest.mark.parametrize("planes", [1, 2, 4])
@pytest.mark.parametrize("isa", list_runnable_isas())
def test_one_token_gives_the_same_bits_as_many(isa: str, planes: int) -> None:
    rng = np.random.default_rng(5)
    rows, tokens, length = 33, 35, 352
    weights, scales = find_packing("int4").quantize(
        rng.standard_normal((rows, length)).astype(np.float32)
    )
    x = rng.standard_normal((tokens, length)).astype(np.float32)
    assert scales is not None
    kernel = compile_kernel(make_multiply(make_isa(isa), length, "int4", planes, 2), make_isa(isa))
    together, alone = allocate("float32", tokens, rows), allocate("float32", tokens, rows)
    arrays, _ = quantize_activations(x, planes)
    kernel(rows, tokens, weights, scales.view(np.uint8), *arrays, together)
    for token in range(tokens):
        arrays, _ = quantize_activations(x[token : token + 1], planes)
        row = allocate("float32", 1, rows)
        kernel(rows, 1, weights, scales.view(np.uint8), *arrays, row)
        alone[token] = row
    assert np.array_equal(together, alone)


@settings(max_examples=5)
@given(
    length=LENGTHS,
    planes=st.sampled_from([1, 2]),
    tokens=st.integers(1, 5),
    exponent=st.floats(-6, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantisation_is_that_of_numpy(
    length: int, planes: int, tokens: int, exponent: float, seed: int
) -> None:
    isa = list_runnable_isas()[-1]
    rng = np.random.default_rng(seed)
    arrays = allocate_activations(tokens, length, planes)
    arrays[3][:] = rng.standard_normal((tokens, length)) * 10**exponent
    arrays[3][0, :32] = 0
    compile_kernel(make_quantize(length, planes), make_isa(isa))(tokens, *arrays)
    # Equal but where two roundings meet half-way.
    expected, _ = quantize_activations(arrays[3].copy(), planes)
    wholes = [join_planes(part[0]) for part in (arrays, expected)]
    assert np.abs(wholes[0] - wholes[1]).max() <= 1
    assert np.allclose(arrays[1], expected[1], rtol=1e-6, atol=0)
    assert np.array_equal(arrays[2], -8 * sum_groups(arrays[0], length))
    assert not arrays[0][0, :, unpack_order(length)[:32]].any()


@pytest.mark.parametrize("length", [32, 480, 1504])
def test_activations_that_are_not_rounded_are_brought_into_lane_order(length: int) -> None:
    tokens = 3
    rng = np.random.default_rng(length)
    arrays = allocate_activations(tokens, length, 4)
    arrays[3][:] = rng.standard_normal((tokens, length))
    kernel = compile_kernel(make_quantize(length, 4), make_isa(list_runnable_isas()[-1]))
    kernel(tokens, *arrays)
    found = arrays[0].view(np.float32).reshape(tokens, length)
    assert np.array_equal(found, put_in_lane_order(arrays[3]))


def join_planes(codes: Any) -> Any:
    """[tokens, planes, length] int8 -> the integers that they stand for."""
    wide = codes.astype(np.int64)
    return wide[:, 0] * 256 + wide[:, 1] if codes.shape[1] == 2 else wide[:, 0]


def unpack_order(length: int) -> Any:
    """Place in the packed vector of each element."""
    from pi2.plan.weights.layout import split_lanes

    order = np.empty(length, np.int64)
    group = 0
    for lanes in split_lanes(length):
        for lane in range(lanes):
            for element in range(32):
                chunk, byte = divmod(element, 4)
                place = group * 32 + chunk * 4 * lanes + 4 * lane + byte
                order[(group + lane) * 32 + element] = place
        group += lanes
    return order


def sum_groups(codes: Any, length: int) -> Any:
    """Sums of each group of 32 of the integers."""
    return join_planes(codes)[:, unpack_order(length)].reshape(len(codes), -1, 32).sum(-1)


@functools.cache
def make_quantize(length: int, planes: int) -> Callable[[Any], None]:
    """A kernel (tokens; activations), which have their values."""
    from pi2.backends.kernels.matrix import emit_quantize
    from pi2.backends.kernels.schedule import emit_each_token, take_activations

    def emit(take: Any) -> None:
        tokens = take.take_number("tokens")
        target = take_activations(take, "target", length, planes, tokens)
        emit_each_token(tokens, lambda token: emit_quantize(target, token))

    return emit
