"""Every segment is as large as what it has to hold.

Why: sizes follow from the model's shape and quantisation and the plan's settings
(`pi2.plan.arithmetic.sizes` has the formulas), so a plan that cannot work is known before anything
is read: ``attention`` holds the dense weights, ``kv`` the context, ``predictor`` what finds the
active neurons, ``hot`` the resident neurons, ``cold`` at least what one layer activates for a
token, ``workspace`` the activations of a prefill chunk, logits and staging buffers.

Example: ``kv = "1 MiB"`` for a context of 1024 tokens that takes 4 MiB.

Fix: raise the segment, or lower what it is for: ``kv.context``, ``layers.hot``,
``prefill.chunk``, the precision of the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import compare_bytes, write_least

CODE = "P202"
SEVERITY = "error"
NEEDS = ("resolved",)

_REMEDIES = {
    "kv": "lower kv.context",
    "hot": "lower layers.hot",
    "workspace": "lower prefill.chunk",
}


def check(facts: Facts) -> Iterator[Finding]:
    """Compare each segment with its need."""
    resolved = facts.resolved
    for name, need in resolved.needs.items():
        size = getattr(resolved.plan.memory.segments, name)
        if size >= need.bytes:
            continue
        help_text = f'write {name} = "{write_least(need.bytes)}"'
        if name in _REMEDIES:
            help_text += f", or {_REMEDIES[name]}"
        has, needs = compare_bytes(size, need.bytes)
        yield Finding(
            path=("memory", "segments", name),
            message=f"segment {name} has {has} and needs {needs}: {need.explanation}",
            help=help_text,
            origins=_find_origins(resolved, name),
        )


def _find_origins(resolved: ResolvedPlan, segment: str) -> tuple[Origin, ...]:
    shape = resolved.model.shape
    if segment == "kv":
        context = resolved.plan.kv.context
        return (
            Origin(document="plan", path=("kv", "context"), text=f"context = {context}"),
            Origin(
                document="model", path=("shape", "kv_heads"), text=f"kv_heads = {shape.kv_heads}"
            ),
        )
    if segment == "predictor":
        mode = resolved.plan.decode.predictor
        return (
            Origin(document="plan", path=("decode", "predictor"), text=f'predictor = "{mode}"'),
        )
    if segment == "hot":
        settings = {layer.hot_path: layer.hot for layer in resolved.layers}
        return tuple(
            Origin(document="plan", path=path, text=f"hot = {hot}")
            for path, hot in sorted(settings.items(), key=lambda item: -item[1])
        )
    if segment == "workspace":
        chunk = resolved.plan.prefill.chunk
        return (Origin(document="plan", path=("prefill", "chunk"), text=f"chunk = {chunk}"),)
    if segment == "attention":
        return (Origin(document="model", path=("shape",), text="the model's shape"),)
    return (Origin(document="model", path=("shape", "ffn"), text=f"ffn = {shape.ffn}"),)
