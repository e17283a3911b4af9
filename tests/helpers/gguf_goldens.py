"""Golden models whose GGUF files give their checkpoints' stores, and a comparison of both."""

from pathlib import Path
from typing import Any

from pi2.importing.convert import convert_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization

GOLDENS = (
    *("arcee", "cohere", "cohere2", "deepseek-v2", "deepseek-v3", "dots1", "ernie4-5"),
    *("ernie4-5-moe", "falcon-40b", "falcon-7b-relu", "gemma", "gemma2", "gemma3", "glm4-moe"),
    *("gpt-oss", "granite", "granite-hybrid", "granite-hybrid-dense", "granite-moe"),
    *("granite-moe-shared", "hunyuan-dense", "hunyuan-moe", "lfm2-moe", "lfm2-plain", "llama"),
    *("llama-biases", "llama-linear", "llama-llama3", "llama-odd-widths", "llama-yarn"),
    *("minimax-m2", "mistral-window", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "opt"),
    *("phi3", "phi3-longrope", "phimoe", "qwen2", "qwen2-moe", "qwen3", "qwen3-5", "qwen3-5-moe"),
    *("qwen3-moe", "qwen3-next", "seed-oss", "smollm3", "stablelm", "stablelm-parallel"),
    *("starcoder2", "kimi-linear", "minimax-m3", "bailing-hybrid"),
)


LONG: dict[str, Any] = {
    "rope_type": "longrope", "attention_factor": 1.25, "rope_theta": 10000.0,
    "original_max_position_embeddings": 100, "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
"""LongRoPE with the one factor of sines and cosines that a file has."""


UNSAID: dict[str, dict[str, Any]] = {
    "phi3-longrope": {
        "rope_parameters": LONG
        | {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], "partial_rotary_factor": 0.75}
        | {"long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0]}
    },
    "phimoe": {"rope_parameters": LONG, "router_jitter_noise": 0.01},
    "deepseek-v2": {"attention_bias": False},
    "deepseek-v3": {
        "rope_parameters": {
            "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.8, "beta_fast": 4.0,
            "original_max_position_embeddings": 16, "rope_theta": 100.0, "rope_type": "yarn",
        }
    },
    "dots1": {"sliding_window": None},
    "hunyuan-dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 874339.3}},
    **{key: {"swiglu_limit": 7.0} for key in ("gpt-oss", "minimax-m3")},
    "smollm3": {"no_rope_layer_interval": 4, "no_rope_layers": None, "layer_types": None},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "granite-hybrid": {"time_step_limit": None},
    "granite-hybrid-dense": {"time_step_limit": None},
    "llama-biases": {"hidden_act": "silu"},
    "falcon-7b-relu": {"activation": "gelu"},
    "qwen3-moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "layer_types": None, "sliding_window_pattern": 3},
}  # fmt: skip
"""What GGUF files cannot say, as llama.cpp has it."""


UNNAMED = {"deepseek-v2": ("kv_a_proj_with_mqa.bias", "o_proj.bias")}
"""Ends of names of tensors that GGUF files of a family cannot have."""


def convert(source: Path, store: Path, tokenizer: Path, changes: dict[str, Any]) -> Model:
    """Convert ``source`` with the document that is made from it, with other precisions."""
    model = describe_checkpoint(source, "golden").model
    chosen = model.quantization.model_dump() | changes
    model = model.model_copy(update={"quantization": Quantization.model_validate(chosen)})
    convert_checkpoint(source, model, store, tokenizer=tokenizer)
    return model


def expect_same_weights(one: Path, other: Path) -> None:
    files = sorted(path.relative_to(one) for path in one.rglob("*.arrow"))
    assert len(files) >= 2
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def forget_names(model: Model) -> dict[str, Any]:
    """What must be equal, however the checkpoint is stored."""
    values = model.model_dump(mode="json")
    for key in ("name", "description", "tokenizer"):
        del values[key]
    apart = {"gate_up_order", "experts_turned", "router", "choice_bias"}
    parts = ("fused_", "gate", "up", "down", "shared_")
    for key in list(values["tensors"]):
        if key in apart or key.startswith(("state_", *parts)):
            del values["tensors"][key]
    return values
