"""Bundles of synthetic neurons."""

from __future__ import annotations

import math

import numpy as np

from pi2.arrays import F32, U8, Raw, Scales
from pi2.formats import find_packing
from pi2.formats.micro_floats import MAGNITUDES
from pi2.plan.weights.layout import GROUP, BundleLayout, Precision, weight_bytes
from synthesis.blueprint import CONSTANT, DOWN, FACTORS, UP, Blueprint
from synthesis.randomness import (
    draw_bits,
    draw_int4_pairs,
    draw_int8,
    draw_normals,
    draw_ternary,
    measure_int4_deviation,
    measure_int8_deviation,
    measure_ternary_deviation,
)

CHUNK_WEIGHTS = 2**22
"""Weights of one matrix that are made together."""

_SCALE_SPREAD = 0.2
_TERNARY_ROUNDS = 4


def count_chunk_neurons(hidden: int) -> int:
    """Neurons of a chunk; random numbers are drawn by chunk, so it never changes."""
    return max(1, CHUNK_WEIGHTS // hidden)


def make_bundles(
    blueprint: Blueprint, layer: int, chunk: int, directions: F32, layout: BundleLayout
) -> U8:
    """Bundles uint8 [n, stride] of the neurons of ``chunk``; ``directions`` are the layer's B."""
    first, count = locate_chunk(blueprint, chunk)
    bundles = np.zeros((count, layout.stride), np.uint8)
    key = (layer, chunk)
    # Where neurons have no gate, the up row decides when they fire.  Biases stay zero.
    gates = make_gates(blueprint, layer, chunk, directions)
    vectors: list[tuple[U8, Raw | None]] = [find_packing(layout.precision).quantize(gates)]
    if blueprint.model.ffn.activation == "drelu":
        factors = draw_factors(blueprint, layer, chunk)
        vectors.append(
            scale_groups(*find_packing(layout.precision).quantize(gates), factors, layout.precision)
        )
    elif layout.is_gated:
        deviation = 1 / math.sqrt(layout.hidden)
        vectors.append(draw_part(count, layout, 1, deviation, *blueprint.key(UP, *key)))
    deviation = blueprint.find_output_deviation()
    vectors.append(draw_part(count, layout, -1, deviation, *blueprint.key(DOWN, *key)))
    for part, (weights, scales) in zip(layout.parts, vectors, strict=True):
        bundles[:, part.weights_offset : part.weights_offset + weights.shape[1]] = weights
        if scales is not None:
            packed = scales.view(np.uint8)
            bundles[:, part.scales_offset : part.scales_offset + packed.shape[1]] = packed
    if layout.factor_offset is not None:
        ones = np.ones((count, 1), "<f4").view(np.uint8)
        bundles[:, layout.factor_offset : layout.factor_offset + 4] = ones
    if layout.expert_offset is not None:
        experts = blueprint.list_experts(first, count).astype("<i4").view(np.uint8)
        bundles[:, layout.expert_offset : layout.expert_offset + 4] = experts.reshape(-1, 4)
    return bundles


def locate_chunk(blueprint: Blueprint, chunk: int) -> tuple[int, int]:
    """First neuron and number of neurons of ``chunk``."""
    neurons, size = blueprint.model.layer_neurons, count_chunk_neurons(blueprint.model.shape.hidden)
    first = chunk * size
    return first, min(size, neurons - first)


def count_chunks(blueprint: Blueprint) -> int:
    """Chunks of a layer."""
    return -(-blueprint.model.layer_neurons // count_chunk_neurons(blueprint.model.shape.hidden))


def make_gates(blueprint: Blueprint, layer: int, chunk: int, directions: F32) -> F32:
    """Gate rows float32 [n, hidden]: b c / (a hidden) + A B, before rounding."""
    first, count = locate_chunk(blueprint, chunk)
    loadings, lengths = blueprint.draw_loadings(layer, chunk, count)
    rows = loadings @ directions
    rows *= lengths * np.float32(blueprint.direction_scale)
    biases = find_gate_biases(blueprint)[first : first + count, None]
    constant = blueprint.draw_constant() / np.float32(CONSTANT * blueprint.model.shape.hidden)
    rows += biases * constant
    if blueprint.model.quantization.ffn == "ternary":
        return round_to_ternary(rows, constant)
    return rows


def round_to_ternary(rows: F32, constant: F32) -> F32:
    """Rows float32 [n, hidden] of three numbers each, as long as ``rows`` are, whose products with
    ``constant`` [hidden] are those of ``rows``, as near as whole numbers come to it.

    Rounding alone makes errors of these products that are as large as those of all others, by
    which neurons would fire more or less often than their place in the order says.
    """
    wanted = rows @ constant
    lengths = np.sqrt(np.einsum("nh,nh->n", rows, rows))
    moved, unit = rows, constant / np.float32(constant @ constant)
    for _ in range(_TERNARY_ROUNDS):
        rounded = round_rows(moved, "ternary")
        rounded *= (lengths / np.sqrt(np.einsum("nh,nh->n", rounded, rounded)))[:, None]
        moved = moved + (wanted - rounded @ constant)[:, None] * unit
    return rounded


def find_gate_biases(blueprint: Blueprint) -> F32:
    """b of every neuron of a layer, float32 [neurons]: what its gate is on average, threshold
    included."""
    threshold = 0.0
    if blueprint.model.ffn.activation == "fatrelu":
        threshold = blueprint.model.ffn.threshold
    biases = blueprint.layer_biases + blueprint.tuning.shift + threshold
    return biases.astype(np.float32)


def draw_factors(blueprint: Blueprint, layer: int, chunk: int) -> F32:
    """Factors [n, groups] that make an up row out of a gate row, group by group: with mean 1 and
    deviation f, the product of up and u is the gate's plus a random part of deviation f."""
    _, count = locate_chunk(blueprint, chunk)
    groups = blueprint.model.shape.hidden // GROUP
    normals = draw_normals((count, groups), *blueprint.key(FACTORS, layer, chunk))
    # Log-normal: a quantiser's scales are never negative.
    width = math.log(1 + blueprint.factor_deviation**2)
    factors: F32 = np.exp(normals * np.float32(math.sqrt(width)) - np.float32(width / 2))
    return factors


def scale_groups(
    weights: U8, scales: Scales | None, factors: F32, precision: Precision
) -> tuple[U8, Scales | None]:
    """Multiply groups of packed vectors with ``factors`` [n, groups]."""
    if scales is not None:
        return weights, (scales.astype(np.float32) * factors).astype("<f2")
    assert precision == "fp16"
    values = weights.view("<f2").astype(np.float32) * np.repeat(factors, GROUP, axis=1)
    return find_packing(precision).quantize(values)


def draw_part(
    count: int, layout: BundleLayout, index: int, deviation: float, *key: int
) -> tuple[U8, Raw | None]:
    """Random packed vectors [count, hidden] of a part of neurons."""
    if layout.precision == "mxfp4":
        return draw_mxfp4(count, layout.hidden, deviation, *key, spread=layout.parts[index].spread)
    return draw_vectors(count, layout.hidden, layout.precision, deviation, *key)


def draw_mxfp4(count: int, length: int, deviation: float, *key: int, spread: bool) -> tuple[U8, U8]:
    """Random packed vectors [count, length] of mxfp4, any code as often as any other; where
    exponents are ``spread``, all neurons of the matrix share them, in whatever order they are."""
    weights = draw_bits(-(-count * length // 4), *key, 0).view(np.uint8)[: count * length // 2]
    wanted = (deviation / math.sqrt(np.mean(np.square(MAGNITUDES)))) ** 2
    low = math.floor(math.log2(wanted) / 2)
    # Two powers of two, as often as gives the deviation.
    often = (wanted / 4.0**low - 1) / 3
    shape = (1, length) if spread else (count, length // GROUP)
    # Without the chunk, whose neurons share them with those of others.
    drawn = draw_bits(int(np.prod(shape)), *(key[:-1] if spread else key), 1)
    exponents = (127 + low + (drawn < often * 65536)).astype(np.uint8).reshape(shape)
    packed = weights.reshape(count, -1)
    if not spread:
        return packed, exponents
    return packed, np.repeat(find_packing("int8").pack(exponents.view(np.int8)), count, axis=0)


def round_rows(rows: F32, precision: Precision) -> F32:
    """What a store has of gate rows [n, hidden]."""
    length = rows.shape[1]
    return find_packing(precision).dequantize(*find_packing(precision).quantize(rows), length)


def draw_vectors(
    count: int, length: int, precision: Precision, deviation: float, *key: int
) -> tuple[U8, Scales | None]:
    """Random packed vectors [count, length] of mean 0 and the given deviation.

    Codes are drawn as bytes: nothing is rounded, so this takes no longer than writing them.
    """
    size = weight_bytes(length, precision)
    if precision == "fp16":
        values = draw_normals((count, length), *key, 0) * np.float32(deviation)
        return find_packing(precision).quantize(values)
    if precision == "ternary":
        weights = draw_ternary(count * size, *key, 0).reshape(count, size)
        # One scale for all rows, as BitNet's matrices have.
        return weights, np.full((count, 1), deviation / measure_ternary_deviation(), "<f4")
    if precision == "int4":
        weights = draw_int4_pairs(count * size, *key, 0)
        steps = measure_int4_deviation()
    else:
        weights = draw_int8(count * size, *key, 0)
        steps = measure_int8_deviation()
    spread = draw_bits(count * length // GROUP, *key, 1).astype(np.float32) / 65536 - 0.5
    scales = np.float32(deviation / steps) * (1 + np.float32(2 * _SCALE_SPREAD) * spread)
    return weights.reshape(count, size), scales.astype("<f2").reshape(count, length // GROUP)
