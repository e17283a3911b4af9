"""Golden models made such that llama.cpp takes them, which expects of some families what their
published models have: no biases, as many heads of keys as of queries, experts in every layer.

Weights are those of the golden models as far as their shapes suit, else drawn at random.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from pi2.arrays import F32
from tests.helpers.gguf_tensors import read_checkpoint

Weights = dict[str, F32]
Config = dict[str, Any]
_SCALE = 0.15
"""Standard deviation of what is drawn."""


def draw(name: str, *shape: int) -> F32:
    """Weights of a matrix, the same for the same name."""
    seed = np.frombuffer(name.encode(), np.uint8)
    drawn = np.random.default_rng(seed).normal(0.0, _SCALE, shape)
    # Whatever reads the file may read it as halves.
    return drawn.astype(np.float16).astype(np.float32)


def drop_biases(*ends: str, **settings: Any) -> Callable[[Config, Weights], None]:
    """What leaves out tensors with these ends, and changes ``settings`` of the configuration."""

    def change(config: Config, weights: Weights) -> None:
        config |= settings
        for name in [name for name in weights if name.endswith(ends)]:
            del weights[name]

    return change


def repeat_keys(config: Config, weights: Weights) -> None:
    """Let every head of queries have keys and values of its own."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, values in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight", "k_norm.weight")):
            # A norm of all keys together is as long as these; one for each head stays.
            if values.ndim == 2 or config["model_type"] == "olmoe":
                parts = values.reshape(kv_heads, -1, *values.shape[1:])
                repeated = np.repeat(parts, heads // kv_heads, axis=0)
                weights[name] = repeated.reshape(-1, *values.shape[1:])
    config["num_key_value_heads"] = heads


def unclip(config: Config, weights: Weights) -> None:
    """Let OLMoE's queries, keys and values be as they are: llama.cpp does not clip them."""
    repeat_keys(config, weights)
    config["clip_qkv"] = None


def halve_heads(config: Config, weights: Weights) -> None:
    """Let heads of queries be half as many, which together are as wide as the residual stream."""
    config["num_attention_heads"] //= 2
    for name, values in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = values[: len(values) // 2]
        if name.endswith("o_proj.weight"):
            weights[name] = values[:, : values.shape[1] // 2]


def spread_experts(config: Config, weights: Weights) -> None:
    """Let all of ERNIE's layers after the first have the experts of the second."""
    config |= {"moe_layer_interval": 1, "moe_layer_start_index": 1}
    source = "model.layers.1.mlp."
    mixed = {name: values for name, values in weights.items() if name.startswith(source)}
    for layer in range(2, config["num_hidden_layers"]):
        own = f"model.layers.{layer}.mlp."
        for name in [name for name in weights if name.startswith(own)]:
            del weights[name]
        weights |= {name.replace(source, own): values for name, values in mixed.items()}


def equalise_heads(config: Config, weights: Weights) -> None:
    """Let value heads of Qwen's states be as wide as their keys, and whole attention be at the end
    of every few layers."""
    size = config["linear_key_head_dim"]
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    config["linear_value_head_dim"] = size
    hidden = config["hidden_size"]
    shapes = {
        "in_proj_qkvz.weight": (2 * (keys + values) * size, hidden),
        "in_proj_qkv.weight": ((2 * keys + values) * size, hidden),
        "in_proj_z.weight": (values * size, hidden),
        "conv1d.weight": ((2 * keys + values) * size, 1, config["linear_conv_kernel_dim"]),
        "norm.weight": (size,),
        "out_proj.weight": (hidden, values * size),
    }
    for name in weights:
        part = name.partition(".linear_attn.")[2]
        if part in shapes:
            weights[name] = draw(name, *shapes[part])
    if config["layer_types"][0] == "full_attention":
        swap_layers(config, weights, 0, len(config["layer_types"]) - 1)


def equalise_unbiased(config: Config, weights: Weights) -> None:
    """The same without biases of attention."""
    drop_biases("_proj.bias", attention_bias=False)(config, weights)
    equalise_heads(config, weights)


def narrow_queries(config: Config, weights: Weights) -> None:
    """Let DeepSeek V2's queries come from fewer numbers than the residual stream has, and its
    experts be in no groups: llama.cpp chooses those as DeepSeek V3 does, and scales weights to add
    up to 1 where a file says so, which the family's own code does not."""
    config |= {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False}
    rank, key = 16, config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    config["q_lora_rank"] = rank
    for name in [name for name in weights if name.endswith(".q_proj.weight")]:
        start = name.removesuffix("q_proj.weight")
        del weights[name]
        weights |= {
            f"{start}q_a_proj.weight": draw(f"{start}q_a", rank, config["hidden_size"]),
            f"{start}q_a_layernorm.weight": 1 + draw(f"{start}q_norm", rank),
            f"{start}q_b_proj.weight": draw(
                f"{start}q_b", config["num_attention_heads"] * key, rank
            ),
        }


def swap_layers(config: Config, weights: Weights, first: int, second: int) -> None:
    """Let two layers change places."""
    kinds = config["layer_types"]
    kinds[first], kinds[second] = kinds[second], kinds[first]
    places = {f"layers.{first}.": f"layers.{second}.", f"layers.{second}.": f"layers.{first}."}
    moved: Weights = {}
    for name in list(weights):
        for old, new in places.items():
            if old in name:
                moved[name.replace(old, new)] = weights.pop(name)
                break
    weights |= moved


def widen_states(config: Config, weights: Weights) -> None:
    """Let Granite's Mamba-2 be twice as wide as the residual stream, with convolutions of four
    tokens that have biases."""
    hidden, size = config["hidden_size"], config["mamba_d_head"]
    heads, states = 2 * hidden // size, config["mamba_n_groups"] * config["mamba_d_state"]
    config |= {"mamba_expand": 2, "mamba_n_heads": heads, "mamba_d_conv": 4}
    shapes = {
        "in_proj.weight": (4 * hidden + 2 * states + heads, hidden),
        "conv1d.weight": (2 * hidden + 2 * states, 1, 4),
        "norm.weight": (2 * hidden,),
        "out_proj.weight": (hidden, 2 * hidden),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
    }
    for name in weights:
        part = name.partition(".mamba.")[2]
        if part in shapes:
            weights[name] = draw(name, *shapes[part])
    add_biases(config, weights)


def add_biases(config: Config, weights: Weights) -> None:
    """Let Mamba-2's convolutions have biases."""
    config |= dict.fromkeys(("mamba_conv_bias", "use_conv_bias"), True)
    for name, values in list(weights.items()):
        if name.endswith("conv1d.weight"):
            bias = name.replace("weight", "bias")
            weights[bias] = draw(bias, len(values))


def mix_all_blocks(config: Config, weights: Weights) -> None:
    """Let Nemotron-H's dense FFNs be mixtures, too, with the weights of the first."""
    add_biases(config, weights)
    kinds = config["layers_block_type"]
    source = f"backbone.layers.{kinds.index('moe')}.mixer."
    mixed = {name: values for name, values in weights.items() if name.startswith(source)}
    for place, kind in enumerate(kinds):
        if kind != "mlp":
            continue
        own = f"backbone.layers.{place}.mixer."
        for name in [name for name in weights if name.startswith(own)]:
            del weights[name]
        weights |= {name.replace(source, own): values for name, values in mixed.items()}
        kinds[place] = "moe"


SUITING: dict[str, Callable[[Config, Weights], None]] = {
    "arcee": drop_biases("_proj.bias", attention_bias=False, mlp_bias=False),
    "deepseek-v2": narrow_queries,
    "seed-oss": drop_biases(
        "o_proj.bias",
        *(f"{part}_proj.bias" for part in ("gate", "up", "down")),
        attention_out_bias=False,
        mlp_bias=False,
    ),
    "olmo3": drop_biases("_proj.bias", attention_bias=False),
    "granite-hybrid": drop_biases("in_proj.bias", "out_proj.bias", mamba_proj_bias=False),
    "granite-hybrid-dense": widen_states,
    "ernie4-5": drop_biases("_proj.bias", use_bias=False),
    "ernie4-5-moe": spread_experts,
    "nemotron": halve_heads,
    "olmoe": unclip,
    "dots1": repeat_keys,
    "qwen3-5": equalise_unbiased,
    **dict.fromkeys(("qwen3-5-moe", "qwen3-next"), equalise_heads),
    "nemotron-h": drop_biases("in_proj.bias", "out_proj.bias", use_bias=False),
    "nemotron-h-moe": mix_all_blocks,
}
"""What makes a golden model one that llama.cpp takes, by its name."""


def suit_checkpoint(folder: Path) -> None:
    """Change the checkpoint of a golden model, whose name is that of its folder, where llama.cpp
    would not take it."""
    change = SUITING.get(folder.name)
    if change is None:
        return
    config, weights = read_checkpoint(folder)
    change(config, weights)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {key: np.ascontiguousarray(own) for key, own in weights.items()},
        folder / "model.safetensors",
    )
