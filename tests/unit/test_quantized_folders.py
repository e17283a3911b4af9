"""Whole folders of compressed-tensors, ModelOpt, GPTQ, AWQ and FP8, with all tensors that those
libraries write, are described and converted as plain folders with the same numbers are."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pi2.arrays import F32
from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.goldens import change_config, copy_checkpoint
from tests.helpers.quantized import (
    Stored,
    decode_fp4,
    draw,
    draw_codes,
    draw_e4m3,
    pack_pairs,
    pack_words,
    write_tensors,
)
from tests.helpers.tables import in_table

FFN = 96
"""Neurons of a layer: whole groups of 32."""

Write = Callable[[str, int, int], tuple[Stored, F32]]
"""Gives what is stored of a matrix, by the module's name and shape, and its numbers."""


def draw_scales(*shape: int) -> F32:
    return np.abs(draw(*shape, seed=5)) * np.float32(0.01) + np.float32(0.001)


def pack_whole(
    bits: int, groups: int, *, has_zeros: bool = False, has_order: bool = False,
    is_unordered: bool = False,
) -> Write:  # fmt: skip
    """Integers in words, without gaps between them."""

    def write(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
        middle = 1 << bits - 1
        codes, scales = draw_codes(2 * middle, rows, columns), draw_scales(rows, groups)
        zeros = np.full((rows, groups), middle)
        index = np.arange(columns) // (columns // groups)
        stored: Stored = {
            f"{name}.weight_packed": ("I32", pack_words(codes, bits)),
            f"{name}.weight_scale": ("F32", scales),
            f"{name}.weight_shape": ("I64", np.array([rows, columns])),
        }
        if has_zeros:
            zeros = draw_codes(2 * middle, rows, groups, seed=3)
            packed = pack_words(np.ascontiguousarray(zeros.T), bits).T
            stored[f"{name}.weight_zero_point"] = ("I32", packed)
        if is_unordered:
            stored[f"{name}.weight_g_idx"] = ("I32", np.full(columns, -1, np.int32))
        if has_order:
            index = np.random.default_rng(4).permutation(index)
            stored[f"{name}.weight_g_idx"] = ("I32", index.astype(np.int32))
        steps = (codes - zeros[:, index]).astype(np.float32)
        return stored, steps * scales[:, index]

    return write


def write_eight_bits(
    dtype: str, shape: str, *, has_zeros: bool = False, ending: str = "_scale"
) -> Write:
    """8-bit floats or integers with scales of the tensor, of rows, of groups or of blocks."""

    def write(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
        codes, numbers = draw_e4m3(rows, columns)
        if dtype == "I8":
            numbers = codes.view(np.int8).astype(np.float32)
        high, wide = {
            "number": (rows, columns), "tensor": (rows, columns), "channel": (1, columns),
            "vector": (1, columns), "group": (1, 16), "exponents": (1, 32), "block": (16, 24),
            "block of four axes": (128, 128),
        }[shape]  # fmt: skip
        scales = draw_scales(-(-rows // high), -(-columns // wide))
        stored: Stored = {f"{name}.weight": (dtype, codes)}
        if has_zeros:
            zeros = draw_codes(9, *scales.shape, seed=6)
            stored[f"{name}.weight_zero_point"] = ("I8", zeros.astype(np.int8))
            wide_zeros = np.repeat(np.repeat(zeros, high, 0)[:rows], wide, 1)[:, :columns]
            numbers = numbers - wide_zeros.astype(np.float32)
        kept, kind = scales, "F32"
        if shape == "exponents":
            exponents = draw_codes(6, *scales.shape, seed=7) + 118
            kept, kind = exponents.astype(np.uint8), "U8"
            scales = (2.0 ** (exponents - 127.0)).astype(np.float32)
        elif shape in ("number", "tensor", "vector"):
            kept = scales.reshape({"number": (), "tensor": (1,), "vector": (rows,)}[shape])
        elif shape == "block of four axes":
            kept = scales[:, None, :, None]
        stored[f"{name}.weight{ending}"] = (kind, kept)
        spread = np.repeat(np.repeat(scales, high, 0)[:rows], wide, 1)[:, :columns]
        return stored, numbers * spread

    return write


def write_four_bits(
    codes_name: str, kind: str, *, divides: bool, shape: tuple[int, ...] = ()
) -> Write:
    """Pairs of 4-bit floats with scales of groups: NVFP4 or MXFP4."""

    def write(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
        codes = draw_codes(16, rows, columns)
        numbers = np.vectorize(decode_fp4, otypes=[float])(codes).astype(np.float32)
        stored: Stored = {f"{name}.{codes_name}": ("U8", pack_pairs(codes))}
        if kind == "mxfp4":
            exponents = draw_codes(6, rows, columns // 32, seed=7) + 118
            stored[f"{name}.weight_scale"] = ("U8", exponents.astype(np.uint8))
            wide = np.repeat(2.0 ** (exponents - 127.0), 32, axis=1)
            return stored, (numbers * wide).astype(np.float32)
        scale_codes, scales = draw_e4m3(rows, columns // 16)
        stored[f"{name}.weight_scale"] = ("F8_E4M3", scale_codes)
        whole = np.float32(256.0 if divides else 1 / 256)
        last = "weight_global_scale" if divides else "weight_scale_2"
        stored[f"{name}.{last}"] = ("F32", np.array(whole).reshape(shape))
        return stored, numbers * np.repeat(scales, 16, axis=1) * np.float32(1 / 256)

    return write


def pack_row_pairs(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
    """ModelOpt's AWQ: signed integers of two rows a byte, and factors of the inputs."""
    codes, scales = draw_codes(16, rows, columns) - 8, draw_scales(rows, columns // 32)
    packed = (codes[::2] & 15) | (codes[1::2] & 15) << 4
    factors = 1 + np.abs(draw(columns, seed=8))
    numbers = codes.astype(np.float32) * np.repeat(scales, 32, axis=1)
    stored: Stored = {
        f"{name}.weight": ("U8", packed.astype(np.uint8)),
        f"{name}.weight_scale": ("F32", scales),
        f"{name}.weight_scale_2": ("F32", np.array(3.0, np.float32)),
        f"{name}.pre_quant_scale": ("F32", factors),
    }
    return stored, numbers * factors


GPTQ = [*((4, name) for name in ("gptq", "gptq_v2", "desc_act", "one group")),
    (2, "desc_act"), (8, "gptq")]  # fmt: skip
"""Bits, and the variety: order of columns, zero points, or one group."""


def write_gptq(bits: int, variety: str) -> Write:
    def write(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
        size = columns if variety == "one group" else 32
        codes = draw_codes(1 << bits, columns, rows)
        zeros = draw_codes((1 << bits) - 1, columns // size, rows, seed=5)
        scales = draw_scales(columns // size, rows).astype(np.float16)
        index = np.arange(columns) // size
        if variety == "desc_act":
            index = np.random.default_rng(6).permutation(index)
        stored: Stored = {
            f"{name}.qweight": ("I32", pack_words(codes.T, bits).T),
            f"{name}.qzeros": ("I32", pack_words(zeros, bits)),
            f"{name}.scales": ("F16", scales),
        }
        if variety != "one group":
            stored[f"{name}.g_idx"] = ("I32", index.astype(np.int32))
        steps = codes - zeros[index] - (variety != "gptq_v2")
        numbers = steps.astype(np.float32) * scales[index].astype(np.float32)
        return stored, np.ascontiguousarray(numbers.T)

    return write


def write_awq(name: str, rows: int, columns: int) -> tuple[Stored, F32]:
    """Place i of a word has the neighbour ``order[i]`` of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros = draw_codes(16, columns, rows), draw_codes(16, columns // 32, rows, seed=7)
    scales = draw_scales(columns // 32, rows).astype(np.float16)
    packed = [
        pack_words(values.reshape(-1, 8)[:, order], 4).reshape(len(values), -1)
        for values in (codes, zeros)
    ]
    stored: Stored = {
        f"{name}.qweight": ("I32", packed[0]),
        f"{name}.qzeros": ("I32", packed[1]),
        f"{name}.scales": ("F16", scales),
    }
    index = np.arange(columns) // 32
    numbers = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
    return stored, np.ascontiguousarray(numbers.T)


@dataclass(frozen=True)
class Layout:
    method: str
    write: Write
    settings: dict[str, Any] = field(default_factory=dict)
    mlp: Write | None = None
    """How the FFN's matrices are written, if otherwise."""
    companions: tuple[str, ...] = ()
    """Scales of numbers that pi2 does not round, in each module and in each attention."""


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


CT = "compressed-tensors"
KV = ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.k_zero_point")
INPUTS = ("self_attn.q_proj.input_scale", "self_attn.q_proj.input_zero_point")
FP8 = write_eight_bits("F8_E4M3", "channel")
NVFP4 = write_four_bits("weight_packed", "nvfp4", divides=True, shape=(1,))
NUMBER = write_four_bits("weight_packed", "nvfp4", divides=True)
LAYOUTS = {
    **{
        f"packed {bits} bits": Layout(
            CT, pack_whole(bits, 2), {"format": "pack-quantized", **group(num_bits=bits)}
        )
        for bits in range(2, 9)
    },
    "packed, zero points": Layout(CT, pack_whole(4, 2, has_zeros=True)),
    "packed 3 bits, zero points": Layout(CT, pack_whole(3, 2, has_zeros=True), group(num_bits=3)),
    "packed, any order": Layout(CT, pack_whole(4, 2, has_order=True)),
    "packed, order left out": Layout(CT, pack_whole(4, 2, is_unordered=True)),
    "packed, channels": Layout(CT, pack_whole(8, 1, has_zeros=True), group(num_bits=8)),
    "int8 channels": Layout(
        CT, write_eight_bits("I8", "channel"), {"format": "int-quantized"}, companions=INPUTS
    ),
    "int8 zero points": Layout(CT, write_eight_bits("I8", "channel", has_zeros=True)),
    "int8 groups": Layout(
        CT, write_eight_bits("I8", "group", has_zeros=True), {"format": "naive-quantized"}
    ),
    "fp8 tensor": Layout(
        CT,
        write_eight_bits("F8_E4M3", "tensor"),
        {"format": "float-quantized", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        companions=(*INPUTS, *KV, "self_attn.q_proj.output_scale"),
    ),
    "fp8 channels": Layout(CT, FP8, {"format": "float-quantized"}),
    "fp8 blocks": Layout(
        CT, write_eight_bits("F8_E4M3", "block"), group(num_bits=8, block_structure=[16, 24])
    ),
    "mxfp8": Layout(CT, write_eight_bits("F8_E4M3", "exponents"), {"format": "mxfp8-quantized"}),
    "nvfp4": Layout(
        CT,
        NVFP4,
        {"format": "nvfp4-pack-quantized"},
        companions=("self_attn.q_proj.input_global_scale",),
    ),
    "mxfp4": Layout(
        CT,
        write_four_bits("weight_packed", "mxfp4", divides=True),
        {"format": "mxfp4-pack-quantized"},
    ),
    "nvfp4, a number": Layout(CT, NUMBER, {"format": "nvfp4-pack-quantized"}),
    "modelopt nvfp4, a list": Layout(
        "modelopt_fp4", write_four_bits("weight", "nvfp4", divides=False, shape=(1,))
    ),
    "mixed": Layout(CT, FP8, {"format": "mixed-precision"}, mlp=NVFP4),
    "modelopt fp8": Layout(
        "modelopt",
        write_eight_bits("F8_E4M3", "number"),
        companions=(INPUTS[0], "self_attn.k_proj.k_scale", "self_attn.v_proj.v_bias"),
    ),
    "modelopt fp8 channels": Layout("modelopt", write_eight_bits("F8_E4M3", "vector")),
    "modelopt fp8 blocks": Layout("modelopt", write_eight_bits("F8_E4M3", "block of four axes")),
    "modelopt mxfp8": Layout("modelopt_mxfp8", write_eight_bits("F8_E4M3", "exponents")),
    "modelopt int8": Layout("modelopt", write_eight_bits("I8", "vector"), companions=INPUTS[:1]),
    "modelopt nvfp4": Layout(
        "modelopt_fp4", write_four_bits("weight", "nvfp4", divides=False), companions=INPUTS[:1]
    ),
    "modelopt mxfp4": Layout("modelopt", write_four_bits("weight", "mxfp4", divides=False)),
    "modelopt int4 awq": Layout("modelopt", pack_row_pairs, companions=INPUTS[:1]),
    "modelopt mixed": Layout(
        "hf_quant_config.json",
        write_eight_bits("F8_E4M3", "number"),
        mlp=write_four_bits("weight", "nvfp4", divides=False),
    ),
    **{
        f"gptq of {bits} bits, {variety}": Layout(
            "gptq",
            write_gptq(bits, variety),
            {
                "bits": bits,
                "group_size": -1 if variety == "one group" else 32,
                "desc_act": variety == "desc_act",
                "checkpoint_format": "gptq_v2" if variety == "gptq_v2" else "gptq",
            },
        )
        for bits, variety in GPTQ
    },
    "awq": Layout("awq", write_awq, {"bits": 4, "group_size": 32, "version": "gemm"}),
    "fp8 tensors": Layout(
        "fp8", write_eight_bits("F8_E4M3", "tensor"), {"activation_scheme": "static"}, None, INPUTS
    ),
    "fp8 by deepseek": Layout(
        "fp8",
        write_eight_bits("F8_E4M3", "block", ending="_scale_inv"),
        {"weight_block_size": [16, 24]},
    ),
    "fbgemm": Layout("fbgemm_fp8", FP8, companions=("self_attn.q_proj.input_scale_ub",)),
}


def write_folders(layout: Layout, folder: Path) -> tuple[Path, Path]:
    """A Llama as ``layout`` has it, and with the same numbers as plain ones."""
    places = [copy_checkpoint("llama", folder / name) for name in ("quantised", "plain")]
    golden_ffn = json.loads((places[0] / "config.json").read_text())["intermediate_size"]
    for place in places:
        change_config(place, intermediate_size=FFN)
    stored: Stored = {}
    plain: Stored = {}
    for name, values in load_file(places[0] / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            write = layout.mlp if layout.mlp is not None and ".mlp." in name else layout.write
            rows, columns = (FFN if size == golden_ffn else size for size in values.shape)
            parts, numbers = write(name.removesuffix(".weight"), rows, columns)
            stored |= parts
            plain[name] = ("F32", numbers)
        else:
            stored[name] = plain[name] = ("F32", values.astype(np.float32))
    for companion in layout.companions:
        stored[f"model.layers.0.{companion}"] = ("F32", np.ones(1, np.float32))
    if layout.method.endswith(".json"):
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MIXED_PRECISION"}}
        (places[0] / layout.method).write_text(json.dumps(said))
    else:
        settings = {"quant_method": layout.method, **layout.settings}
        change_config(places[0], quantization_config=settings)
    write_tensors(places[0] / "model.safetensors", stored)
    write_tensors(places[1] / "model.safetensors", plain)
    return places[0], places[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_of_a_library_is_described_and_has_the_numbers_of_a_plain_one(
    name: str, tmp_path: Path
) -> None:
    quantised, plain = write_folders(LAYOUTS[name], tmp_path)
    describe_checkpoint(quantised)
    found, expected = open_checkpoint(quantised).tensors, open_checkpoint(plain).tensors
    for tensor in expected.values():
        own = found[tensor.name].read()
        np.testing.assert_allclose(own, tensor.read(), rtol=1e-6, err_msg=tensor.name)
        if len(tensor.shape) == 2:
            turned = found[tensor.name]
            np.testing.assert_array_equal(turned.widen(turned.read_turned()), own.T)
            np.testing.assert_array_equal(found[tensor.name].read(3, 10), own[3:10])


@pytest.mark.parametrize("name", ["mixed", "modelopt int4 awq", "fp8 by deepseek"])
def test_a_store_of_it_is_the_store_of_the_plain_folder(name: str, tmp_path: Path) -> None:
    stores = []
    for folder in write_folders(LAYOUTS[name], tmp_path):
        store = tmp_path / f"{folder.name}-store"
        arguments = ["convert", str(folder), "-o", str(store), "--quantization", "fp16"]
        assert run(arguments) == 0
        files = [store / "dense.arrow", *sorted((store / "layers").iterdir())]
        stores.append([file.read_bytes() for file in files])
    assert stores[0] == stores[1]


def test_a_scale_that_no_matrix_has_is_refused(tmp_path: Path) -> None:
    """Nothing is taken for a part of a matrix by its name alone."""
    quantised, plain = write_folders(LAYOUTS["fp8 channels"], tmp_path)
    tensors: Stored = {
        name: ("F32", values) for name, values in load_file(plain / "model.safetensors").items()
    }
    tensors["model.layers.0.mlp.weight_scale"] = ("F32", np.ones((FFN, 1), np.float32))
    write_tensors(quantised / "model.safetensors", tensors)
    with pytest.raises(UserError, match=r"P537.*mlp\.weight_scale"):
        describe_checkpoint(quantised)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt nvfp4", "fp8 channels", "modelopt fp8"])
def test_a_matrix_without_a_scale_is_refused(name: str, tmp_path: Path) -> None:
    """Codes are never taken for numbers, and no scale counts as 1."""
    layout = LAYOUTS[name]
    place = tmp_path / "model"
    place.mkdir()
    settings = {"quant_method": layout.method, **layout.settings}
    config = {"model_type": "llama", "quantization_config": settings}
    (place / "config.json").write_text(json.dumps(config))
    stored, _ = layout.write("a", 24, 96)
    left = [key for key in stored if "scale" in key][-1]
    write_tensors(place / "model.safetensors", {k: v for k, v in stored.items() if k != left})
    with pytest.raises(UserError, match=r"P53[35]"):
        open_checkpoint(place).tensors["a.weight"].read()


@in_table
def test_formats_that_are_not_read_are_named(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    quantised, _ = write_folders(LAYOUTS["fp8 channels"], tmp_path)
    change_config(quantised, quantization_config={"quant_method": CT, **settings})
    with pytest.raises(UserError, match=rf"P544.*{says}"):
        open_checkpoint(quantised)
