"""What GGUF files of Gemma 3n state, under the names of configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import SourceTensor

_LAYER = "model.layers.{layer}"
_ALTUP = f"{_LAYER}.altup"
_LAUREL = f"{_LAYER}.laurel"
LAYER_EMBEDDING_NAMES = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    "blk.{layer}.inp_gate.weight": f"{_LAYER}.per_layer_input_gate.weight",
    "blk.{layer}.proj.weight": f"{_LAYER}.per_layer_projection.weight",
    "blk.{layer}.post_norm.weight": f"{_LAYER}.post_per_layer_input_norm.weight",
}
"""Names of embeddings of layers and their projections, which Gemma 4 has as well."""
GEMMA3N_NAMES = {
    **LAYER_EMBEDDING_NAMES,
    # A matrix for each of the streams but the first, in one tensor as those of experts are.
    "altup_proj.weight": "model.altup_projections.{expert}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{expert}.weight",
    "blk.{layer}.altup_router.weight": f"{_ALTUP}.modality_router.weight",
    "blk.{layer}.altup_router_norm.weight": f"{_ALTUP}.router_norm.weight",
    "blk.{layer}.altup_predict_coef.weight": f"{_ALTUP}.prediction_coefs.weight",
    "blk.{layer}.altup_correct_coef.weight": f"{_ALTUP}.correction_coefs.weight",
    "blk.{layer}.altup_correct_scale.weight": f"{_ALTUP}.correct_output_scale",
    "blk.{layer}.laurel_l.weight": f"{_LAUREL}.linear_left.weight",
    "blk.{layer}.laurel_r.weight": f"{_LAUREL}.linear_right.weight",
    "blk.{layer}.laurel_post_norm.weight": f"{_LAUREL}.post_laurel_norm.weight",
}
"""Names of transformers by those of files, beside those that earlier families have."""


def read_gemma3n(metadata: Metadata, config: dict[str, Any], activation: str) -> dict[str, Any]:
    """The configuration, but for what tensors alone tell.  `UserError` P532 as `Metadata.read`."""
    read, count, layers = metadata.read, metadata.read_count, config["num_hidden_layers"]
    narrow = metadata.read_flags("{arch}.attention.sliding_window_pattern", layers)
    narrow = [(layer + 1) % 5 != 0 for layer in range(layers)] if narrow is None else narrow
    return {
        "hidden_activation": activation,
        "num_key_value_heads": count("{arch}.attention.head_count_kv"),
        "head_dim": count("{arch}.attention.key_length"),
        "intermediate_size": count("{arch}.feed_forward_length"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in narrow],
        "sliding_window": count("{arch}.attention.sliding_window"),
        "num_kv_shared_layers": read("{arch}.attention.shared_kv_layers", int, 0),
        "hidden_size_per_layer_input": read("{arch}.embedding_length_per_layer_input", int, 0),
        "altup_active_idx": read("{arch}.altup.active_idx", int, 0),
        "altup_num_inputs": count("{arch}.altup.num_inputs"),
        "rms_norm_eps": read("{arch}.attention.layer_norm_rms_epsilon", float),
        "final_logit_softcapping": read("{arch}.final_logit_softcapping", float, 30.0),
        "activation_sparsity_pattern": read_shares(metadata, layers),
        "rope_theta": read("{arch}.rope.freq_base", float, 1_000_000.0),
        "rope_local_base_freq": read("{arch}.rope.freq_base_swa", float, 10_000.0),
    }


def read_shares(metadata: Metadata, layers: int) -> list[float] | None:
    """Shares of gates that cutoffs close: files state how many standard deviations above the mean
    the cutoffs are, and -infinity where there is none."""
    key = "{arch}.activation_sparsity_scale"
    scales = metadata.read_numbers(key, layers)
    if scales is None:
        return None
    if not all(scale < math.inf for scale in scales):
        raise metadata.refuse(f"{key} has a number that is no cutoff")
    # Files have 32 bits of what people wrote in decimals; below -infinity lies nothing.
    return [round(NormalDist().cdf(scale), 6) for scale in scales]


def complete_gemma3n(config: dict[str, Any], tensors: Mapping[str, SourceTensor]) -> None:
    """Add what tensors tell: LAuReL's rank, and how many tokens have embeddings of layers."""
    laurel = tensors.get("model.layers.0.laurel.linear_left.weight")
    if laurel is not None:
        config["laurel_rank"] = laurel.shape[0]
    table = tensors.get("model.embed_tokens_per_layer.weight")
    if table is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
