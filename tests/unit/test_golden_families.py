"""What single golden models have of their own: options, tensors and layers of one family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import pi2
from pi2.backends.arithmetic import compute_growth, compute_rope_tables
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.importing.checkpoint import list_tensors
from pi2.importing.config import Config
from pi2.importing.families import describe_family
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.rows import make_cutoff
from pi2.model.tensors import list_tensors as list_model_tensors
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Rope
from tests.helpers.blocks import find_attention
from tests.helpers.goldens import (
    CPU,
    EXACT,
    FOLDER,
    ROUNDING,
    change_config,
    compute_decoded,
    convert_golden,
    copy_checkpoint,
    make_golden_plan,
    measure_error,
    read_golden,
    write_plan,
)
from tests.helpers.slow import keep_quick

MakePlan = Callable[[str], Path]


def test_the_table_of_embeddings_stays_on_flash(make_plan: MakePlan) -> None:
    resolved = load_plan(make_plan("gemma4-e2b"), overrides={"prefill.chunk": 16})
    # 96 rows of 6 layers with 20 elements each, in whole groups, fp16; 16 of them in memory.
    whole, some = 96 * 2 * 128, 16 * 2 * 128
    assert resolved.needs.attention.bytes < _count_dense_bytes(resolved.model) - whole + 2 * some


def _count_dense_bytes(model: Model) -> int:
    tensors = list_model_tensors(model, None)
    sizes = ((tensor.row_weight_bytes + tensor.row_scale_bytes) * tensor.rows for tensor in tensors)
    return sum(-(-size // 64) * 64 for size in sizes)


def test_tokens_beyond_the_table_have_its_first_row(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma4-e2b", tmp_path / "checkpoint")
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens_per_layer.weight"]
    tensors["model.embed_tokens_per_layer.weight"] = table[:40].copy()
    save_file(tensors, file)
    change_config(checkpoint, vocab_size_per_layer_input=40)
    short = write_plan(tmp_path, convert_golden(checkpoint, tmp_path, EXACT), {})
    found = compute_decoded(short, [5, 39, 70, 95], {})
    table[40:] = table[0]
    whole = copy_checkpoint("gemma4-e2b", tmp_path / "whole")
    tensors["model.embed_tokens_per_layer.weight"] = table
    save_file(tensors, whole / "model.safetensors")
    folder = tmp_path / "other"
    folder.mkdir()
    plan = write_plan(folder, convert_golden(whole, folder, EXACT), {})
    np.testing.assert_array_equal(found, compute_decoded(plan, [5, 39, 70, 95], {}))


def test_first_releases_state_other_heads_once_for_all_layers(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma4", tmp_path / "checkpoint")
    expected = describe_checkpoint(checkpoint).model
    change_config(
        checkpoint, per_layer_config=None, global_head_dim=36, num_global_key_value_heads=1
    )
    assert describe_checkpoint(checkpoint).model == expected
    assert expected.other_heads is not None and expected.other_heads.layers == (1, 3)


def test_the_last_layer_never_has_a_window() -> None:
    values = json.loads((FOLDER / "gemma4/config.json").read_text())
    values |= {"layer_types": None, "per_layer_config": None, "num_hidden_layers": 8}
    tables = describe_family(Config(FOLDER, values))
    assert tables["other_heads"]["layers"] == [5, 7]
    assert tables["attention"]["window_layers"] == [0, 1, 2, 3, 4, 6]


def tabulate(**options: Any) -> dict[str, Any]:
    values = json.loads((FOLDER / "llama4/config.json").read_text())
    return describe_family(Config(Path("config.json"), {**values, **options}))


def test_layers_have_chunks_and_norms_or_growing_queries(make_plan: MakePlan) -> None:
    model = load_plan(make_plan("llama4")).model
    attention = [find_attention(model, layer) for layer in range(5)]
    assert [own.window for own in attention] == [7, 7, None, 7, None]
    assert [own.options.head_norm for own in attention] == [True, True, False, True, False]
    assert [own.rope.kind == "none" for own in attention] == [0, 0, 1, 0, 1]
    kinds = [block.ffn.kind for block in model.blocks]
    assert kinds == ["dense", "experts", "dense", "experts", "dense"]
    assert compute_growth(model, 0, 0, 64).tolist() == [1.0] * 64
    grown = compute_growth(model, 2, 0, 64)
    assert np.flatnonzero(np.diff(grown)).tolist() == list(range(3, 63, 5))
    assert grown[3] == 1.0 and grown[4] == pytest.approx(1 + 0.7 * np.log(2))


def test_options_that_are_left_out_are_the_familys() -> None:
    left_out = dict.fromkeys(("no_rope_layers", "layer_types", "moe_layers"))
    tables = tabulate(**left_out, num_hidden_layers=8, interleave_moe_layer_step=1)
    assert tables["other_rope"] == {"kind": "none", "layers": [3, 7]}
    assert tables["attention"]["growth_layers"] == [3, 7]
    assert tables["attention"]["window_layers"] == [0, 1, 2, 4, 5, 6]
    assert "dense_layers" not in tables["moe"]
    assert tabulate(attn_temperature_tuning=4) == tabulate(attn_temperature_tuning=True)
    whole = tabulate(attention_chunk_size=None, attn_temperature_tuning=False, use_qk_norm=False)
    assert whole["attention"] == {"qkv_bias": False, "output_bias": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"decode.predictor": "gate"},
        {"decode.predictor": "router", "sparsity": {"method": "cats", "target": 0.5}},
    ],
)
def test_single_neurons_of_weighed_experts_are_not_named(
    make_plan: MakePlan, changes: dict[str, Any]
) -> None:
    plan = make_plan("llama4")
    with pytest.raises(UserError, match=r"P268.*depends on the expert's weight"):
        load_plan(plan, overrides=changes)


def test_nothing_is_between_two_factors_that_are_equal() -> None:
    """Llama 4 states 1 for both; wavelengths from the original context on are divided."""
    scaled = Rope(kind="llama3", theta=100.0, factor=16.0, original_context=16).model_copy(
        update={"low_frequency_factor": 1.0, "high_frequency_factor": 1.0}
    )
    frequencies = 100.0 ** -(np.arange(0, 8, 2) / 8)
    divided = np.where(2 * np.pi / frequencies > 16, frequencies / 16, frequencies)
    expected = np.cos(np.outer(np.arange(32), divided)).astype(np.float32)
    np.testing.assert_allclose(compute_rope_tables(scaled, 8, 32)[0], expected, atol=1e-6)


INT4 = dict.fromkeys(("ffn", "attention", "embedding", "head"), "int4")


def test_experts_may_be_narrower_than_a_group(tmp_path: Path) -> None:
    """What fills their vectors up is zero, whatever was there before."""
    checkpoint = copy_checkpoint("nemotron-h-latent", tmp_path / "checkpoint")
    narrow_experts(checkpoint, 12)
    model = convert_golden(checkpoint, tmp_path, INT4)
    plan, prompt = write_plan(tmp_path, model, {}), read_golden("nemotron-h-latent").prompt
    expected, found = (compute_decoded(plan, prompt, backend) for backend in ({}, CPU))
    assert measure_error(found, expected) <= ROUNDING


def narrow_experts(checkpoint: Path, width: int) -> None:
    """Leave the first ``width`` elements of what experts read and give."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("fc1_latent_proj.weight", "experts.down_proj")):
            weights[name] = np.ascontiguousarray(values[..., :width, :])
        if ".experts." in name and name.endswith("down_proj.weight"):
            weights[name] = np.ascontiguousarray(values[:width])
        if name.endswith("fc2_latent_proj.weight") or (
            ".experts." in name and name.endswith("up_proj.weight")
        ):
            weights[name] = np.ascontiguousarray(values[:, :width])
    save_file(weights, checkpoint / "model.safetensors")
    change_config(checkpoint, moe_latent_size=width)


def test_the_hub_names_ffns_of_layers_without_experts_otherwise(tmp_path: Path) -> None:
    prompt = read_golden("kimi-linear").prompt
    with pi2.load(make_golden_plan("kimi-linear", tmp_path / "written")) as model:
        truth = model.logits(prompt)
    checkpoint = copy_checkpoint("kimi-linear", tmp_path / "hub" / "checkpoint")
    file = checkpoint / "model.safetensors"
    old, new = "layers.0.block_sparse_moe.", "layers.0.mlp."
    tensors = load_file(file)
    assert any(old in name for name in tensors)
    save_file({name.replace(old, new): value for name, value in tensors.items()}, file)
    document = convert_golden(checkpoint, tmp_path / "hub", EXACT)
    with pi2.load(write_plan(tmp_path / "hub", document, {})) as model:
        np.testing.assert_array_equal(model.logits(prompt), truth)


TWO = {"decode.batch": 2}
CPU_TWO = {**CPU, **TWO}


@pytest.mark.parametrize(("count", "alike"), [(50, 0), (50, 20), (20, 0), (9000, 0)])
def test_a_matrix_tells_the_cutoff_without_gates(tmp_path: Path, count: int, alike: int) -> None:
    drawn = np.random.default_rng(1)
    gates = drawn.normal(0.1, 1.0, (count, 32)).astype(np.float32)
    # Inputs that add the same to all gates leave no triangle of full rank.
    gates[:, :alike] = 0.5
    save_file({"gates": gates}, tmp_path / "gates.safetensors")
    stored = list_tensors(tmp_path / "gates.safetensors")["gates"]
    mean, *rows = make_cutoff(stored, -1.5, False)
    assert len(rows) == min(count, 32)
    for inputs in drawn.normal(size=(4, 32)).astype(np.float32):
        values = gates @ inputs
        found = mean @ inputs - np.linalg.norm(rows @ inputs)
        assert found == pytest.approx(values.mean() - 1.5 * values.std(), rel=1e-5)


@pytest.mark.parametrize("backend", keep_quick([TWO, CPU_TWO], [TWO]))
def test_neurons_may_come_from_flash(make_plan: MakePlan, backend: dict[str, Any]) -> None:
    plan = make_plan("gemma3n")
    golden = read_golden("gemma3n")
    expected = compute_decoded(plan, golden.prompt, backend | {"layers.hot": 1.0})
    assert measure_error(expected, golden.logits) <= ROUNDING
    little = backend | {"layers.hot": 0.0, "prefill.chunk": 8, "pipeline.prefill": "layers-first"}
    with pi2.load(plan, set=little) as model:
        np.testing.assert_allclose(
            model.logits(golden.prompt, mode="decode"), expected, atol=1e-6, rtol=1e-5
        )
        assert model.stats.flash_read_bytes > 0
        assert measure_error(model.logits(golden.prompt, mode="prefill"), golden.logits) <= ROUNDING


def test_a_short_model_without_a_pattern_has_no_cutoffs(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("gemma3n", tmp_path / "checkpoint")
    change_config(checkpoint, activation_sparsity_pattern=None)
    assert describe_checkpoint(checkpoint).model.cut_layers == ()
