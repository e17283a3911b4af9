"""gpt-oss as it is published, its experts in MXFP4, computes what the same numbers in fp16 do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.helpers.goldens import (
    EXACT,
    FOLDER,
    Golden,
    convert_golden,
    make_small_tokenizer,
    run_golden,
    write_plan,
)
from tests.unit.test_importing_quantized import Stored, decode_fp4, pack_pairs, write_tensors

HIDDEN, FFN = 64, 32


def describe_config() -> dict[str, object]:
    config = json.loads((FOLDER / "gpt-oss" / "config.json").read_text())
    return dict(config | {"hidden_size": HIDDEN, "intermediate_size": FFN})


def draw_tensors() -> tuple[Stored, Stored]:
    """Tensors of a whole checkpoint, with experts in MXFP4 and in fp16."""
    sizes = {48: HIDDEN, 19: FFN, 38: 2 * FFN}
    generator = np.random.default_rng(3)
    packed: Stored = {}
    plain: Stored = {}
    for name, tensor in load_file(FOLDER / "gpt-oss" / "model.safetensors").items():
        shape = tuple(sizes.get(size, size) for size in tensor.shape)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values = (0.3 * generator.standard_normal(shape)).astype(np.float16)
            if name.endswith(("layernorm.weight", "norm.weight")):
                values += np.float16(1)
            packed[name] = plain[name] = ("F16", values)
            continue
        experts, inputs, outputs = shape
        codes = generator.integers(0, 16, (experts, outputs, inputs))
        exponents = generator.integers(121, 125, (experts, outputs, inputs // 32))
        numbers = np.vectorize(decode_fp4, otypes=[float])(codes)
        numbers *= 2.0 ** (exponents.repeat(32, axis=2) - 127.0)
        blocks = pack_pairs(codes).reshape(experts, outputs, inputs // 32, 16)
        packed[f"{name}_blocks"] = ("U8", blocks)
        packed[f"{name}_scales"] = ("U8", exponents.astype(np.uint8))
        turned = np.ascontiguousarray(numbers.swapaxes(1, 2)).astype(np.float16)
        plain[name] = ("F16", turned)
    return packed, plain


def test_a_published_checkpoint_computes_what_its_numbers_say(tmp_path: Path) -> None:
    packed, plain = draw_tensors()
    config = describe_config()
    golden = Golden(prompt=[1, 7, 30, 12, 95, 4], logits=np.zeros(0, np.float32), greedy=[])
    found = []
    for name, tensors, settings in (
        ("packed", packed, {"quantization_config": {"quant_method": "mxfp4"}}),
        ("plain", plain, {}),
    ):
        checkpoint = tmp_path / name / "checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps(config | settings))
        write_tensors(checkpoint / "model.safetensors", tensors)
        (checkpoint / "tokenizer.json").write_bytes(make_small_tokenizer(96))
        model = convert_golden(checkpoint, tmp_path / name, EXACT)
        found.append(run_golden(write_plan(tmp_path / name, model, {}), golden, tokens=8))
    (logits, greedy), (expected, text) = found
    assert np.abs(expected).max() > 0.1
    np.testing.assert_array_equal(logits, expected)
    assert greedy == text
