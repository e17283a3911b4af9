"""What GGUF files call the tensors that Hugging Face checkpoints have, family by family."""

from __future__ import annotations

from pi2.importing.gguf_families import (
    BITNET_NAMES,
    GEMMA3N_NAMES,
    GEMMA4_NAMES,
    LLAMA4_NAMES,
    NEMOTRON_HYBRID_NAMES,
)
from pi2.importing.gguf_states import MAMBA_NAMES, STATE_NAMES

_LAYER = "model.layers.{layer}"
_OPT_LAYER = "model.decoder.layers.{layer}"

Names = dict[str, str]
"""Name in a Hugging Face checkpoint by name in a GGUF file; ``{layer}`` stands for a number."""


def _name_both(gguf: str, hugging_face: str) -> Names:
    return {f"{gguf}.{part}": f"{hugging_face}.{part}" for part in ("weight", "bias")}


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_W = ("w1", "w3", "w2")


def _name_ffn(block: str, end: str = "", names: tuple[str, str, str] = _PROJECTIONS) -> Names:
    """Weights of gates, ups and downs, which ``block`` calls ``names``; ``end`` is that of their
    names in the file."""
    return {
        f"blk.{{layer}}.ffn_{part}{end}.weight": f"{block}.{name}.weight"
        for part, name in zip(("gate", "up", "down"), names, strict=True)
    }


def _name_experts(block: str, names: tuple[str, str, str] = _PROJECTIONS) -> Names:
    return _name_ffn(f"{block}.experts.{{expert}}", "_exps", names)


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

BITNET: Names = {**DECODER, **BITNET_NAMES}

_SPARSE_BLOCK = f"{_LAYER}.block_sparse_moe"

MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    "blk.{layer}.ffn_gate_inp.weight": f"{_SPARSE_BLOCK}.gate.weight",
    **_name_experts(_SPARSE_BLOCK, _W),
    # One tensor per expert, as files of early 2024 have them.
    **_name_ffn(f"{_SPARSE_BLOCK}.experts.{{expert}}", ".{expert}", _W),
}

_HEAD_BIAS: Names = {"output.bias": "lm_head.bias"}

QWEN2: Names = {**DECODER, **_HEAD_BIAS}

PHI_MIXTURE: Names = {**MIXTURE, **_HEAD_BIAS}

MINIMAX: Names = {
    **MIXTURE,
    "blk.{layer}.exp_probs_b.bias": f"{_SPARSE_BLOCK}.e_score_correction_bias",
}

LLAMA4: Names = {**_ENDS, **_ATTENTION, **LLAMA4_NAMES}

_MLP = f"{_LAYER}.mlp"

QWEN_MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    "blk.{layer}.ffn_gate_inp.weight": f"{_MLP}.gate.weight",
    **_name_experts(_MLP),
    "blk.{layer}.ffn_gate_inp_shexp.weight": f"{_MLP}.shared_expert_gate.weight",
    **_name_ffn(f"{_MLP}.shared_expert", "_shexp"),
}

SIGMOID_MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    **_name_ffn(_MLP),
    "blk.{layer}.ffn_gate_inp.weight": f"{_MLP}.gate.weight",
    "blk.{layer}.exp_probs_b.bias": f"{_MLP}.gate.e_score_correction_bias",
    **_name_experts(_MLP),
    **_name_ffn(f"{_MLP}.shared_experts", "_shexp"),
}
"""Names of DeepSeek's mixtures, which others have taken over."""

ERNIE_MIXTURE: Names = {
    **SIGMOID_MIXTURE,
    "blk.{layer}.exp_probs_b.bias": f"{_MLP}.moe_statics.e_score_correction_bias",
}

LATENT: Names = {
    **SIGMOID_MIXTURE,
    **{
        f"blk.{{layer}}.attn_{name}.weight": f"{_LAYER}.self_attn.{original}.weight"
        for name, original in (
            ("q_a", "q_a_proj"),
            ("q_a_norm", "q_a_layernorm"),
            ("q_b", "q_b_proj"),
            ("kv_a_mqa", "kv_a_proj_with_mqa"),
            ("kv_a_norm", "kv_a_layernorm"),
            # Files of before May 2025 have it in one.
            ("kv_b", "kv_b_proj"),
            ("k_b", "k_b_proj"),
            ("v_b", "v_b_proj"),
        )
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
    **_name_ffn(f"{_LAYER}.feed_forward", names=_W),
}

LFM2_MIXTURE: Names = {
    **LFM2,
    "blk.{layer}.ffn_gate_inp.weight": f"{_LAYER}.feed_forward.gate.weight",
    "blk.{layer}.exp_probs_b.bias": f"{_LAYER}.feed_forward.expert_bias",
    **_name_experts(f"{_LAYER}.feed_forward", _W),
}

GPT_OSS: Names = {
    **_ENDS,
    **_ATTENTION,
    **_POST_NORM,
    "blk.{layer}.attn_sinks.weight": f"{_LAYER}.self_attn.sinks",
    **_name_both("blk.{layer}.ffn_gate_inp", f"{_MLP}.router"),
    **_name_experts(_MLP),
    **{
        f"blk.{{layer}}.ffn_{part}_exps.bias": f"{_MLP}.experts.{part}_proj_bias"
        for part in ("gate", "up", "down")
    },
}

GRANITE: Names = {
    **DECODER,
    "blk.{layer}.ffn_gate_inp.weight": f"{_SPARSE_BLOCK}.router.layer.weight",
    **_name_experts(_SPARSE_BLOCK),
    **_name_ffn(f"{_LAYER}.shared_mlp", "_shexp"),
}

GRANITE_HYBRID: Names = {**GRANITE, **MAMBA_NAMES}

_HEAD_NORMS: Names = {
    "blk.{layer}.attn_q_norm.weight": f"{_LAYER}.self_attn.query_layernorm.weight",
    "blk.{layer}.attn_k_norm.weight": f"{_LAYER}.self_attn.key_layernorm.weight",
}

HUNYUAN: Names = {**DECODER, **_HEAD_NORMS}

HUNYUAN_MIXTURE: Names = {
    **_ENDS,
    **_ATTENTION,
    **_HEAD_NORMS,
    "blk.{layer}.ffn_gate_inp.weight": f"{_MLP}.gate.wg.weight",
    **_name_experts(_MLP),
    **_name_ffn(f"{_MLP}.shared_mlp", "_shexp"),
}

_OUTPUT_NORMS: Names = {
    "blk.{layer}.post_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    "blk.{layer}.post_ffw_norm.weight": f"{_LAYER}.post_feedforward_layernorm.weight",
}

OLMO2: Names = {**DECODER, **_OUTPUT_NORMS}

GLM_MIXTURE: Names = {**SIGMOID_MIXTURE, **_POST_NORM}

SEED_OSS: Names = {**DECODER, **_POST_NORM}

GEMMA2: Names = {
    **DECODER,
    **_OUTPUT_NORMS,
    "blk.{layer}.ffn_norm.weight": f"{_LAYER}.pre_feedforward_layernorm.weight",
}

GEMMA3N: Names = {**GEMMA2, **GEMMA3N_NAMES}

GEMMA4: Names = {**GEMMA2, **GEMMA4_NAMES}

NEMOTRON_HYBRID: Names = {**NEMOTRON_HYBRID_NAMES}

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
