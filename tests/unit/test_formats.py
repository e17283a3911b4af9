"""Number formats: what is known of each, and how weights are encoded."""

import subprocess
import sys

import gguf
import numpy as np
import pytest

from pi2.arrays import F32, U8
from pi2.formats import Format, find_format, list_formats
from pi2.formats.integers import BitCodes

FORMATS = pytest.mark.parametrize(
    "own", [own for own in list_formats().values() if own.number >= 0], ids=lambda own: own.name
)
"""Formats of files: stores have one more."""


def make_edges(own: Format) -> U8:
    """Blocks of zeros, of ones, with the largest scales, with the smallest, and random ones."""
    generator = np.random.default_rng(7)
    count = 64
    raw = generator.integers(0, 256, (count, max(own.block_bytes, 4)), np.uint8)
    raw[0], raw[1] = 0, 255
    for number, bits in enumerate((0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x03FF, 0x3C00)):
        for place in own.halves:
            raw[2 + number, place] = bits & 255
            raw[2 + number, place + 1] = bits >> 8
    return raw


def test_bits_are_numbers_in_their_order_as_llama_cpp_decodes_them() -> None:
    for name, number, block, each in (
        ("q1_0", 41, 128, 8),
        ("q2_0", 42, 64, 4),
        ("pq2_0", 142, 128, 4),
    ):
        own = find_format(name)
        assert (own.number, own.block, own.block_bytes) == (number, block, 2 + block // each)
        raw = np.random.default_rng(number).integers(0, 256, (3, own.block_bytes), np.uint8)
        raw[:, :2] = np.array([[0.5], [-2.0], [3.0]], "<f2").view(np.uint8)
        for scale, row, found in zip((0.5, -2.0, 3.0), raw[:, 2:], own.decode(raw), strict=True):
            bits = [int(row[n // each]) >> n % each * (8 // each) for n in range(block)]
            numbers = [2 * (b & 1) - 1 for b in bits] if each == 8 else [(b & 3) - 1 for b in bits]
            assert found.tolist() == [scale * number for number in numbers]


@pytest.mark.parametrize(
    "own",
    [own for own in list_formats().values() if own.number >= 0 and not isinstance(own, BitCodes)],
    ids=lambda own: own.name,
)
def test_decoding_equals_that_of_the_gguf_package(own: Format) -> None:
    kind = gguf.GGMLQuantizationType(own.number)
    assert kind.name.lower() == own.name
    assert gguf.GGML_QUANT_SIZES[kind] == (own.block, own.block_bytes)
    raw = make_edges(own)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
    found = own.decode(raw)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), np.asarray(expected).view(np.uint32))


def test_every_type_of_weights_is_there() -> None:
    kinds = {kind.name.lower() for kind in gguf.GGMLQuantizationType}
    # Whole numbers, and what only activations have.
    others = {"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k"}
    assert kinds - others <= set(list_formats())


@FORMATS
def test_blocks_with_finite_scales_have_no_fault(own: Format) -> None:
    assert not own.find_faults(np.zeros((3, 8 * own.block_bytes), np.uint8)).any()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7FFF])
@pytest.mark.parametrize(
    "own", [own for own in list_formats().values() if own.halves], ids=lambda own: own.name
)
def test_scales_that_are_not_finite_are_found(own: Format, bits: int) -> None:
    for place in own.halves:
        raw = np.zeros((2, 3 * own.block_bytes), np.uint8)
        raw[1, own.block_bytes + place] = bits & 255
        raw[1, own.block_bytes + place + 1] = bits >> 8
        assert own.find_faults(raw).tolist() == [[False] * 3, [False, True, False]]


def test_spread_scales_that_are_not_finite_are_found() -> None:
    own = find_format("iq1_m")
    for bits, is_fault in ((0x7C00, True), (0xFE01, True), (0x7BFF, False), (0x3C00, False)):
        raw = np.zeros((1, own.block_bytes), np.uint8)
        for number in range(4):
            raw[0, 49 + 2 * number] = (bits >> (4 * number) & 15) << 4
        assert own.find_faults(raw).item() is is_fault
        assert np.isfinite(own.decode(raw)).all().item() is not is_fault


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_numbers_that_are_not_finite_are_found(name: str) -> None:
    own = find_format(name)
    raw = np.zeros((1, 4 * own.block_bytes), np.uint8)
    raw[0, 3 * own.block_bytes - 2 : 3 * own.block_bytes] = 0x80, 0x7F
    if name == "f16":
        raw[0, 3 * own.block_bytes - 1] = 0x7C
    assert own.find_faults(raw).tolist() == [[False, False, True, False]]


def test_scales_of_micro_floats_have_a_code_for_no_number() -> None:
    raw = np.zeros((1, 17), np.uint8)
    raw[0, 0] = 255
    assert find_format("mxfp4").find_faults(raw).all()
    raw = np.zeros((1, 36), np.uint8)
    raw[0, 3] = 0x7F
    assert find_format("nvfp4").find_faults(raw).all()


def test_names_and_sizes_need_no_numpy() -> None:
    code = "import sys, pi2.formats as f; f.list_formats(); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ENCODED = [name for name, own in list_formats().items() if own.can_encode]
BOUNDS = {
    "f32": 0.0, "f16": 5e-4, "bf16": 4e-3, "q8_0": 0.005, "q6_k": 0.018, "q5_k": 0.036,
    "q5_1": 0.035, "q5_0": 0.042, "q4_k": 0.073, "q4_1": 0.072, "q4_0": 0.083,
    "mxfp4": 0.114,
}  # fmt: skip
"""Root of the mean squared error of normal numbers, relative."""


def draw_rows(count: int = 16, width: int = 512) -> F32:
    return np.random.default_rng(0).standard_normal((count, width), np.float32)


def measure(wrong: F32, importance: F32 | float = 1.0) -> float:
    return float((np.square(wrong) * importance).sum())


def test_every_format_of_usual_mixtures_is_written() -> None:
    assert set(ENCODED) == set(BOUNDS)


@pytest.mark.parametrize("name", ENCODED)
def test_numbers_come_back_but_for_the_format_s_error(name: str) -> None:
    own, rows = find_format(name), draw_rows()
    raw = own.encode(rows)
    assert raw.shape == (len(rows), own.count_bytes(rows.shape[1])) and raw.dtype == np.uint8
    assert not own.find_faults(raw).any()
    found = gguf.dequantize(raw, gguf.GGMLQuantizationType(own.number))
    assert (measure(found - rows) / measure(rows)) ** 0.5 <= BOUNDS[name]


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize(
    "numbers",
    [
        np.zeros(512), np.full(512, -3.0), np.full(512, 1e-40), np.r_[np.full(511, 1e-3), 6e4],
        np.r_[np.zeros(300), np.linspace(-1, 1, 212)], np.r_[np.full(256, 5.0), np.zeros(256)],
    ],
    ids=["zeros", "equal", "denormal", "an outlier", "half zeros", "positive"],
)  # fmt: skip
def test_odd_rows_stay_near(name: str, numbers: F32) -> None:
    own, rows = find_format(name), numbers[None].astype(np.float32)
    raw = own.encode(rows)
    assert not own.find_faults(raw).any()
    wrong = np.abs(own.decode(raw) - rows)
    # The largest number of 4 bits is 6, and scales are powers of two: 7.99 becomes 6.
    steps = {"q4": 15, "q5": 31, "q6": 62, "q8": 254, "mx": 9}.get(name[:2], 250)
    smallest = 1e-40 if name in ("f32", "bf16") else 128 * 2.0**-24  # that scales can have
    assert wrong.max() <= 1.2 * np.abs(rows).max() / (steps / 2) + smallest
    if not rows.any():
        assert not own.decode(raw).any()


@pytest.mark.parametrize(
    "name",
    [name for name in ENCODED if not find_format(name).is_plain and name != "mxfp4"],
)  # fmt: skip
def test_important_columns_err_less(name: str) -> None:
    own, rows, importance = find_format(name), draw_rows(), np.ones(512, np.float32)
    importance[::8] = 100.0
    plain, aware = (own.decode(own.encode(rows, given)) - rows for given in (None, importance))
    assert measure(aware, importance) < 0.9 * measure(plain, importance)
    assert measure(aware[:, ::8]) < measure(plain[:, ::8])


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_numbers_of_the_format_itself_hardly_move(name: str) -> None:
    own = find_format(name)
    rows = own.decode(own.encode(draw_rows()))
    again = own.decode(own.encode(rows))
    assert (measure(again - rows) / measure(rows)) ** 0.5 <= BOUNDS[name] / 4


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e6])
def test_what_does_not_fit_is_refused(name: str, number: float) -> None:
    rows = draw_rows(2)
    rows[1, 7] = number
    if number == 1e6 and name in ("f32", "bf16", "mxfp4"):
        find_format(name).encode(rows)
        return
    with pytest.raises(ValueError, match=r"a weight is not a finite number|does not fit into fp16"):
        find_format(name).encode(rows)
