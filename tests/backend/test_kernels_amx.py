"""The schedule for x86-64's tiles: assembly, and the bits of the schedule without them."""

from typing import Any

import numpy as np
import pytest

from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import GROUP, Precision, scale_bytes, weight_bytes
from tests.helpers.aarch64 import generate_assembly
from tests.helpers.kernels import (
    X86_FEATURES,
    allocate,
    allocate_blocks,
    compile_kernel,
    list_runnable_isas,
    make_isa,
    make_multiply,
    make_spec,
    quantize_activations,
)
from tests.property.test_kernels_ffn import Layer

needs_tiles = pytest.mark.skipif("amx" not in list_runnable_isas(), reason="needs AMX")


@pytest.mark.parametrize("name", ["amx", "avx512vnni"])
def test_chunks_take_tiles_where_there_are_some(name: str) -> None:
    code = generate_assembly(make_spec(features=tuple(sorted(X86_FEATURES[name]))), "add_dense")
    instructions = ("ldtilecfg", "tileloadd", "tdpbssd", "tilestored", "tilerelease")
    assert all((instruction in code) == (name == "amx") for instruction in instructions)


def test_activations_that_are_not_rounded_take_none() -> None:
    features = tuple(sorted(X86_FEATURES["amx"]))
    code = generate_assembly(make_spec(features=features, planes=4, chunk_planes=4), "add_dense")
    assert "tdpbssd" not in code


def multiply(
    isa: Isa, weights: Any, scales: Any, x: Any, precision: Precision, planes: int
) -> np.ndarray[Any, Any]:
    (tokens, length), rows = x.shape, len(weights)
    arrays, _ = quantize_activations(x, planes)
    blocks = allocate_blocks(isa, 2, tokens, length, planes)
    y = allocate("float32", tokens, rows)
    kernel = compile_kernel(make_multiply(isa, length, precision, planes, 2), isa)
    kernel(rows, tokens, weights, scales, *arrays, *blocks, y)
    return y


@needs_tiles
@pytest.mark.parametrize(
    ("length", "rows", "tokens", "precision", "planes"),
    [
        # Two blocks of 16 groups and one each of 8, 4, 2 and 1.
        *((1504, 33, 35, precision, 2) for precision in ("int4", "int8", "mxfp4", "ternary")),
        *((96, 70, 33, precision, 1) for precision in ("int4", "int8", "mxfp4", "ternary")),
        # Fewer rows than a tile has; several steps of rows, and tokens that just fill their tiles.
        *((32, 5, 49, "int4", planes) for planes in (1, 2)),
        *((512, 150, 48, "int4", planes) for planes in (1, 2)),
    ],
)
def test_products_have_the_bits_of_the_schedule_without_tiles(
    length: int, rows: int, tokens: int, precision: Precision, planes: int
) -> None:
    rng = np.random.default_rng(length)
    weights = rng.integers(0, 256, (rows, weight_bytes(length, precision)), np.uint8)
    if precision == "mxfp4":
        scales = rng.integers(120, 131, (rows, length // GROUP)).astype(np.uint8)
    elif precision == "ternary":
        # No field of two bits is 3.
        weights &= ~((weights & 0x55) & ((weights >> 1) & 0x55))
        scales = rng.random((rows, 1)).astype(np.float32).view(np.uint8)
    else:
        scales = rng.random((rows, length // GROUP)).astype(np.float16).view(np.uint8)
    assert scales.nbytes == rows * scale_bytes(length, precision)
    x = (rng.standard_normal((tokens, length)) * 30).astype(np.float32)
    found, expected = (
        multiply(make_isa(name), weights, scales, x, precision, planes)
        for name in ("amx", "avx512vnni")
    )
    assert expected.any()
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))


@needs_tiles
@pytest.mark.parametrize("activation", ["drelu", "silu"])
@pytest.mark.parametrize("planes", [1, 2])
def test_dense_ffn_has_the_bits_of_the_schedule_without_tiles(activation: str, planes: int) -> None:
    def compute(name: str) -> Any:
        spec: KernelSpec = make_spec(
            hidden=352,
            activation=activation,
            planes=planes,
            chunk_planes=planes,
            features=tuple(sorted(X86_FEATURES[name])),
        )
        return Layer(spec, 300, 37, 3).compute_dense(3, 280)

    assert np.array_equal(compute("amx").view(np.int32), compute("avx512vnni").view(np.int32))
