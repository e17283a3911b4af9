"""Tensors of tiny models with names, rows and numbers as llama.cpp's converter has them."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32

ARCHITECTURES = {
    "bailing_hybrid": "bailingmoe3", "cohere": "command-r", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2", "deepseek_v32": "deepseek32", "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2", "glm_moe_dsa": "glm-dsa", "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear", "minimax_m2": "minimax-m2", "minimax_m3_vl_text": "minimax-m3",
    "olmo3": "olmo2", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid", "lfm2_moe": "lfm2moe", "mistral": "llama",
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next", "sparsellama": "llama",
}  # fmt: skip
"""Where GGUF's name of a family is not that of transformers."""


_PERMUTED = ("arcee", "bamboo", "granite", "granitehybrid", "granitemoe", "llama", "smollm3")
"""Names of families whose pairs of elements become neighbours."""


_SIMILAR = ("qwen3", "kimi-linear", "glm-dsa")
"""Architectures that know names which others share, where the gguf package has not all of one."""
_OPT = (
    (r"\.decoder\.(?=layers|embed_tokens)", "."),
    (r"\.decoder\.final_layer_norm", ".norm"),
    (r"\.self_attn_layer_norm", ".input_layernorm"),
    (r"\.final_layer_norm", ".post_attention_layernorm"),
    (r"(\.\d+)\.fc", r"\1.mlp.fc"),
)
"""Names of OPT, which the package does not know."""


_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:block_sparse_moe|mlp|feed_forward)\.experts\.(\d+)\.(w[123]|\w+_proj)\.weight"
)


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def write_all(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_tensor(name: str, family: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.decoder.embed_positions"):
        return f"position_embd.{kind}"
    if ".predictor." in stem:
        return f"blk.{stem.split('.')[2]}.{stem.rpartition('.')[2]}.{kind}"
    for old, new in _OPT if family == "opt" else ():
        stem = re.sub(old, new, stem)
    for own in (ARCHITECTURES.get(family, family), *_SIMILAR):
        found = _list_names(own).get(stem)
        if found is not None:
            return f"{found[1]}.{kind}"
    raise AssertionError(name)


@cache
def _list_names(architecture: str) -> Mapping[str, tuple[object, str]]:
    gguf = pytest.importorskip("gguf")
    kinds = {own: kind for kind, own in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        return {}
    found: Mapping[str, tuple[object, str]]
    found = gguf.get_tensor_name_map(kinds[architecture], 32).mapping
    return found


def permute(values: F32, heads: int) -> F32:
    """Rows of queries or keys as llama.cpp has them for Llama: pairs become neighbours."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def stack_groups(values: F32, heads: int, kv_heads: int) -> F32:
    """Rows of Falcon's queries, keys and values one after the other."""
    if kv_heads == 1:
        return values
    grouped = values.reshape(kv_heads, heads // kv_heads + 2, -1, values.shape[-1])
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    return np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])


def translate(weights: Mapping[str, F32], config: Mapping[str, Any]) -> dict[str, F32]:
    family = config["model_type"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    found: dict[str, F32] = {}
    experts: dict[tuple[int, str], list[F32]] = {}
    for name, stored in weights.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            part = _PARTS.get(expert[3]) or expert[3].removesuffix("_proj")
            group = experts.setdefault((int(expert[1]), part), [])
            assert len(group) == int(expert[2])
            group.append(stored)
            continue
        values = stored
        if ".attention." in name:
            name = name.replace(".attention.", ".self_attn.")
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = values
            continue
        special = translate_own(name, values, config) or translate_other(name, values, config)
        if special is not None:
            found |= special
            continue
        if ARCHITECTURES.get(family, family) in _PERMUTED:
            if ".q_proj." in name:
                values = permute(values, heads)
            if ".k_proj." in name:
                values = permute(values, kv_heads)
        if family.startswith(("gemma", "nemotron", "minimax_m3")) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if "query_key_value" in name:
            newer = config["new_decoder_architecture"]
            values = stack_groups(values, heads, config["num_kv_heads"] if newer else 1)
        if ".linear_attn." in name:
            found |= translate_delta(name, values, config)
            continue
        if family.startswith(("qwen3_5", "qwen3_next")) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if ".conv.conv." in name:
            values = values[:, 0]
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        found[name_tensor(name, family)] = values
    for (layer, part), group in experts.items():
        found[f"blk.{layer}.ffn_{part}_exps.weight"] = np.stack(group)
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in scaling:
            factors = np.array(scaling[f"{length}_factor"], np.float32)
            found[f"rope_factors_{length}.weight"] = factors
    if scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _find_divisors(config, scaling)
    return found


def translate_own(name: str, values: F32, config: Mapping[str, Any]) -> dict[str, F32] | None:
    """Tensors of Kimi's delta rule (also Ling's) and of MiniMax M3's FFNs; None of all others."""
    family, place = config["model_type"], name.split(".")
    block, part = f"blk.{place[2]}" if len(place) > 3 else "", ".".join(place[4:])
    if family == "minimax_m3_vl_text" and "gate_up_proj" in name:
        end = "_shexp" if "shared" in name else "_exps" if "experts" in name else ""
        halves = np.split(values, 2, axis=-2)
        return {
            f"{block}.ffn_{own}{end}.weight": v
            for own, v in zip(("gate", "up"), halves, strict=True)
        }
    if family == "minimax_m3_vl_text" and part == "experts.down_proj":
        return {f"{block}.ffn_down_exps.weight": values}
    if family == "minimax_m3_vl_text" and part.startswith("indexer."):
        return {f"{block}.{part}": values + np.float32("norm" in part)}
    if family not in ("kimi_linear", "bailing_hybrid"):
        return None
    is_ling = family == "bailing_hybrid"
    if part == "A_log":
        rates = np.exp(values).reshape(-1, 1)
        return {f"{block}.ssm_a": rates if is_ling else -rates[None, None]}
    if part == "dt_bias":
        return {f"{block}.ssm_dt.bias": values}
    if part.endswith("conv1d.weight"):
        return {f"{block}.ssm_conv1d_{part[0]}.weight": values.reshape(1, len(values), 1, -1)}
    if is_ling and part in ("f_proj.weight", "g_proj.weight"):
        attends = config["layer_types"][int(place[2])] == "full_attention"
        return {f"{block}.{'attn_gate' if attends else f'ssm_{part[0]}_a'}.weight": values}
    if ".block_sparse_moe." in name and part in (f"{own}_proj.weight" for own in _PARTS.values()):
        return {f"{block}.ffn_{part.partition('_')[0]}.weight": values}
    return None


_OTHER = re.compile(
    r"model\.layers\.(\d+)"
    r"\.(mamba|shared_mlp|block_sparse_moe|mlp\.experts|self_attn"
    r")\.(in_proj|conv1d|out_proj|norm|A_log|D|dt_bias|input_linear|output_linear|sinks"
    r"|kv_b_proj|gate_up_proj|down_proj|gate_up_proj_bias|down_proj_bias)(?:\.(weight|bias))?"
)


def translate_other(name: str, values: F32, config: Mapping[str, Any]) -> dict[str, F32] | None:
    """Tensors of Mamba-2, Granite's and gpt-oss's experts and sinks; None of all others."""
    place = _OTHER.fullmatch(name)
    if place is None:
        return None
    block, owner, part, kind = f"blk.{place[1]}", place[2], place[3], place[4]
    if owner == "mamba":
        if part in ("A_log", "D"):
            rates = -np.exp(values) if part == "A_log" else values
            return {f"{block}.ssm_{part[0].lower()}": rates.reshape(-1, 1)}
        if part == "dt_bias":
            return {f"{block}.ssm_dt.bias": values}
        if part == "norm":
            values = values.reshape(config["mamba_n_groups"], -1)
        if part == "conv1d" and kind == "weight":
            values = values[:, 0]
        own = {"in_proj": "in", "out_proj": "out"}.get(part, part)
        return {f"{block}.ssm_{own}.{kind}": values}
    if part == "sinks":
        return {f"{block}.attn_sinks.weight": values}
    if part == "kv_b_proj":
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        stacked = values.reshape(heads, -1, values.shape[1])
        return {
            f"{block}.attn_k_b.weight": stacked[:, :plain].swapaxes(1, 2),
            f"{block}.attn_v_b.weight": stacked[:, plain:],
        }
    if owner in ("shared_mlp", "block_sparse_moe"):
        end = "exps" if owner == "block_sparse_moe" else "shexp"
        suffix = f"_{end}" if config["num_local_experts"] else ""
        if part == "output_linear":
            return {f"{block}.ffn_down{suffix}.weight": values}
        halves = np.split(values, 2, axis=-2)
        names = (f"{block}.ffn_{side}{suffix}.weight" for side in ("gate", "up"))
        return dict(zip(names, halves, strict=True))
    if owner != "mlp.experts":
        return None
    end = "bias" if part.endswith("bias") else "weight"
    rows = values if end == "bias" else values.swapaxes(1, 2)
    if part.startswith("down"):
        return {f"{block}.ffn_down_exps.{end}": rows}
    return {
        f"{block}.ffn_gate_exps.{end}": rows[:, ::2],
        f"{block}.ffn_up_exps.{end}": rows[:, 1::2],
    }


def translate_delta(name: str, values: F32, config: Mapping[str, Any]) -> dict[str, F32]:
    """A tensor of Qwen's layers with a state: the value heads of a key head are taken apart, but in
    files of Qwen3-Next, whose projection is divided instead."""
    start, _, part = name.partition(".linear_attn.")
    block = start.replace("model.layers.", "blk.")
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
    tiles = config["model_type"] != "qwen3_next"

    def tile(rows: F32, size: int) -> F32:
        if not tiles:
            return rows
        parts = rows.reshape(keys, heads // keys, size, *rows.shape[1:])
        return parts.swapaxes(0, 1).reshape(rows.shape)

    if part == "in_proj_qkvz.weight":
        each = values.reshape(keys, -1, values.shape[1])
        ends = [key, 2 * key, 2 * key + heads // keys * value]
        q, k, v, z = (rows.reshape(-1, values.shape[1]) for rows in np.split(each, ends, axis=1))
        return {
            f"{block}.attn_qkv.weight": np.concatenate([q, k, v]),
            f"{block}.attn_gate.weight": z,
        }
    before = 2 * keys * key
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values[:, 0] if part.startswith("conv") else values
        values = np.concatenate([values[:before], tile(values[before:], value)])
    elif part == "in_proj_z.weight":
        values = tile(values, value)
    elif part in ("in_proj_a.weight", "in_proj_b.weight"):
        values = tile(values, 1)
    elif part == "out_proj.weight":
        values = np.ascontiguousarray(tile(np.ascontiguousarray(values.T), value).T)
    elif part == "A_log":
        return {f"{block}.ssm_a": tile(-np.exp(values.astype(np.float32)), 1)}
    elif part == "dt_bias":
        return {f"{block}.ssm_dt.bias": tile(values, 1)}
    return {name_tensor(name, config["model_type"]): values}


def _find_divisors(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> F32:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = scaling.get("rope_theta") or config["rope_theta"]
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for index in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (index / size)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, np.float32)


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, F32]]:
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    return config, {name: values.astype(np.float32) for name, values in weights.items()}
