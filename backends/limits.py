"""What units beside the CPU, and GPUs alone, do not compute of any model: for rules."""

from __future__ import annotations

from pi2.formats import name_packings
from pi2.plan.documents.model import Model


def list_unknown_weights(model: Model) -> list[str]:
    """Precisions and norms inside an FFN that such a unit does not know, each as the end of a
    sentence that begins with its name."""
    precisions, limits = model.quantization, []
    tables = name_packings("tables")
    if precisions.ffn not in tables:
        limits.append(f"computes no neurons of {precisions.ffn}")
    if precisions.attention not in tables:
        limits.append(f"computes no projections of {precisions.attention} weights")
    if model.ffn.sub_norm:
        limits.append("computes no neurons whose activations are normalised (ffn.sub_norm)")
    if model.ffn.gate_sparsity:
        limits.append("computes no neurons whose gates have a cutoff (ffn.gate_sparsity)")
    return limits
