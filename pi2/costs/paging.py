"""What a page cache keeps of mapped weights."""

from __future__ import annotations

from dataclasses import dataclass

from pi2.costs.activations import Hotness
from pi2.costs.cache import compute_hit_chances
from pi2.costs.constants import Constants
from pi2.costs.flash import Flash
from pi2.costs.sizes import Sizes

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFaults:
    """What a token reads from a mapped file, and how fast that comes."""

    attention_bytes: float
    """Bytes of the dense weights that are read, all layers together."""
    ffn_share: float
    """Share of the computed neurons that is read."""
    byte_s: float
    """Seconds of a byte, read ahead after faults."""


def find_page_faults(
    flash: Flash,
    sizes: Sizes,
    constants: Constants,
    *,
    layers: int,
    neurons: int,
    chosen: float,
    capacity_bytes: float,
) -> PageFaults:
    """Expected misses of a page cache that drops what was not used for longest.

    A dense model is walked through in the same order for every token: if it does not fit, each
    page is dropped just before it is needed again, and nothing is ever found.  Of a mixture of
    experts, what every token uses stays, and beside it the experts of the last tokens.

    ``neurons``: of a layer, all experts together, each of which is ``chosen`` by a token.
    """
    ahead = int(constants.readahead_bytes)
    # The kernel reads ahead while it maps the pages that have come: the slower one decides.
    byte_s = max(
        1.0 / flash.find_rate_bytes_s("sequential", ahead), constants.page_fault_s / _PAGE_BYTES
    )
    dense = float(layers * sizes.projections + sizes.head)
    experts = layers * neurons * sizes.whole_neuron
    if dense + experts <= capacity_bytes:
        return PageFaults(attention_bytes=0.0, ffn_share=0.0, byte_s=byte_s)
    capacity = capacity_bytes * constants.page_cache_share
    if chosen >= 1.0 or dense > capacity:
        return PageFaults(attention_bytes=dense, ffn_share=1.0, byte_s=byte_s)
    hits = compute_hit_chances(
        Hotness(active=1.0, spread=0.0),
        0.0,
        max(capacity - dense, 0.0) / experts,
        chosen,
        0.0,
        constants.expert_correlation,
    )
    return PageFaults(attention_bytes=0.0, ffn_share=1.0 - float(hits[0]), byte_s=byte_s)
