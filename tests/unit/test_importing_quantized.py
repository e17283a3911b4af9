"""Quantised checkpoints are read as formats say; these tests write each by code of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import pi2
from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model_parts import Quantization
from tests.helpers.goldens import EXACT, copy_checkpoint, write_plan
from tests.helpers.quantized import (
    Array,
    Stored,
    decode_fp4,
    draw,
    draw_codes,
    draw_e4m3,
    pack_pairs,
    pack_words,
    write_tensors,
)

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


@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("kind", ["block", "odd block", "row", "tensor", "number"])
def test_fp8_weights_are_multiplied_by_their_scales(kind: str, ending: str, tmp_path: Path) -> None:
    codes, numbers = draw_e4m3(ROWS, COLUMNS)
    high, wide = {"block": (8, 32), "odd block": (16, 48)}.get(kind, (128, 128))
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    expected = numbers.copy()
    if kind.endswith("block"):
        settings["weight_block_size"] = [high, wide]
        scales = np.abs(draw(-(-ROWS // high), -(-COLUMNS // wide)))
        for row in range(ROWS):
            for column in range(COLUMNS):
                expected[row, column] *= scales[row // high, column // wide]
    elif kind == "row":
        scales = np.abs(draw(ROWS, 1))
        expected *= scales
    else:
        scales = np.full((1,) if kind == "tensor" else (), 0.37, np.float32)
        expected *= scales
    tensors: Stored = {"a.weight": ("F8_E4M3", codes), f"a.weight{ending}": ("F32", scales)}
    folder = write_folder(tmp_path / "model", settings, tensors)
    np.testing.assert_array_equal(read(folder, "a.weight"), expected)


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


def test_mxfp4_experts_are_read_exactly(tmp_path: Path) -> None:
    """As gpt-oss has them: columns of the tensor are rows of the file."""
    experts, outputs, groups = 3, 20, 4
    codes = draw_codes(16, experts, outputs, groups * 32)
    exponents = draw_codes(12, experts, outputs, groups, seed=2) + 118
    numbers = np.vectorize(decode_fp4, otypes=[float])(codes).reshape(experts, outputs, groups, 32)
    expected = (numbers * 2.0 ** (exponents[..., None] - 127.0)).reshape(experts, outputs, -1)
    tensors: Stored = {
        "experts.down_proj_blocks": ("U8", pack_pairs(codes).reshape(experts, outputs, groups, 16)),
        "experts.down_proj_scales": ("U8", exponents.astype(np.uint8)),
    }
    folder = write_folder(tmp_path / "model", {"quant_method": "mxfp4"}, tensors)
    for expert in range(experts):
        found = read(folder, f"experts.down_proj.{expert}")
        np.testing.assert_array_equal(found, expected[expert].T)


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


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("exporter", ["compressed-tensors", "modelopt"])
def test_nvfp4_has_scales_of_groups_and_of_the_tensor(
    exporter: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    codes = draw_codes(16, ROWS, COLUMNS)
    scale_codes, scales = draw_e4m3(ROWS, COLUMNS // 16)
    numbers = np.vectorize(decode_fp4, otypes=[float])(codes).astype(np.float32)
    expected = numbers * np.repeat(scales, 16, axis=1)
    whole = np.full(shape, 8.0, np.float32)
    if exporter == "modelopt":
        expected = expected * 8
        names = ("a.weight", "a.weight_scale", "a.weight_scale_2")
    else:
        expected = expected / 8
        names = ("a.weight_packed", "a.weight_scale", "a.weight_global_scale")
    values = (("U8", pack_pairs(codes)), ("F8_E4M3", scale_codes), ("F32", whole))
    folder = write_folder(
        tmp_path / "model", {"quant_method": exporter}, dict(zip(names, values, strict=True))
    )
    np.testing.assert_array_equal(read(folder, "a.weight"), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("variety", ["symmetric", "zero points", "any order"])
def test_packed_integers_of_compressed_tensors(variety: str, bits: int, tmp_path: Path) -> None:
    middle, groups = 1 << bits - 1, 4
    codes = draw_codes(2 * middle, ROWS, COLUMNS)
    scales = np.abs(draw(ROWS, groups))
    zeros = np.full((ROWS, groups), middle)
    index = np.arange(COLUMNS) // 32
    tensors: Stored = {
        "a.weight_packed": ("I32", pack_words(codes, bits)),
        "a.weight_scale": ("F32", scales),
        "a.weight_shape": ("I64", np.array([ROWS, COLUMNS])),
    }
    if variety == "zero points":
        zeros = draw_codes(2 * middle, ROWS, groups, seed=3)
        tensors["a.weight_zero_point"] = ("I32", pack_words(zeros.T, bits).T)
    if variety == "any order":
        index = np.random.default_rng(4).permutation(index)
        tensors["a.weight_g_idx"] = ("I32", index.astype(np.int32))
    expected = (codes - zeros[:, index]) * scales[:, index]
    folder = write_folder(tmp_path / "model", {"quant_method": "compressed-tensors"}, tensors)
    np.testing.assert_allclose(read(folder, "a.weight"), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_eight_bits_of_compressed_tensors(dtype: str, tmp_path: Path) -> None:
    codes, numbers = draw_e4m3(ROWS, COLUMNS)
    if dtype == "I8":
        numbers = codes.view(np.int8).astype(np.float32)
    scales = np.abs(draw(ROWS, 1))
    tensors: Stored = {"a.weight": (dtype, codes), "a.weight_scale": ("F32", scales)}
    folder = write_folder(tmp_path / "model", {"quant_method": "compressed-tensors"}, tensors)
    np.testing.assert_array_equal(read(folder, "a.weight"), numbers * scales)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("variety", ["gptq", "gptq_v2", "desc_act", "one group"])
def test_gptq_weights(variety: str, bits: int, tmp_path: Path) -> None:
    size = COLUMNS if variety == "one group" else 32
    groups = COLUMNS // size
    codes = draw_codes(1 << bits, COLUMNS, ROWS)
    zeros = draw_codes((1 << bits) - 1, groups, ROWS, seed=5)
    scales = np.abs(draw(groups, ROWS)).astype(np.float16)
    index = np.arange(COLUMNS) // size
    if variety == "desc_act":
        index = np.random.default_rng(6).permutation(index)
    steps = codes - zeros[index] - (0 if variety == "gptq_v2" else 1)
    expected = (steps * scales[index].astype(np.float32)).T
    tensors: Stored = {
        "a.qweight": ("I32", pack_words(codes.T, bits).T),
        "a.qzeros": ("I32", pack_words(zeros, bits)),
        "a.scales": ("F16", scales),
    }
    if variety != "one group":
        tensors["a.g_idx"] = ("I32", index.astype(np.int32))
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": -1 if variety == "one group" else size,
        "desc_act": variety == "desc_act",
        "checkpoint_format": "gptq_v2" if variety == "gptq_v2" else "gptq",
    }
    folder = write_folder(tmp_path / "model", settings, tensors)
    np.testing.assert_allclose(read(folder, "a.weight"), expected, rtol=1e-6)


def test_awq_weights(tmp_path: Path) -> None:
    groups, order = COLUMNS // 32, [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros = draw_codes(16, COLUMNS, ROWS), draw_codes(16, groups, ROWS, seed=7)
    scales = np.abs(draw(groups, ROWS)).astype(np.float16)

    def pack(values: Array) -> Array:
        """Place i of a word has the neighbour order[i] of its eight."""
        words = np.zeros((len(values), ROWS // 8), np.uint32)
        for word in range(ROWS // 8):
            for place, neighbour in enumerate(order):
                column = values[:, word * 8 + neighbour].astype(np.uint32)
                words[:, word] |= column << np.uint32(4 * place)
        return words.view(np.int32)

    index = np.arange(COLUMNS) // 32
    expected = ((codes - zeros[index]) * scales[index].astype(np.float32)).T
    tensors: Stored = {
        "a.qweight": ("I32", pack(codes)),
        "a.qzeros": ("I32", pack(zeros)),
        "a.scales": ("F16", scales),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    folder = write_folder(tmp_path / "model", settings, tensors)
    np.testing.assert_allclose(read(folder, "a.weight"), expected, rtol=1e-6)


def test_a_quantised_checkpoint_becomes_the_store_of_what_it_stands_for(tmp_path: Path) -> None:
    """Rounded to FP8 by blocks, and the same numbers as plain ones."""
    plain = copy_checkpoint("qwen3", tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    stored: Stored = {}
    for name, values in tensors.items():
        wide = values.astype(np.float32)
        if "_proj" not in name:
            stored[name] = ("F32", wide)
            continue
        codes, numbers = draw_e4m3(*values.shape)
        scales = np.full((-(-values.shape[0] // 16), -(-values.shape[1] // 16)), 2.0**-9)
        tensors[name] = numbers * np.float32(2.0**-9)
        stored[name] = ("F8_E4M3", codes)
        stored[f"{name}_scale_inv"] = ("F32", scales.astype(np.float32))
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    quantised = copy_checkpoint("qwen3", tmp_path / "quantised")
    config["quantization_config"] = settings
    (quantised / "config.json").write_text(json.dumps(config))
    write_tensors(quantised / "model.safetensors", stored)
    write_tensors(
        plain / "model.safetensors",
        {name: ("F32", values.astype(np.float32)) for name, values in tensors.items()},
    )
    logits = []
    for checkpoint in (plain, quantised):
        model = describe_checkpoint(checkpoint, "golden").model
        model = model.model_copy(update={"quantization": Quantization.model_validate(EXACT)})
        folder = tmp_path / f"{checkpoint.name}-store"
        folder.mkdir()
        convert_checkpoint(checkpoint, model, folder / "store")
        with pi2.load(write_plan(folder, model, {})) as loaded:
            logits.append(loaded.logits([1, 5, 9, 23]))
    np.testing.assert_array_equal(logits[0], logits[1])


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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "hqq"}, "'hqq'"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits is '4'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": 4}, "quant_method is 4"),
    ],
)
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
