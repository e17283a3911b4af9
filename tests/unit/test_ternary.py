"""Ternary weights and mxfp4: what checkpoints have, and what stores keep of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.formats.micro_floats import find_codes
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.weights.bundles import (
    assemble_bundles,
    join_scales,
    slice_factors,
    split_scales,
    unpack_part,
)
from pi2.plan.weights.layout import lay_out_bundle, vector_bytes
from tests.helpers.goldens import (
    EXACT,
    UNROUNDED,
    convert_golden,
    copy_checkpoint,
    measure_error,
    read_golden,
    run_golden,
    write_plan,
)

TERNARY = EXACT | {"ffn": "ternary", "attention": "ternary"}
ERROR = 1e-4
Tensors = dict[str, Any]


@pytest.mark.parametrize("length", [32, 96, 544, 2560])
def test_a_vector_of_three_numbers_is_kept_exactly(length: int) -> None:
    rng = np.random.default_rng(length)
    codes = rng.integers(-1, 2, (5, length))
    codes[0] = 0
    rows = (codes * rng.uniform(1e-3, 1e3, (5, 1))).astype(np.float32)
    weights, scales = find_packing("ternary").quantize(rows)
    assert scales is not None and scales.dtype == np.float32 and scales.shape == (5, 1)
    assert weights.shape[1] + 4 == vector_bytes(length, "ternary")
    np.testing.assert_array_equal(find_packing("ternary").unpack(weights, length), codes)
    np.testing.assert_array_equal(find_packing("ternary").dequantize(weights, scales, length), rows)


def test_other_vectors_are_rounded_by_their_mean_magnitude() -> None:
    rows = np.zeros((1, 32), np.float32)
    rows[0, :4] = [8.0, -6.0, 1.5, -0.5]  # of 32 elements the mean is a half
    weights, scales = find_packing("ternary").quantize(rows)
    assert find_packing("ternary").unpack(weights, 32)[0, :5].tolist() == [1, -1, 1, -1, 0]
    assert scales is not None and scales[0, 0] == 4.0


def test_a_bundle_has_the_factor_of_its_activation() -> None:
    layout = lay_out_bundle(96, "ternary", factor=True)
    assert layout.used_bytes == 3 * (96 // 4 + 4) + 4
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal((6, 96)).astype(np.float32) for _ in range(3)]
    factors = rng.standard_normal(6).astype(np.float32)
    packed = [find_packing("ternary").quantize(part) for part in parts]
    whole = assemble_bundles(packed, layout, factors=factors)
    apart = lay_out_bundle(96, "ternary", factor=True, scales="resident")
    again = join_scales(*split_scales(whole, apart), apart, slice(0, 6))
    np.testing.assert_array_equal(again, whole)
    np.testing.assert_array_equal(slice_factors(again, layout), factors)
    for index, (weights, scales) in enumerate(packed):
        expected = find_packing("ternary").dequantize(weights, scales, 96)
        np.testing.assert_array_equal(unpack_part(again, layout, index), expected)


def as_divided(tensors: Tensors) -> dict[str, str]:
    """Let scales be what codes are divided by."""
    for name in list(tensors):
        if name.endswith("_scale"):
            tensors[name] = 1 / tensors[name].astype(np.float32)
    return {"linear_class": "bitlinear"}


def as_masters(tensors: Tensors) -> dict[str, str]:
    """Let matrices be numbers that round to the codes, with the scale as their mean magnitude."""
    for name in [name for name in tensors if name.endswith("_scale")]:
        packed, scale = tensors[name.removesuffix("_scale")], float(tensors.pop(name)[0])
        codes = np.concatenate([(packed >> 2 * part) & 3 for part in range(4)]).astype(int) - 1
        small = 0.3 * (1 - 2 * (np.arange(codes.size).reshape(codes.shape) % 2))
        large = (codes.size - 0.3 * np.sum(codes == 0)) / np.sum(codes != 0)
        plain = np.where(codes == 0, small, codes * large) * scale
        tensors[name.removesuffix("_scale")] = plain.astype(np.float32)
    return {"quantization_mode": "online"}


@pytest.mark.parametrize("change", [as_divided, as_masters])
def test_every_kind_of_checkpoint_becomes_the_same_model(
    tmp_path: Path, change: Callable[[Tensors], dict[str, str]]
) -> None:
    golden = read_golden("bitnet")
    checkpoint = copy_checkpoint("bitnet", tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    said = json.loads((checkpoint / "config.json").read_text())
    said["quantization_config"] |= change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(said))
    model = convert_golden(checkpoint, tmp_path, TERNARY)
    logits, greedy = run_golden(write_plan(tmp_path, model, {}), golden)
    assert measure_error(logits, golden.logits) <= ERROR
    assert greedy == golden.greedy


def test_a_code_that_no_weight_has_is_refused(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("bitnet", tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name][1, 2] |= 0b1100
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=rf"'{name}' in .* has a code that no weight has: 3"):
        convert_golden(checkpoint, tmp_path, TERNARY)


def test_a_checkpoint_with_ternary_weights_is_stored_so_without_being_asked(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("bitnet", tmp_path / "checkpoint")
    precisions = describe_checkpoint(checkpoint).model.quantization
    assert (precisions.ffn, precisions.attention) == ("ternary", "ternary")


def test_neurons_from_flash_are_normalised_with_those_in_memory(tmp_path: Path) -> None:
    golden = read_golden("bitnet")
    model = convert_golden(copy_checkpoint("bitnet", tmp_path / "checkpoint"), tmp_path, TERNARY)
    changes = {
        "backends": {"cpu": "cpu"},
        "layers": {"split": {"cpu": 1.0}, "hot": 0.25},
        "decode": {"predictor": "gate", "batch": 2},
    }
    plan = write_plan(tmp_path, model, changes)
    with pi2.load(plan, set=UNROUNDED | {"memory.segments.cold": "32 KiB"}) as loaded:
        assert measure_error(loaded.logits(golden.prompt), golden.logits) <= ERROR
        prompts = [golden.prompt, golden.prompt[:9]]
        pieces: dict[int, str] = {0: "", 1: ""}
        for number, piece in loaded.generate_batch(prompts, max_tokens=8, temperature=0.0):
            pieces[number] += piece
        read_bytes = loaded.stats.flash_read_bytes
        alone = ["".join(loaded.generate(p, max_tokens=8, temperature=0.0)) for p in prompts]
    assert read_bytes > 0
    assert pieces == dict(enumerate(alone))
    assert alone[0].split() == [f"w{token}" for token in golden.greedy[:8]]


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
