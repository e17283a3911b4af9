"""What GGUF files state of mixtures of experts, under the names of configurations."""

from __future__ import annotations

from typing import Any

from pi2.importing.config import NORMALISED_EXPERTS
from pi2.importing.gguf_metadata import Metadata

_NAMES: dict[str, tuple[str, ...]] = {
    "expert_count": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
    "leading_dense_block_count": (
        "first_k_dense_replace",
        "moe_layer_start_index",
        "num_dense_layers",
    ),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob", NORMALISED_EXPERTS),
}
"""What families call the number that a file states under a key."""
_ABSENT: dict[str, int | float | bool] = {
    "expert_shared_count": 0,
    "leading_dense_block_count": 0,
    "interleave_moe_layer_step": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": False,
}
"""What counts where a file does not state a key."""


def read_experts(metadata: Metadata, ffn: int) -> dict[str, Any]:
    """Numbers and sizes of experts; ``ffn``: the size of dense layers.

    Raises `UserError` P532 as `Metadata.read`.
    """
    read = metadata.read
    config: dict[str, Any] = {}
    for key, names in _NAMES.items():
        default = _ABSENT.get(key)
        kind = int if default is None else type(default)
        value = read(f"{{arch}}.{key}", kind, default)
        config |= dict.fromkeys(names, value)
    shared = read("{arch}.expert_shared_feed_forward_length", int, 0)
    return config | {
        "moe_intermediate_size": read("{arch}.expert_feed_forward_length", int, ffn),
        "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
    }
