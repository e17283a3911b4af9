"""Which models `BlockModel` computes: those of whose operators it has all."""

from __future__ import annotations

from pi2.plan.documents.model import Model

_ROPES = ("halves", "neighbours")


def find_unknown(model: Model) -> list[str]:
    """Return what a model has that there are no kernels for, by the keys of its document; empty
    where all of it can be computed."""
    attention, norm, ffn, moe = model.attention, model.norm, model.ffn, model.moe
    ropes = [model.rope, *([] if model.other_rope is None else [model.other_rope])]
    found = {
        "positions": model.positions is not None,
        "layers": any(model.list_mixers(n) != ("attention",) for n in range(model.shape.layers)),
        "moe.router": moe is not None and moe.router not in ("softmax", "sigmoid"),
        "moe.router_input": moe is not None and moe.router_input != "ffn",
        "moe.latent": moe is not None and moe.latent is not None,
        "moe (norm.outputs, ffn.sub_norm)": moe is not None and (norm.outputs or ffn.sub_norm),
        "tensors.experts_turned": moe is not None and model.tensors.experts_turned,
        "tensors.fused_gate_up (moe)": moe is not None and model.tensors.fused_gate_up is not None,
        "side_ffn": model.side_ffn is not None,
        "layer_embedding": model.layer_embedding is not None,
        "altup": model.altup is not None,
        "layer_scale": model.layer_scale,
        "norm.embedding": norm.embedding,
        "rope.pairs": any(own.pairs not in _ROPES for own in ropes),
        "other_heads.keys_are_values": (
            model.other_heads is not None and model.other_heads.keys_are_values
        ),
        "attention.latent": attention.latent is not None,
        "attention.value_width": attention.value_width is not None,
        "attention.value_scale": attention.value_scale != 1.0,
        "attention.value_norm": attention.value_norm,
        "attention.output_gate": attention.output_gate,
        "attention.clip": attention.clip is not None,
        "attention.growth": attention.growth != 0.0,
        "attention.window_kind": attention.window_kind != "sliding",
        "attention.kv_shared_layers": attention.kv_shared_layers > 0,
        "ffn.activation": ffn.activation in ("drelu", "fatrelu"),
        "ffn.absent_layers": bool(ffn.absent_layers),
        "ffn.gate_sparsity": any(ffn.gate_sparsity),
        "ffn.slope": ffn.slope != 1.0 and ffn.limit is None,
        "tensors.fused_order": (
            model.tensors.fused_qkv is not None and model.tensors.fused_order != "stacked"
        ),
        "tensors.gate_up_order": (
            model.tensors.fused_gate_up is not None and model.tensors.gate_up_order != "stacked"
        ),
    }
    return [key for key, is_there in found.items() if is_there]
