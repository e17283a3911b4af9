"""Quantised checkpoints are read as formats say; these tests write each by code of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from tests.helpers.quantized import (
    Array,
    Stored,
    draw,
    draw_codes,
    draw_e4m3,
    pack_pairs,
    write_tensors,
)
from tests.helpers.tables import in_table

ROWS, COLUMNS = 24, 128


def write_folder(folder: Path, settings: dict[str, Any], tensors: Stored) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors)
    return folder


def read(folder: Path, name: str) -> F32:
    """The whole tensor, which pieces of it and its columns must agree with."""
    tensor = open_checkpoint(folder).tensors[name]
    whole = tensor.read()
    assert whole.shape == tensor.shape
    np.testing.assert_array_equal(tensor.read(3, 10), whole[3:10])
    np.testing.assert_array_equal(tensor.widen(tensor.read_turned()), whole.T)
    return whole


def test_scales_of_fp8_may_be_powers_of_two(tmp_path: Path) -> None:
    codes, numbers = draw_e4m3(ROWS, COLUMNS)
    exponents = np.array([[120], [131]], np.uint8)
    tensors: Stored = {"a.weight": ("F8_E4M3", codes), "a.weight_scale_inv": ("F8_E8M0", exponents)}
    settings = {"quant_method": "fp8", "weight_block_size": [16, 128]}
    expected = numbers * np.repeat([[2.0**-7], [2.0**4]], [16, 8], axis=0)
    folder = write_folder(tmp_path / "model", settings, tensors)
    np.testing.assert_array_equal(read(folder, "a.weight"), expected)


def test_fp8_experts_may_lie_in_one_tensor(tmp_path: Path) -> None:
    codes, numbers = draw_e4m3(3, ROWS, COLUMNS)
    scales = np.abs(draw(3, 1, 2))
    tensors: Stored = {
        "experts.down_proj": ("F8_E4M3", codes),
        "experts.down_proj_scale_inv": ("F32", scales),
    }
    settings = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    folder = write_folder(tmp_path / "model", settings, tensors)
    for expert in range(3):
        expected = numbers[expert] * np.repeat(scales[expert], 64, axis=1)
        np.testing.assert_array_equal(read(folder, f"experts.down_proj.{expert}"), expected)


@pytest.mark.parametrize("spread", [1, 4, 6])
def test_mxfp4_becomes_int8_exactly_where_exponents_of_a_group_differ_little(
    spread: int, tmp_path: Path
) -> None:
    """Along the rows of the file one exponent is common to a group; across them 32 are."""
    codes, groups = draw_codes(16, 1, 64, 64), 2
    exponents = draw_codes(spread, 1, 64, groups, seed=2) + 118
    tensors: Stored = {
        "x_blocks": ("U8", pack_pairs(codes).reshape(1, 64, groups, 16)),
        "x_scales": ("U8", exponents.astype(np.uint8)),
    }
    folder = write_folder(tmp_path / "model", {"quant_method": "mxfp4"}, tensors)
    tensor = open_checkpoint(folder).tensors["x.0"]
    for raw, always in ((tensor.read_turned(), True), (tensor.read_raw(), spread <= 4)):
        taken = tensor.take_codes(raw, "int8")
        assert taken is not None
        found = find_packing("int8").dequantize(*taken, 64)
        wanted = tensor.widen(raw)
        if always:
            np.testing.assert_array_equal(found, wanted)
        else:
            assert 0 < np.abs(found - wanted).max() <= np.abs(wanted).max() / 254 * 1.001
    assert tensor.take_codes(raw, "int4") is None


def make_gptq() -> Stored:
    return {
        "a.qweight": ("I32", np.zeros((16, ROWS), np.int32)),
        "a.qzeros": ("I32", np.zeros((1, ROWS // 8), np.int32)),
        "a.scales": ("F16", np.ones((1, ROWS), np.float16)),
        "a.g_idx": ("I32", np.zeros(COLUMNS, np.int32)),
    }


def leave_out(name: str) -> Callable[[Stored], None]:
    return lambda tensors: tensors.pop(name) and None


def put(name: str, dtype: str, values: Array) -> Callable[[Stored], None]:
    return lambda tensors: tensors.update({name: (dtype, values)})


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("P533", leave_out("a.scales")),
        ("P533", leave_out("a.qzeros")),
        ("P534", put("a.scales", "F16", np.ones((2, ROWS), np.float16))),
        ("P534", put("a.scales", "F16", np.ones((1, ROWS + 8), np.float16))),
        ("P534", put("a.qzeros", "I32", np.zeros((1, 1), np.int32))),
        ("P534", put("a.g_idx", "I32", np.full(COLUMNS, 7, np.int32))),
        ("P534", put("a.g_idx", "I32", np.full(COLUMNS, -1, np.int32))),
        ("P534", put("a.qweight", "I32", np.zeros((0, ROWS), np.int32))),
        ("P535", put("a.qweight", "F32", np.zeros((16, ROWS), np.float32))),
        ("P532", put("a.qweight", "I32", np.zeros((16, ROWS), np.int16))),
    ],
)
def test_what_does_not_belong_together_is_a_finding(
    code: str, spoil: Callable[[Stored], None], tmp_path: Path
) -> None:
    tensors = make_gptq()
    spoil(tensors)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = write_folder(tmp_path / "model", settings, tensors)
    with pytest.raises(UserError, match=code):
        open_checkpoint(folder).tensors["a.weight"].read()


@in_table
def test_methods_and_layouts_that_are_not_read_are_named(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", settings, make_gptq())
    with pytest.raises(UserError, match=says):
        open_checkpoint(folder)


def test_blocks_of_mxfp4_without_scales_are_a_finding(tmp_path: Path) -> None:
    tensors: Stored = {"x_blocks": ("U8", np.zeros((2, 4, 1, 16), np.uint8))}
    settings = {"quant_method": "mxfp4"}
    with pytest.raises(UserError, match="P533"):
        open_checkpoint(write_folder(tmp_path / "model", settings, tensors))
    tensors["x_scales"] = ("U8", np.zeros((2, 4), np.uint8))
    with pytest.raises(UserError, match="P534"):
        open_checkpoint(write_folder(tmp_path / "model", settings, tensors))
