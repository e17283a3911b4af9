"""Who computes which neurons of a layer, and in which memory they lie, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pi2.plan.arithmetic.resolved import DenseShare, ResolvedLayer, ResolvedPlan

_NAMED = {"none": "all of", "router": "those of the chosen experts among"}
"""Which of the neurons that are left the sparse unit computes, where no neuron is predicted."""


def describe_owners(resolved: ResolvedPlan, layer: ResolvedLayer) -> Iterator[str]:
    """What each unit computes of a layer that several units compute, a line for each; nothing of
    one that the sparse unit has alone."""
    dense = layer.dense
    if dense is None:
        return
    kept = "which it keeps"
    if dense.least < dense.kept:
        kept = f"and keeps {name_range(range(dense.kept))}"
    memory = name_memory(resolved, dense.unit)
    yield f"{dense.unit} computes {describe_computed(dense)}, {kept} in {memory}"
    others = range(dense.least, resolved.model.layer_neurons)
    named = _NAMED.get(resolved.plan.decode.predictor, "what is predicted of")
    sparse = f"{resolved.sparse_unit} computes {named} the others"
    if not others:
        yield f"{resolved.sparse_unit} computes none of its neurons"
    elif layer.own_hot:
        yield f"{sparse}; {name_range(layer.own_hot)} stay in memory.segments.hot"
    else:
        yield f"{sparse}; none of them stays in memory"


def describe_computed(dense: DenseShare) -> str:
    """Neurons that a dense unit computes in steps of 1, 2, ... sequences."""
    parts = []
    for count, group in groupby(enumerate(dense.by_sequences, 1), key=lambda item: item[1]):
        steps = [number for number, _ in group]
        parts.append((name_range(range(count)), steps))
    if len(parts) == 1:
        return parts[0][0]
    return ", ".join(f"{neurons} in steps of {_name_steps(steps)}" for neurons, steps in parts)


def _name_steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"{steps[0]} sequence{'s' if steps[0] > 1 else ''}"
    return f"{steps[0]} to {steps[-1]} sequences"


def name_range(neurons: range) -> str:
    """Neurons by their stored indices: ``neurons 0-306``."""
    if len(neurons) <= 1:
        return f"neuron {neurons.start}" if neurons else "no neurons"
    return f"neurons {neurons.start}-{neurons.stop - 1}"


def name_memory(resolved: ResolvedPlan, unit: str) -> str:
    """Where the neurons of a dense unit lie: ``memory.units.gpu, its own memory``."""
    if unit not in resolved.device.units:
        return "memory"
    if not resolved.shares_main_memory(unit):
        return f"memory.units.{unit}, its own memory"
    segment = resolved.name_segment(unit)
    return "memory.segments.hot" if segment == "hot" else f"memory.{segment}, main memory"
