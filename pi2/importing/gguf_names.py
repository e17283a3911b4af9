"""What GGUF files call the tensors that Hugging Face checkpoints have, family by family."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field

from pi2.importing.config import SPLIT_EXPERTS
from pi2.importing.gguf_states import MAMBA_NAMES, STATE_NAMES

_LAYER = "model.layers.{layer}"
_OPT_LAYER = "model.decoder.layers.{layer}"

Names = dict[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""


def _name_both(gguf: str, hugging_face: str) -> Names:
    """A projection or norm: its weight and its bias."""
    return {f"{gguf}.{part}": f"{hugging_face}.{part}" for part in ("weight", "bias")}


_ENDS: Names = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    **_name_both("output_norm", "model.norm"),
}

_ATTENTION: Names = {
    **_name_both("blk.{layer}.attn_norm", f"{_LAYER}.input_layernorm"),
    **_name_both("blk.{layer}.attn_q", f"{_LAYER}.self_attn.q_proj"),
    **_name_both("blk.{layer}.attn_k", f"{_LAYER}.self_attn.k_proj"),
    **_name_both("blk.{layer}.attn_v", f"{_LAYER}.self_attn.v_proj"),
    **_name_both("blk.{layer}.attn_output", f"{_LAYER}.self_attn.o_proj"),
    "blk.{layer}.attn_q_norm.weight": f"{_LAYER}.self_attn.q_norm.weight",
    "blk.{layer}.attn_k_norm.weight": f"{_LAYER}.self_attn.k_norm.weight",
    **_name_both("blk.{layer}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
}

_PREDICTORS: Names = {
    "blk.{layer}.fc1.weight": f"{_LAYER}.mlp.predictor.fc1.weight",
    "blk.{layer}.fc2.weight": f"{_LAYER}.mlp.predictor.fc2.weight",
}

DECODER: Names = {
    **_ENDS,
    **_ATTENTION,
    **_name_both("blk.{layer}.ffn_gate", f"{_LAYER}.mlp.gate_proj"),
    **_name_both("blk.{layer}.ffn_up", f"{_LAYER}.mlp.up_proj"),
    **_name_both("blk.{layer}.ffn_down", f"{_LAYER}.mlp.down_proj"),
    "blk.{layer}.ffn_down_t.weight": f"{_LAYER}.mlp.down_proj.weight",
    **_PREDICTORS,
}

_EXPERTS = {
    part: f"{_LAYER}.block_sparse_moe.experts.{{expert}}.{name}.weight"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}

MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    "blk.{layer}.ffn_gate_inp.weight": f"{_LAYER}.block_sparse_moe.gate.weight",
    **{f"blk.{{layer}}.ffn_{part}_exps.weight": name for part, name in _EXPERTS.items()},
    # One tensor per expert, as files of early 2024 have them.
    **{f"blk.{{layer}}.ffn_{part}.{{expert}}.weight": name for part, name in _EXPERTS.items()},
}

_QWEN_EXPERTS = {
    part: f"{_LAYER}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")
}

QWEN_MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    "blk.{layer}.ffn_gate_inp.weight": f"{_LAYER}.mlp.gate.weight",
    **{f"blk.{{layer}}.ffn_{part}_exps.weight": name for part, name in _QWEN_EXPERTS.items()},
    "blk.{layer}.ffn_gate_inp_shexp.weight": f"{_LAYER}.mlp.shared_expert_gate.weight",
    **{
        f"blk.{{layer}}.ffn_{part}_shexp.weight": f"{_LAYER}.mlp.shared_expert.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}

_POST_NORM = {"blk.{layer}.post_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight"}

QWEN_HYBRID: Names = {**DECODER, **STATE_NAMES, **_POST_NORM}

QWEN_HYBRID_MIXTURE: Names = {**QWEN_MIXTURE, **STATE_NAMES, **_POST_NORM}

_CONVOLUTION = f"{_LAYER}.conv"

LFM2: Names = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    # The norm after the last layer, whatever it is called.
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output_norm.weight": "model.embedding_norm.weight",
    "blk.{layer}.attn_norm.weight": f"{_LAYER}.operator_norm.weight",
    "blk.{layer}.ffn_norm.weight": f"{_LAYER}.ffn_norm.weight",
    **{f"blk.{{layer}}.attn_{n}.weight": f"{_LAYER}.self_attn.{n}_proj.weight" for n in "qkv"},
    "blk.{layer}.attn_output.weight": f"{_LAYER}.self_attn.out_proj.weight",
    "blk.{layer}.attn_q_norm.weight": f"{_LAYER}.self_attn.q_layernorm.weight",
    "blk.{layer}.attn_k_norm.weight": f"{_LAYER}.self_attn.k_layernorm.weight",
    "blk.{layer}.shortconv.conv.weight": f"{_CONVOLUTION}.conv.weight",
    "blk.{layer}.shortconv.in_proj.weight": f"{_CONVOLUTION}.in_proj.weight",
    "blk.{layer}.shortconv.out_proj.weight": f"{_CONVOLUTION}.out_proj.weight",
    "blk.{layer}.ffn_gate.weight": f"{_LAYER}.feed_forward.w1.weight",
    "blk.{layer}.ffn_up.weight": f"{_LAYER}.feed_forward.w3.weight",
    "blk.{layer}.ffn_down.weight": f"{_LAYER}.feed_forward.w2.weight",
}

LFM2_MIXTURE: Names = {
    **LFM2,
    "blk.{layer}.ffn_gate_inp.weight": f"{_LAYER}.feed_forward.gate.weight",
    "blk.{layer}.exp_probs_b.bias": f"{_LAYER}.feed_forward.expert_bias",
    **{
        f"blk.{{layer}}.ffn_{part}_exps.weight": f"{_LAYER}.feed_forward.experts.{{expert}}.{name}"
        for part, name in (("gate", "w1.weight"), ("up", "w3.weight"), ("down", "w2.weight"))
    },
}

_GPT_EXPERTS = f"{_LAYER}.mlp.experts"

GPT_OSS: Names = {
    **_ENDS,
    **_ATTENTION,
    **_POST_NORM,
    "blk.{layer}.attn_sinks.weight": f"{_LAYER}.self_attn.sinks",
    **_name_both("blk.{layer}.ffn_gate_inp", f"{_LAYER}.mlp.router"),
    **{
        f"blk.{{layer}}.ffn_{part}_exps.weight": f"{_GPT_EXPERTS}.{{expert}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
    **{
        f"blk.{{layer}}.ffn_{part}_exps.bias": f"{_GPT_EXPERTS}.{part}_proj_bias"
        for part in ("gate", "up", "down")
    },
}

_GRANITE = f"{_LAYER}.block_sparse_moe"

GRANITE_HYBRID: Names = {
    **DECODER,
    **MAMBA_NAMES,
    "blk.{layer}.ffn_gate_inp.weight": f"{_GRANITE}.router.layer.weight",
    **{
        f"blk.{{layer}}.ffn_{part}_exps.weight": f"{_GRANITE}.experts.{{expert}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
    **{
        f"blk.{{layer}}.ffn_{part}_shexp.weight": f"{_LAYER}.shared_mlp.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}

GEMMA2: Names = {
    **DECODER,
    "blk.{layer}.ffn_norm.weight": f"{_LAYER}.pre_feedforward_layernorm.weight",
    "blk.{layer}.post_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    "blk.{layer}.post_ffw_norm.weight": f"{_LAYER}.post_feedforward_layernorm.weight",
}

_FALCON_LAYER = "transformer.h.{layer}"

FALCON: Names = {
    "token_embd.weight": "transformer.word_embeddings.weight",
    "output.weight": "lm_head.weight",
    **_name_both("output_norm", "transformer.ln_f"),
    **_name_both("blk.{layer}.attn_norm", f"{_FALCON_LAYER}.input_layernorm"),
    **_name_both("blk.{layer}.attn_qkv", f"{_FALCON_LAYER}.self_attention.query_key_value"),
    **_name_both("blk.{layer}.attn_output", f"{_FALCON_LAYER}.self_attention.dense"),
    **_name_both("blk.{layer}.ffn_up", f"{_FALCON_LAYER}.mlp.dense_h_to_4h"),
    **_name_both("blk.{layer}.ffn_down", f"{_FALCON_LAYER}.mlp.dense_4h_to_h"),
    "blk.{layer}.ffn_down_t.weight": f"{_FALCON_LAYER}.mlp.dense_4h_to_h.weight",
}

FALCON_40B: Names = {
    **FALCON,
    **_name_both("blk.{layer}.attn_norm", f"{_FALCON_LAYER}.ln_mlp"),
    **_name_both("blk.{layer}.attn_norm_2", f"{_FALCON_LAYER}.ln_attn"),
}
"""Names in models with two norms, of which the first is that of the FFN."""

PHI3: Names = {
    **DECODER,
    "blk.{layer}.attn_qkv.weight": f"{_LAYER}.self_attn.qkv_proj.weight",
    # Gates and ups in one.
    "blk.{layer}.ffn_up.weight": f"{_LAYER}.mlp.gate_up_proj.weight",
}

STARCODER2: Names = {
    **_ENDS,
    **_ATTENTION,
    **_name_both("blk.{layer}.ffn_up", f"{_LAYER}.mlp.c_fc"),
    **_name_both("blk.{layer}.ffn_down", f"{_LAYER}.mlp.c_proj"),
}

OPT: Names = {
    "token_embd.weight": "model.decoder.embed_tokens.weight",
    "position_embd.weight": "model.decoder.embed_positions.weight",
    "output.weight": "lm_head.weight",
    **_name_both("output_norm", "model.decoder.final_layer_norm"),
    **_name_both("blk.{layer}.attn_norm", f"{_OPT_LAYER}.self_attn_layer_norm"),
    **_name_both("blk.{layer}.attn_q", f"{_OPT_LAYER}.self_attn.q_proj"),
    **_name_both("blk.{layer}.attn_k", f"{_OPT_LAYER}.self_attn.k_proj"),
    **_name_both("blk.{layer}.attn_v", f"{_OPT_LAYER}.self_attn.v_proj"),
    **_name_both("blk.{layer}.attn_output", f"{_OPT_LAYER}.self_attn.out_proj"),
    **_name_both("blk.{layer}.ffn_norm", f"{_OPT_LAYER}.final_layer_norm"),
    **_name_both("blk.{layer}.ffn_up", f"{_OPT_LAYER}.fc1"),
    **_name_both("blk.{layer}.ffn_down", f"{_OPT_LAYER}.fc2"),
    "blk.{layer}.ffn_down_t.weight": f"{_OPT_LAYER}.fc2.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family as GGUF files know it."""

    model_type: str
    """The family's name in ``config.json``."""
    names: Names = field(default_factory=lambda: DECODER)
    activation: str = "silu"
    """Activation of the models of this family, which their files do not state."""
    permutes: bool = False
    """Whether rows of queries and keys are in the order of pairs that follow each other."""
    norm_offset: float = 0.0
    """Number that the file has added to the weights of norms."""
    tiles_values: bool = False
    """Whether value heads that share a key head are apart (`pi2.importing.gguf_states`)."""
    settings: dict[str, object] = field(default_factory=dict)
    """Further keys of the configuration, which files of this family do not state."""


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", permutes=True),
    "bamboo": Architecture(model_type="bamboo", permutes=True, activation="relu"),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "gemma": Architecture(model_type="gemma", activation="gelu_pytorch_tanh", norm_offset=1.0),
    "phi3": Architecture(model_type="phi3", names=PHI3),
    "stablelm": Architecture(model_type="stablelm"),
    "starcoder2": Architecture(
        model_type="starcoder2", names=STARCODER2, activation="gelu_pytorch_tanh"
    ),
    "gemma2": Architecture(
        model_type="gemma2", names=GEMMA2, activation="gelu_pytorch_tanh", norm_offset=1.0
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", names=GEMMA2, activation="gelu_pytorch_tanh", norm_offset=1.0
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", names=QWEN_MIXTURE, settings={"norm_topk_prob": False}
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", names=QWEN_MIXTURE, settings={"norm_topk_prob": True}
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text", names=QWEN_HYBRID, norm_offset=1.0, tiles_values=True
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        names=QWEN_HYBRID_MIXTURE,
        norm_offset=1.0,
        tiles_values=True,
    ),
    # Its projections are apart in a file, as those of Qwen3.5 are; nothing else differs.
    "qwen3next": Architecture(
        model_type="qwen3_5_moe_text", names=QWEN_HYBRID_MIXTURE, norm_offset=1.0
    ),
    "lfm2": Architecture(
        model_type="lfm2", names=LFM2, settings={"block_auto_adjust_ff_dim": False}
    ),
    "arcee": Architecture(model_type="arcee", permutes=True, activation="relu2"),
    "seed_oss": Architecture(model_type="seed_oss", names={**DECODER, **_POST_NORM}),
    "smollm3": Architecture(model_type="smollm3", permutes=True),
    "granite": Architecture(model_type="granite", permutes=True),
    "olmoe": Architecture(
        model_type="olmoe", names=QWEN_MIXTURE, settings={"norm_topk_prob": False}
    ),
    "lfm2moe": Architecture(model_type="lfm2_moe", names=LFM2_MIXTURE),
    "gpt-oss": Architecture(model_type="gpt_oss", names=GPT_OSS, settings={SPLIT_EXPERTS: True}),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        names=GRANITE_HYBRID,
        permutes=True,
        settings={SPLIT_EXPERTS: True},
    ),
    "falcon": Architecture(model_type="falcon", names=FALCON, activation="gelu"),
    "opt": Architecture(model_type="opt", names=OPT, activation="relu"),
}
"""Families by ``general.architecture``."""

_NUMBERED = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)\.weight")


def choose_names(architecture: Architecture, tensors: Container[str], *, mixed: bool) -> Names:
    """Names of a file's family; ``mixed``: it has experts."""
    if architecture.model_type == "falcon" and "blk.0.attn_norm_2.weight" in tensors:
        return FALCON_40B
    return MIXTURE if mixed and architecture.model_type == "llama" else architecture.names


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in a Hugging Face checkpoint."""

    pattern: str
    """The tensor's name in a Hugging Face checkpoint, perhaps with ``{expert}`` in it."""
    kind: str
    """The tensor's name in the file without the layer's number: ``attn_q.weight``."""
    layer: int


def find_place(names: Names, name: str) -> Place | None:
    """The place of the tensor ``name`` of a file; None if no model needs it."""
    numbered = _NUMBERED.fullmatch(name)
    if numbered is None:
        pattern = names.get(name)
        return None if pattern is None else Place(pattern, name, 0)
    layer, kind = int(numbered[1]), numbered[2]
    expert = _EXPERT.fullmatch(kind)
    key = f"blk.{{layer}}.{kind}"
    if expert is not None:
        key = f"blk.{{layer}}.{expert[1]}.{{expert}}.weight"
    pattern = names.get(key)
    if pattern is None:
        return None
    pattern = pattern.replace("{layer}", str(layer))
    if expert is not None:
        pattern = pattern.replace("{expert}", expert[2])
    return Place(pattern, kind, layer)


def name_in_file(names: Names, wanted: str) -> str:
    """What a file calls the tensor ``wanted`` of a Hugging Face checkpoint; ``wanted`` itself if
    no file has it."""
    for name, pattern in names.items():
        parts = re.split(r"\{(\w+)\}", pattern)
        expression = "".join(
            re.escape(part) if index % 2 == 0 else rf"(?P<{part}>\d+)"
            for index, part in enumerate(parts)
        )
        found = re.fullmatch(expression, wanted)
        if found is not None:
            for key, number in found.groupdict().items():
                name = name.replace(f"{{{key}}}", number)
            return name
    return wanted
