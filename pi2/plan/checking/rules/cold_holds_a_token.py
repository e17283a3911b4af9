"""The cold segment holds the neurons that one token uses beyond the hot ones.

Why: a cache that is smaller than what one token brings in has lost the first layers' neurons when
the next token comes back to them, so that little of it is used twice.  One that keeps what is used
often (``cache.policy = "lfu"``) works with a quarter of it, but for a mixture whose router names
whole experts (``decode.predictor = "router"``).  The number of neurons is an estimate
from the model's ``sparsity`` and ``predictor``, or what the router chooses in every layer.

Example: ``cold = "40 MiB"`` where a token uses 200 MiB of neurons that are not hot.

Fix: raise ``memory.segments.cold``; where the budget has no room, lower ``kv.context``, or take a
part of ``hot``: fewer hot neurons and a cache that works can be faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pi2.plan.arithmetic.expectations import count_absent
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import approximate_bytes, format_bytes, write_least

CODE = "P204"
SEVERITY = "warning"
NEEDS = ("resolved",)

ENOUGH = {"lru": 1.0, "lfu": 0.25}
"""Part of a token's neurons that the cache has to hold, by its policy."""


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the segment with the absent active neurons of all layers."""
    resolved = facts.resolved
    stride = resolved.bundle.stride
    layers = [resolved.layers[number] for number in resolved.named_layers]
    counts = [count_absent(resolved, number) for number in resolved.named_layers]
    wanted_bytes = round(sum(count or 0.0 for count in counts)) * stride
    neurons = resolved.model.layer_neurons
    absent_bytes = sum(neurons - layer.hot_neurons for layer in layers) * stride
    wanted_bytes = min(wanted_bytes, absent_bytes)
    size = resolved.plan.memory.segments.cold
    policy = resolved.plan.cache.policy
    is_routed = resolved.model.moe is not None and resolved.plan.decode.predictor == "router"
    least_bytes = round((1.0 if is_routed else ENOUGH[policy]) * wanted_bytes)
    if size >= least_bytes or size < resolved.needs.cold.bytes:  # P202 speaks of the latter
        return
    yield Finding(
        path=("memory", "segments", "cold"),
        message=f"segment cold has {format_bytes(size)}, and one token uses about "
        f"{approximate_bytes(wanted_bytes)} of neurons that are not hot"
        + (_explain_experts(resolved) if is_routed else ""),
        help=f'write cold = "{write_least(least_bytes)}", or lower layers.hot to make room',
        origins=(Origin(document="plan", path=("cache", "policy"), text=f'policy = "{policy}"'),),
    )


def _explain_experts(resolved: ResolvedPlan) -> str:
    """What a token of a mixture needs, as a product."""
    model = resolved.model
    size = approximate_bytes(model.shape.ffn * resolved.bundle.stride)
    counts = Counter(
        model.count_active(number)
        for number, layer in enumerate(resolved.layers)
        if layer.hot_neurons < model.layer_neurons
    )
    products = (f"{layers} layers x {experts} experts" for experts, layers in counts.items())
    return f" ({', '.join(products)} of {size})"
