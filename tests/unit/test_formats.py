"""Number formats decode to the bit as the gguf package does."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest

from pi2.arrays import U8
from pi2.formats import Format, find_format, list_formats

FORMATS = pytest.mark.parametrize("own", list_formats().values(), ids=lambda own: own.name)


def make_edges(own: Format) -> U8:
    """Blocks of zeros, of ones, with the largest scales, with the smallest, and random ones."""
    generator = np.random.default_rng(7)
    count = 64
    size = max(own.block_bytes, 4)
    raw = generator.integers(0, 256, (count, size), np.uint8)
    raw[0], raw[1] = 0, 255
    for number, bits in enumerate((0x7BFF, 0xFBFF, 0x0001, 0x8001, 0x03FF, 0x3C00)):
        for place in own.halves:
            raw[2 + number, place] = bits & 255
            raw[2 + number, place + 1] = bits >> 8
    return raw


@FORMATS
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
    # Whole numbers, what only activations have, and what the package does not decode.
    others = {"i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k", "q1_0"}
    assert kinds - others <= set(list_formats())


@FORMATS
def test_blocks_with_finite_scales_have_no_fault(own: Format) -> None:
    raw = np.zeros((3, 8 * own.block_bytes), np.uint8)
    assert not own.find_faults(raw).any()


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
