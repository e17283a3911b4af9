"""Families that differ little from relatives; tools/compare_families.py compares their results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pi2.arrays import F16
from pi2.diagnostics import UserError
from pi2.importing.config import Config
from pi2.importing.convert import convert_checkpoint
from pi2.importing.families import describe_family
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Index
from tests.helpers.blocks import find_attention
from tests.helpers.goldens import change_config, copy_checkpoint
from tests.helpers.tables import in_table

COMMON: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 96,
    "max_position_embeddings": 128, "hidden_act": "silu", "num_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "num_local_experts": 6,
}  # fmt: skip


def test_a_configuration_without_positions_has_those_of_its_family() -> None:
    bases = {"helium": 1e5, "solar_open": 1e6, "hy_v3": 11_158_840, "mixtral": 1e6, "smollm3": 2e6}
    for kind, base in bases.items():
        assert describe(kind).rope.theta == base
        assert describe(kind, rope_parameters={"rope_theta": 7.0}).rope.theta == 7
    cwm = describe("cwm", rope_theta=3e5).rope
    assert (cwm.theta, cwm.kind, cwm.factor, cwm.original_context) == (3e5, "llama3", 16, 8192)
    for stated in ({}, {"rope_scaling": None}):
        found = describe("gpt_oss", **stated).rope
        assert (found.theta, found.kind, found.factor) == (150_000, "yarn", 32)
        assert (found.original_context, found.whole_pairs) == (4096, False)
    plain = describe("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope
    assert (plain.theta, plain.kind) == (7, "plain")


WINDOW = {"sliding_window": 7}


def describe(kind: str, **options: Any) -> Model:
    values = COMMON | {"model_type": kind} | options
    tables = describe_family(Config(Path("config.json"), values))
    return Model.model_validate(
        {"schema_version": 3, "name": "made", "id": "made", **tables}, strict=False
    )


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ministral", WINDOW, [7, 7, 7, 7]),
        ("ministral", {"sliding_window": None}, [None] * 4),
        ("cwm", WINDOW, [None, 7, 7, 7]),
        ("exaone4", WINDOW, [7, 7, 7, None]),
        ("exaone4", {"sliding_window": None}, [None] * 4),
        ("exaone_moe", WINDOW | {"sliding_window_pattern": 2}, [7, None, 7, None]),
        ("flint", WINDOW | {"num_hidden_layers": 7}, [None, None, 7, 7, 7, None, None]),
        ("kolibri1", WINDOW | {"num_hidden_layers": 5}, [7, 7, 7, 7, None]),
        ("afmoe", WINDOW, [7, 7, 7, None]),
        ("granite_swa", WINDOW, [None, 7, 7, 7]),
        ("granitemoe_swa", {}, [None, 128, 128, 128]),
        ("vaultgemma", WINDOW, [7, None, 7, None]),
        ("lfm3", {"num_hidden_layers": 5}, [None, None, None, None, 256]),
    ],
)
def test_windows_of_layers(kind: str, options: dict[str, Any], expected: list[int | None]) -> None:
    attention = [block.attention for block in describe(kind, **options).blocks[: len(expected)]]
    assert [own and own.window for own in attention] == expected


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("exaone4", WINDOW, ["plain", "plain", "plain", "none"]),
        ("exaone4", {"sliding_window": None}, ["plain"] * 4),
        ("exaone4", WINDOW | {"layer_types": ["full_attention"] * 4}, ["none"] * 4),
        ("exaone_moe", WINDOW, ["plain", "plain", "plain", "none"]),
        ("afmoe", WINDOW, ["plain", "plain", "plain", "none"]),
        ("flint", WINDOW, ["none", "none", "plain", "none"]),
        ("kolibri1", WINDOW | {"layer_types": ["full_attention"] * 4}, ["none"] * 4),
        ("kolibri1", {"sliding_window": None}, ["plain"] * 4),
        ("granite_swa", {"layer_rope_theta": [0, 90.0, 0, 90.0]}, ["none", "plain"] * 2),
        ("granite_swa", {"layer_rope_theta": [0, 0, 0, 0]}, ["none"] * 4),
        ("cohere2_moe", WINDOW, ["plain", "plain", "plain", "none"]),
        ("cohere2_moe", WINDOW | {"mlp_layer_types": ["dense"] * 4}, ["plain"] * 4),
    ],
)
def test_layers_without_positions(kind: str, options: dict[str, Any], expected: list[str]) -> None:
    model = describe(kind, **options)
    assert [find_attention(model, layer).rope.kind for layer in range(4)] == expected


def test_layers_have_two_bases() -> None:
    model = describe("granite_swa", layer_rope_theta=[90.0, 5000, 90.0, 5000])
    assert [find_attention(model, layer).rope.theta for layer in range(4)] == [90.0, 5000.0] * 2
    with pytest.raises(UserError, match="3 bases"):
        describe("granite_swa", layer_rope_theta=[90.0, 5000, 90.0, 7])


@in_table
def test_layers_that_are_no_mixture(
    kind: str, options: dict[str, Any], expected: list[int]
) -> None:
    moe = describe(kind, **options).moe
    assert moe is not None and moe.dense_layers == tuple(expected)


def test_caps_of_nanochat() -> None:
    assert describe("nanochat", hidden_act="relu2").logit_softcap == 15
    uncapped = describe("nanochat", hidden_act="relu2", final_logit_softcapping=None)
    assert uncapped.logit_softcap is None


def test_biases_of_internlm3() -> None:
    attention = describe("internlm3", qkv_bias=True, bias=False).attention
    assert (attention.qkv_bias, attention.output_bias) == (True, False)
    model = describe("internlm3", bias=True)
    assert model.attention.output_bias and model.ffn.bias


def test_logits_are_divided_in_granite_and_multiplied_in_hyperclovax() -> None:
    factors = {"logits_scaling": 4.0, "attention_multiplier": 0.1}
    assert describe("granite", **factors).multipliers.logits == 0.25
    assert describe("hyperclovax", **factors).multipliers.logits == 4.0


@in_table
def test_what_cannot_be_computed_is_refused(
    kind: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        describe(kind, **options)


def convert(checkpoint: Path, model: Model, output: Path) -> bytes:
    convert_checkpoint(checkpoint, model, output)
    return (output / "dense.arrow").read_bytes()


def test_norms_without_weights_are_those_whose_weights_are_one(tmp_path: Path) -> None:
    checkpoint = copy_checkpoint("cohere", tmp_path / "checkpoint")
    model = describe_checkpoint(checkpoint, "golden").model
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    norms = [name for name in tensors if "norm" in name]
    save_file(tensors | {name: np.ones_like(tensors[name]) for name in norms}, file)
    expected = convert(checkpoint, model, tmp_path / "with")
    save_file({name: tensors[name] for name in tensors if name not in norms}, file)
    without = model.model_copy(update={"norm": model.norm.model_copy(update={"weights": False})})
    assert convert(checkpoint, without, tmp_path / "without") == expected


def test_older_configurations_of_mimo_say_the_same_in_other_words() -> None:
    layers = {"num_hidden_layers": 4, "num_attention_heads": 8, "v_head_dim": 8}
    newer = describe(
        "mimo_v2_flash",
        **layers,
        sliding_window=17,
        layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        rope_parameters={
            f"{kind}_attention": {"rope_theta": base, "partial_rotary_factor": 0.5}
            for kind, base in (("full", 7e5), ("sliding", 3e3))
        },
    )
    older = describe(
        "mimo_v2_flash", **layers, sliding_window_size=16, hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 0, 1], partial_rotary_factor=0.5, rope_theta=7e5, swa_rope_theta=3e3,
        swa_num_key_value_heads=4, routed_scaling_factor=None,
    )  # fmt: skip
    assert newer == older
    attention, heads = newer.attention, newer.other_heads
    assert (attention.value_width, attention.value_scale) == (8, 0.707)
    assert attention.window_layers == attention.sink_layers == (1, 2)
    assert heads is not None and (heads.layers, heads.kv_heads) == ((1, 2), 4)
    assert (
        describe("mimo_v2_flash", **layers, attention_value_scale=None).attention.value_scale == 1
    )
    with pytest.raises(UserError, match="v_head_dim is 13"):
        describe("mimo_v2_flash", **layers | {"v_head_dim": 13})


def test_an_index_is_described_with_the_layers_that_share_it() -> None:
    latent = {"num_key_value_heads": 4, "v_head_dim": 12, "n_group": 1, "topk_group": 1}
    own = describe("deepseek_v32", index_topk=64, **latent)
    assert own.shape.context == 128
    assert own.attention.index == Index(kind="tokens", heads=64, width=128, chosen=64)
    for options, shared in (
        ({}, ()),
        ({"index_topk_freq": 2}, (2,)),
        ({"index_topk_pattern": "FSFS"}, (1, 3)),
        ({"indexer_types": ["full", "full", "shared", "shared"]}, (2, 3)),
    ):
        index = describe("glm_moe_dsa", **latent, **options).attention.index
        assert index is not None
        assert (index.heads, index.pairs, index.shared_layers) == (32, "neighbours", shared)


@pytest.mark.parametrize("of", ["element", "head"])
def test_gates_of_heads_may_be_a_tensor_of_their_own(of: str, tmp_path: Path) -> None:
    """A store is the same whether gates follow each query head, or have a tensor; one for each
    head is one for each of its elements."""
    checkpoint = copy_checkpoint("qwen3-next", tmp_path / "checkpoint")
    model = describe_checkpoint(checkpoint, "golden").model
    shape, file = model.shape, checkpoint / "model.safetensors"
    tensors = load_file(file)
    apart: dict[str, F16] = {}
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        rows = tensors[name].reshape(shape.heads, 2, shape.head_dim, shape.hidden).copy()
        if of == "head":
            rows[:, 1] = rows[:, 1, :1].copy()
        tensors[name] = rows.reshape(tensors[name].shape)
        gates = rows[:, 1, : 1 if of == "head" else None].reshape(-1, shape.hidden).copy()
        own = rows[:, 0].reshape(shape.query, shape.hidden).copy()
        apart |= {name: own, name.replace("q_proj", "gate_proj"): gates}
    save_file(tensors, file)
    expected = convert(checkpoint, model, tmp_path / "together")
    save_file(tensors | apart, file)
    pattern = model.tensors.query.replace("q_proj", "gate_proj")
    update = {
        "tensors": model.tensors.model_copy(update={"query_gate": pattern}),
        "attention": model.attention.model_copy(update={"output_gate_of": of}),
    }
    assert convert(checkpoint, model.model_copy(update=update), tmp_path / "apart") == expected


def test_minimax_m3_is_read_by_names_of_hub_and_by_those_of_transformers(tmp_path: Path) -> None:
    weights = load_file(copy_checkpoint("minimax-m3", tmp_path / "golden") / "model.safetensors")
    of_hub: dict[str, F16] = {}
    for whole, matrix in weights.items():
        name = whole.replace("layers.1.mlp", "layers.1.block_sparse_moe")
        if ".experts." in name:
            start = name.rpartition(".")[0]
            parts = np.split(matrix, 2, 1) if "gate_up" in name else [matrix]
            for label, part in zip(
                ("w1", "w3") if "gate_up" in name else ("w2",), parts, strict=True
            ):
                for expert, own in enumerate(part):
                    of_hub[f"{start}.{expert}.{label}.weight"] = own.copy()
        elif "gate_up_proj" in name:
            for label, part in zip(("gate", "up"), np.split(matrix, 2), strict=True):
                of_hub[name.replace("gate_up", label)] = part.copy()
        else:
            of_hub[name.replace("gate.e_score", "e_score").replace("indexer.", "index_")] = matrix
    sparse = {
        "sparse_attention_freq": [0, 1], "sparse_block_size": 4, "sparse_topk_blocks": 5,
        "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_local_block": 1,
    }  # fmt: skip
    older: dict[str, Any] = {"moe_layer_freq": [0, 1], "sparse_attention_config": sparse}
    newer = ("mlp_layer_types", "layer_types", "index_block_size", "index_topk_blocks")
    older |= dict.fromkeys(newer)
    stores = []
    for name, tensors, options in (
        ("hub", of_hub, older),
        ("ours", weights, {"index_block_size": 4, "index_topk_blocks": 5}),
    ):
        checkpoint = copy_checkpoint("minimax-m3", tmp_path / name)
        save_file(tensors, checkpoint / "model.safetensors")
        change_config(checkpoint, **options)
        model = describe_checkpoint(checkpoint, "made").model
        assert (model.shape.context, model.norm.weight_offset) == (128, 1)
        index = Index(kind="blocks", heads=2, width=16, chosen=5, block=4, local=1, layers=(1,))
        assert model.attention.index == index
        output = tmp_path / f"{name}-store"
        convert_checkpoint(checkpoint, model, output)
        stores.append({file.name: file.read_bytes() for file in output.rglob("*.arrow")})
    assert stores[0] == stores[1]
