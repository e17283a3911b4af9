"""What a page cache keeps of mapped weights."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.simulate.activations import Hotness
from pi2.simulate.cache import compute_hit_chances
from pi2.simulate.inputs import SimulationInput


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMisses:
    """What a token reads from the file."""

    attention_bytes: float
    """Bytes of the dense weights that are read, all layers together."""
    ffn_share: float
    """Share of the computed neurons that is read."""


def find_page_misses(inputs: SimulationInput) -> PageMisses:
    """Expected misses of a page cache that drops what was not used for longest.

    A dense model is walked through in the same order for every token: if it does not fit, each
    page is dropped just before it is needed again, and nothing is ever found.  Of a mixture of
    experts, what every token uses stays, and beside it the experts of the last tokens.
    """
    workload, choices = inputs.workload, inputs.choices
    if choices.policy != "mmap":
        return PageMisses(attention_bytes=0.0, ffn_share=0.0)
    dense = workload.layers * workload.attention_bytes + workload.head_bytes
    experts = workload.layers * workload.layer_neurons * workload.neuron_bytes
    capacity = choices.page_cache_bytes
    if dense + experts <= capacity:
        return PageMisses(attention_bytes=0.0, ffn_share=0.0)
    capacity *= inputs.constants.page_cache_share
    if workload.experts == 1 or dense > capacity:
        return PageMisses(attention_bytes=dense, ffn_share=1.0)
    hits = compute_hit_chances(
        Hotness(active=1.0, spread=0.0),
        0.0,
        max(capacity - dense, 0.0) / experts,
        workload.chosen,
        0.0,
        inputs.constants.expert_correlation,
    )
    return PageMisses(attention_bytes=0.0, ffn_share=1.0 - float(hits[0]))
