"""Numbers of MXFP4 are kept as they are; others are rounded as the format's specification says."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.formats import find_packing
from pi2.formats.micro_floats import find_codes
from pi2.plan.weights.bundles import assemble_bundles, join_scales, split_scales, unpack_part
from pi2.plan.weights.layout import lay_out_bundle

MXFP4 = find_packing("mxfp4")


def round_numbers(values: list[float]) -> F32:
    """What a group that begins with ``values`` becomes."""
    group = np.zeros((1, 32), np.float32)
    group[0, : len(values)] = values
    codes, exponents = find_codes(group, axis=1)
    return (MXFP4.take_numbers(codes) * MXFP4.take_scales(exponents)[:, None])[0, : len(values)]


@pytest.mark.parametrize("length", [32, 96, 544, 2880])
@pytest.mark.parametrize("spread", [False, True])
def test_what_is_mxfp4_already_stays_what_it_is(length: int, spread: bool) -> None:
    rng = np.random.default_rng(length)
    codes = rng.integers(0, 16, (64, length)).astype(np.int8)
    # Groups of small codes only, too.
    codes[:, :32] &= 3
    shape = (2, 1, length) if spread else (64, length // 32, 1)
    units = MXFP4.take_scales(rng.integers(1, 251, shape).astype(np.uint8))
    groups = (2, 32, length) if spread else (64, length // 32, 32)
    rows = (MXFP4.take_numbers(codes).reshape(groups) * units).reshape(64, length)
    packed = MXFP4.quantize(rows, spread=spread)
    assert np.array_equal(MXFP4.dequantize(*packed, length, spread=spread), rows)


def test_ties_go_to_even_codes() -> None:
    numbers = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0, 12.0]
    assert round_numbers(numbers).tolist() == [0, 2, 2, 4, 4, 8, 8, 12]
    assert round_numbers([-n for n in numbers]).tolist() == [0, -2, -2, -4, -4, -8, -8, -12]


def test_what_passes_the_largest_code_becomes_that() -> None:
    assert round_numbers([15.9, 1.0]).tolist() == [12, 1]
    assert round_numbers([16.0, 1.0]).tolist() == [16, 0]


def test_zeros_and_numbers_too_small_for_a_unit_are_zeros() -> None:
    assert round_numbers([0.0, -0.0]).tolist() == [0, 0]
    assert round_numbers([1e-39, -1e-40]).tolist() == [0, 0]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        round_numbers([1.0, number])


@pytest.mark.parametrize("gated", [False, True])
def test_scales_of_downs_are_taken_out_and_put_back(gated: bool) -> None:
    rng = np.random.default_rng(0)
    hidden, neurons = 128, 96
    layout = lay_out_bundle(hidden, "mxfp4", gated=gated, mixed=True, scales="resident")
    rows = [rng.standard_normal((neurons, hidden)).astype(np.float32) for _ in layout.parts]
    packed = [
        MXFP4.quantize(own, spread=part.spread)
        for own, part in zip(rows, layout.parts, strict=True)
    ]
    whole = assemble_bundles(packed, layout.inline, None, np.arange(neurons, dtype=np.int32) // 32)
    bundles, scales = split_scales(whole, layout)
    assert scales.shape == (neurons, hidden // 32)
    # 4.25 bits a weight, and the number of the expert.
    assert layout.neuron_bytes - 4 == len(rows) * hidden * 17 // 32
    wanted = np.array([70, 3, 33])
    joined = join_scales(bundles[wanted], scales, layout, wanted)
    assert np.array_equal(joined, whole[wanted])
    found = unpack_part(joined, layout.inline, len(layout.parts) - 1)
    assert np.abs(found - rows[-1][wanted]).max() < 0.5
