"""The packed layout and the quantisers do what `layout` and `packing` in `pi2.plan.weights` say."""

from itertools import product

import numpy as np
import pytest

from pi2.formats import find_packing
from pi2.plan.weights.bundles import slice_part
from pi2.plan.weights.layout import GROUP, Precision, lay_out_bundle, split_lanes
from tests.helpers.bundles import pack_bundles, unpack_bundles

LENGTHS = [32, 64, 96, 160, 480, 512, 544, 736, 1024, 1280]


def draw_codes(length: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(length).integers(low, high + 1, (3, length)).astype(np.int8)


def draw_rows(count: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, length), dtype=np.float32)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("precision", "lowest", "chunks"), [("int4", -8, 4), ("int8", -128, 8)])
def test_bytes_of_a_lane_hold_elements_4c_b_and_those_16_later(
    precision: Precision, lowest: int, chunks: int, length: int
) -> None:
    """An int4 byte holds two elements, an int8 byte one."""
    codes = draw_codes(length, max(lowest, -127), -lowest - 1)
    packed = find_packing(precision).pack(codes).astype(int)
    first_group = 0
    for lanes in split_lanes(length):
        for lane, chunk, byte in product(range(lanes), range(chunks), range(4)):
            group = codes[:, (first_group + lane) * GROUP : (first_group + lane + 1) * GROUP]
            place = first_group * 4 * chunks + chunk * 4 * lanes + 4 * lane + byte
            value, element = packed[:, place], 4 * chunk + byte
            if precision == "int4":
                assert (value % 16 - 8 == group[:, element]).all()
                assert (value // 16 - 8 == group[:, 16 + element]).all()
            else:
                assert (value.astype(np.int8) == group[:, element]).all()
        first_group += lanes


@pytest.mark.parametrize(("precision", "top"), [("int4", 7), ("int8", 127)])
def test_scale_is_the_largest_magnitude_over_top_in_fp16(precision: Precision, top: int) -> None:
    rows = draw_rows(5, 96)
    _, scales = find_packing(precision).quantize(rows)
    assert scales is not None
    peaks = np.abs(rows.reshape(5, 3, GROUP)).max(axis=2)
    np.testing.assert_array_equal(scales, (peaks / np.float32(top)).astype(np.float16))


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_ties_go_to_the_even_code(precision: Precision) -> None:
    top = 7 if precision == "int4" else 127
    rows = np.zeros((1, 32), np.float32)
    rows[0, :5] = [top, 0.5, 1.5, 2.5, -2.5]
    weights, _ = find_packing(precision).quantize(rows)
    assert find_packing(precision).unpack(weights, 32)[0, :5].tolist() == [top, 0, 2, 2, -2]


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("tiny", [0.0, 1e-9])
def test_group_without_scale_is_zero(precision: Precision, tiny: float) -> None:
    rows = np.full((2, 64), tiny, np.float32)
    rows[:, 32:] = 1.0
    weights, scales = find_packing(precision).quantize(rows)
    assert scales is not None and (scales[:, 0] == 0).all()
    assert (find_packing(precision).unpack(weights, 64)[:, :32] == 0).all()
    np.testing.assert_allclose(
        find_packing(precision).dequantize(weights, scales, 64)[:, 32:], 1, rtol=1e-3
    )


@pytest.mark.parametrize(("precision", "large"), [("int4", 1e6), ("int8", 1e8), ("fp16", 1e5)])
def test_weight_that_is_not_finite_or_beyond_fp16_is_refused(
    precision: Precision, large: float
) -> None:
    rows = draw_rows(2, 32)
    for value in (np.nan, np.inf, -np.inf, large):
        rows[1, 7] = value
        message = "does not fit into fp16" if value == large else "not a finite number"
        with pytest.raises(ValueError, match=message):
            find_packing(precision).quantize(rows)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
@pytest.mark.parametrize("hidden", [32, 96, 256, 544])
def test_bundle_holds_gate_up_down_and_zero_padding(hidden: int, precision: Precision) -> None:
    layout = lay_out_bundle(hidden, precision, stride=8192)
    gate, up, down = (draw_rows(6, hidden, seed) for seed in range(3))
    bundles = pack_bundles(gate, up, down, layout)
    assert bundles.shape == (6, 8192)
    assert (bundles[:, layout.used_bytes :] == 0).all()
    for index, rows in enumerate((gate, up, down)):
        weights, scales = find_packing(precision).quantize(rows)
        stored_weights, stored_scales = slice_part(bundles, layout, index)
        np.testing.assert_array_equal(stored_weights, weights)
        if scales is None:
            assert stored_scales is None
        else:
            assert stored_scales is not None
            np.testing.assert_array_equal(stored_scales, scales)
        restored = unpack_bundles(bundles, layout)[index]
        np.testing.assert_array_equal(
            restored, find_packing(precision).dequantize(weights, scales, hidden)
        )
