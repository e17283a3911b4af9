"""What a dense unit owns is hot, and all of a model that a unit has as a whole.

Why: a dense unit computes all of its neurons for every token, so that they have to stay in its
memory; ``layers.hot`` says what stays, the unit's neurons included.  A GPU that has the whole model
reads nothing while it computes.

Example: ``split = { npu = 0.5, cpu = 0.5 }`` with ``hot = 0.3``.

Fix: raise ``hot`` to the unit's share at least, or lower the share.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P263"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the largest share of each layer's dense unit with what is hot."""
    seen = set()
    if facts.resolved.has_whole_unit:
        yield from _check_whole(facts)
        return
    for layer in facts.resolved.layers:
        if layer.dense is None or layer.dense.kept <= layer.hot_neurons:
            continue
        if layer.split_path in seen:
            continue
        seen.add(layer.split_path)
        share = layer.dense.kept / facts.resolved.model.layer_neurons
        if layer.dense.kept == layer.dense.by_sequences[0]:
            share = layer.split[layer.dense.unit]
        yield Finding(
            path=layer.hot_path,
            message=f"`{layer.dense.unit}` owns {share:.4g} of the neurons, and only "
            f"{layer.hot:.4g} are hot",
            help=f"write hot = {share:.4g}, or lower the share of `{layer.dense.unit}`",
            origins=(
                Origin(
                    document="plan",
                    path=layer.split_path,
                    text=f"{layer.dense.unit} = {layer.split.get(layer.dense.unit, 0.0):.4g}",
                ),
            ),
        )


def _check_whole(facts: Facts) -> Iterator[Finding]:
    """Everything stays in the memory of a unit that has the whole model."""
    resolved = facts.resolved
    unit, seen = resolved.sparse_unit, set()
    for layer in resolved.layers:
        if layer.hot_neurons == resolved.model.layer_neurons or layer.hot_path in seen:
            continue
        seen.add(layer.hot_path)
        yield Finding(
            path=layer.hot_path,
            message=f"`{unit}` has the whole model in its memory, and only {layer.hot:.4g} of the "
            "neurons are hot",
            help="write hot = 1.0, or give a part of layers.split to a CPU",
            origins=(
                Origin(document="plan", path=layer.split_path, text=f"{unit} has all layers"),
            ),
        )
