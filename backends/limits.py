"""What units beside the CPU, and executors that share rows with one, do not compute of a model."""

from __future__ import annotations

from collections.abc import Collection

from pi2.formats import name_packings
from pi2.model.options import find_unknown, list_options, read_options
from pi2.plan.arithmetic.units import UnitFacts
from pi2.plan.documents.model import Model

NEURONS = read_options("""
    ffn: activation=relu activation=drelu activation=fatrelu activation=relu2 activation=silu
    ffn: activation=gelu activation=gelu_tanh threshold gated bias absent_layers slope limit
    ffn: up_offset
""")
"""What of an FFN the neurons of a unit compute."""
_UNDIVIDED = {"other_heads", "attention.kv_shared_layers", "altup"}


def list_unknown_formats(model: Model) -> list[str]:
    """Precisions that such a unit does not know, each as the end of a sentence that begins with
    its name."""
    precisions, limits = model.quantization, []
    tables = name_packings("tables")
    if precisions.ffn not in tables:
        limits.append(f"computes no neurons of {precisions.ffn}")
    if precisions.attention not in tables:
        limits.append(f"computes no projections of {precisions.attention} weights")
    return limits


def list_unknown_weights(model: Model) -> list[str]:
    """The same, and options of an FFN."""
    unknown = [key for key in find_unknown(model, NEURONS) if key.startswith("ffn.")]
    return list_unknown_formats(model) + [f"computes no neurons with {key}" for key in unknown]


def list_undivided(facts: UnitFacts, more: Collection[str] = ()) -> list[str]:
    """Options of a model whose rows another unit cannot share, and ``more``, likewise."""
    if facts.resolved.divided_rows is None:
        return []
    options = list_options(facts.resolved.model)
    found = [key for key in options if key.startswith("layers.") or key in _UNDIVIDED | {*more}]
    return [f"cannot divide projections and the head of a model with {key}" for key in found]
