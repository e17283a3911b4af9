"""Predictors and the embedding, against numpy."""

from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.backends.reference.neurons import activate
from pi2.formats import find_packing
from pi2.plan.weights.layout import Precision
from tests.helpers.kernels import (
    allocate,
    allocate_activations,
    compile_program,
    make_spec,
    quantize_activations,
)
from tests.helpers.models import make_model


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_the_low_rank_predictor_lists_scores_from_the_threshold_on(precision: Precision) -> None:
    rng = np.random.default_rng(0)
    hidden, rank, neurons = 320, 96, 333
    spec = make_spec(hidden=hidden, predictor=precision, ranks=(rank,))
    packing = find_packing(precision)
    inner = packing.quantize(rng.standard_normal((rank, hidden)).astype(np.float32))
    outer = packing.quantize(rng.standard_normal((neurons, rank)).astype(np.float32))
    bias = rng.standard_normal(neurons).astype(np.float32)
    u = rng.standard_normal((1, hidden)).astype(np.float32)
    arrays, _ = quantize_activations(u, 2)
    # Whole lines of 16 scores and indices.
    scores, indices = allocate("float32", 336), allocate("int32", 336)
    found = allocate("int32", 1)
    kernel = compile_program(f"predict_low_rank_{rank}", spec)
    middle = allocate_activations(1, rank, 2)
    parts = [
        part.view(np.uint8) if part is not None else weights
        for weights, scales in (inner, outer)
        for part in (weights, scales)
    ]
    parts.append(allocate("uint8", 4 + 4 * neurons)[4:])  # an expert's biases are unaligned
    parts[-1][:] = bias.view(np.uint8)
    kernel(neurons, 3.0, 0, 1, *arrays, *parts, *middle, scores, indices, found)
    plain = [packing.dequantize(*pair, size) for pair, size in ((inner, hidden), (outer, rank))]
    expected = plain[1] @ np.maximum(plain[0] @ u[0], 0) + bias
    assert np.allclose(scores[:neurons], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    # The list is that of the kernel's own scores, exactly and in order.
    assert np.array_equal(indices[: found[0]], np.flatnonzero(scores[:neurons] >= np.float32(3.0)))
    assert 0 < found[0] < neurons


NEURONS = 203


def draw_gates() -> tuple[list[Any], list[Any], F32]:
    """Gate rows and inputs of 160 elements, lists in whole lines of 16, and what gates are."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((NEURONS, 160)).astype(np.float32)
    weights, scales = find_packing("int4").quantize(rows)
    u = rng.standard_normal((1, 160)).astype(np.float32) * 0.1
    arrays, stands_for = quantize_activations(u, 2)
    assert scales is not None
    gates = stands_for[0] @ find_packing("int4").dequantize(weights, scales, 160).T
    lists = [allocate("float32", 208), allocate("int32", 208), allocate("int32", 1)]
    return [weights, scales.view(np.uint8), *arrays], lists, gates.astype(np.float32)


@pytest.mark.parametrize(("activation", "limit"), [("drelu", 0.0), ("relu", 0.0), ("fatrelu", 0.3)])
def test_the_gate_predictor_lists_open_gates(activation: str, limit: float) -> None:
    given, lists, gates = draw_gates()
    _, indices, found = lists
    spec = make_spec(hidden=160, activation=activation, threshold=limit)
    kernel = compile_program("predict_gate", spec)
    kernel(NEURONS, 0, 1, *given, *lists)
    assert np.array_equal(indices[: found[0]], np.flatnonzero(gates > limit))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gate_predictor_of_smooth_activations_lists_those_that_reach_limit(activation: str) -> None:
    given, lists, gates = draw_gates()
    scores, indices, found = lists
    kernel = compile_program("predict_gate", make_spec(hidden=160, activation=activation))
    model = make_model({"ffn": {"activation": activation}, "predictor": None})
    expected = activate(model, gates, None)
    counts = []
    for limit in (0.0, 0.05, 0.3, 1e9):
        kernel(NEURONS, limit, 0, 1, *given, *lists)
        assert np.allclose(scores[:NEURONS], expected, atol=3e-6)
        listed = np.abs(scores[:NEURONS]) >= np.float32(limit)
        assert np.array_equal(indices[: found[0]], np.flatnonzero(listed))
        counts.append(int(found[0]))
    assert counts[0] == NEURONS > counts[1] > counts[2] > counts[3] == 0
