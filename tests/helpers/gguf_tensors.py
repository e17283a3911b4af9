"""Tensors of tiny models with names, rows and numbers as llama.cpp's converter has them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32

ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "sparsellama": "llama",
}
"""Where GGUF's name of a family is not that of transformers."""


_DELTA = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    "in_proj_ba": "ssm_ba",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}


_PERMUTED = ("arcee", "bamboo", "granite", "granitehybrid", "granitemoe", "llama", "smollm3")
"""Names of families whose pairs of elements become neighbours."""


_NAMES = (
    *(
        (rf"model\.layers\.(\d+)\.linear_attn\.{name}", rf"blk.\1.{gguf}")
        for name, gguf in _DELTA.items()
    ),
    (r"model\.layers\.(\d+)\.self_attn\.(q_a|q_b|kv_b)_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa", r"blk.\1.attn_kv_a_mqa"),
    (r"model\.layers\.(\d+)\.self_attn\.(q|kv)_a_layernorm", r"blk.\1.attn_\2_a_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.query_layernorm", r"blk.\1.attn_q_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.key_layernorm", r"blk.\1.attn_k_norm"),
    (r"model\.layers\.(\d+)\.mlp\.gate\.wg", r"blk.\1.ffn_gate_inp"),
    (
        r"model\.layers\.(\d+)\.mlp\.shared_(?:experts|mlp)\.(gate|up|down)_proj",
        r"blk.\1.ffn_\2_shexp",
    ),
    (r"model\.embedding_norm", "token_embd_norm"),
    (r"model\.layers\.(\d+)\.operator_norm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.ffn_norm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.out_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.conv\.(conv|in_proj|out_proj)", r"blk.\1.shortconv.\2"),
    (r"model\.layers\.(\d+)\.feed_forward\.gate", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.mlp\.router", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.block_sparse_moe\.router\.layer", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.feed_forward\.w1", r"blk.\1.ffn_gate"),
    (r"model\.layers\.(\d+)\.feed_forward\.w3", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.feed_forward\.w2", r"blk.\1.ffn_down"),
    (r"model\.(?:decoder\.)?embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.(?:decoder\.)?layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.qkv_proj", r"blk.\1.attn_qkv"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
    (r"model\.layers\.(\d+)\.mlp\.gate_up_proj", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.mlp\.c_fc", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.mlp\.c_proj", r"blk.\1.ffn_down"),
    (r"model\.layers\.(\d+)\.mlp\.predictor\.(fc[12])", r"blk.\1.\2"),
    (r"model\.layers\.(\d+)\.block_sparse_moe\.gate", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.pre_feedforward_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.post_feedforward_layernorm", r"blk.\1.post_ffw_norm"),
    (r"model\.layers\.(\d+)\.mlp\.gate", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert_gate", r"blk.\1.ffn_gate_inp_shexp"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert\.(gate|up|down)_proj", r"blk.\1.ffn_\2_shexp"),
    (r"transformer\.word_embeddings", "token_embd"),
    (r"transformer\.ln_f", "output_norm"),
    (r"transformer\.h\.(\d+)\.(input_layernorm|ln_mlp)", r"blk.\1.attn_norm"),
    (r"transformer\.h\.(\d+)\.ln_attn", r"blk.\1.attn_norm_2"),
    (r"transformer\.h\.(\d+)\.self_attention\.query_key_value", r"blk.\1.attn_qkv"),
    (r"transformer\.h\.(\d+)\.self_attention\.dense", r"blk.\1.attn_output"),
    (r"transformer\.h\.(\d+)\.mlp\.dense_h_to_4h", r"blk.\1.ffn_up"),
    (r"transformer\.h\.(\d+)\.mlp\.dense_4h_to_h", r"blk.\1.ffn_down"),
    (r"model\.decoder\.embed_positions", "position_embd"),
    (r"model\.decoder\.final_layer_norm", "output_norm"),
    (r"model\.decoder\.layers\.(\d+)\.self_attn_layer_norm", r"blk.\1.attn_norm"),
    (r"model\.decoder\.layers\.(\d+)\.self_attn\.out_proj", r"blk.\1.attn_output"),
    (r"model\.decoder\.layers\.(\d+)\.final_layer_norm", r"blk.\1.ffn_norm"),
    (r"model\.decoder\.layers\.(\d+)\.fc1", r"blk.\1.ffn_up"),
    (r"model\.decoder\.layers\.(\d+)\.fc2", r"blk.\1.ffn_down"),
)


_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:block_sparse_moe|mlp|feed_forward)\.experts\.(\d+)\.(w[123]|\w+_proj)\.weight"
)


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def name_tensor(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    for pattern, replacement in _NAMES:
        if re.fullmatch(pattern, stem):
            return f"{re.sub(pattern, replacement, stem)}.{kind}"
    raise AssertionError(name)


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
        special = translate_other(name, values, config)
        if special is not None:
            found |= special
            continue
        if ARCHITECTURES.get(family, family) in _PERMUTED:
            if ".q_proj." in name:
                values = permute(values, heads)
            if ".k_proj." in name:
                values = permute(values, kv_heads)
        if family.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
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
        translated = name_tensor(name)
        newer = family.startswith(
            ("gemma2", "gemma3", "gpt_oss", "olmo", "qwen3_5", "qwen3_next", "seed_oss")
        )
        newer |= family == "glm4_moe"
        if newer and family != "olmoe" and "post_attention" in name:
            translated = translated.replace("ffn_norm", "post_attention_norm")
        found[translated] = values
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


_OTHER = re.compile(
    r"model\.layers\.(\d+)"
    r"\.(mamba|shared_mlp|block_sparse_moe|mlp\.experts|mlp\.gate|mlp\.moe_statics|self_attn"
    r"|feed_forward)\.(in_proj|conv1d|out_proj|norm|A_log|D|dt_bias|input_linear|output_linear|sinks|expert_bias"
    r"|e_score_correction_bias|kv_b_proj|gate_up_proj|down_proj|gate_up_proj_bias|down_proj_bias)(?:\.(weight|bias))?"
)


def translate_other(name: str, values: F32, config: Mapping[str, Any]) -> dict[str, F32] | None:
    """Tensors of Mamba-2, Granite's and gpt-oss's experts, sinks and LFM2's biases of choices; None
    of all others."""
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
    if part in ("sinks", "expert_bias", "e_score_correction_bias"):
        own = "attn_sinks.weight" if part == "sinks" else "exp_probs_b.bias"
        return {f"{block}.{own}": values}
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
    return {name_tensor(name): values}


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
    """Configuration and float32 weights of a Hugging Face folder."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    return config, {name: values.astype(np.float32) for name, values in weights.items()}
