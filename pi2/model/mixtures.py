"""Mixtures of number formats: which format each matrix of a model gets.

They are llama.cpp's of the same name: values, the down projections of a part of the layers, and the
head err most and get more bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.formats import find_format
from pi2.model.ffn import list_neuron_sources
from pi2.model.tensor import Place, Source
from pi2.model.tensors import list_tensors

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

_FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""What rows get that are no multiple of 256."""
_PLAIN, _EXACT = "f16", "f32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Formats by the part of a model."""

    name: str
    number: int
    """What ``general.file_type`` of GGUF files calls it."""
    base: str
    careful: str
    """Of values and of down projections, in the layers that `takes_care` names."""
    fused: str
    """Of queries, keys and values in one matrix."""
    head: str

    def choose(self, source: Source, model: Model) -> str:
        """Return the format of a matrix, whatever the length of its rows is."""
        key, layers = source.key, model.shape.layers
        if key == "head" or (key == "embedding" and model.tied_head):
            return self.head
        if key == "fused_qkv":
            return self.fused
        is_sensitive = key == "value" or key.endswith("down")
        return self.careful if is_sensitive and takes_care(source.layer, layers) else self.base


def takes_care(layer: int, layers: int) -> bool:
    """Whether a layer is one of the first and last eighth, or every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


MIXTURES: Mapping[str, Mixture] = {
    own.name: own
    for own in (
        Mixture(name="q4_0", number=2, base="q4_0", careful="q4_0", fused="q4_0", head="q6_k"),
        Mixture(name="q4_k_m", number=15, base="q4_k", careful="q6_k", fused="q5_k", head="q6_k"),
        Mixture(name="q5_k_m", number=17, base="q5_k", careful="q6_k", fused="q6_k", head="q6_k"),
        Mixture(name="q6_k", number=18, base="q6_k", careful="q6_k", fused="q6_k", head="q6_k"),
        Mixture(name="q8_0", number=7, base="q8_0", careful="q8_0", fused="q8_0", head="q8_0"),
    )
}


def choose_formats(
    shapes: Mapping[str, tuple[int, ...]], model: Model, mixture: Mixture
) -> dict[str, str]:
    """Return the format of each of a model's tensors by its name in a checkpoint, which has these
    ``shapes``; vectors and what a store keeps in float32 stay that."""
    found: dict[str, str] = {}
    for source, is_exact in _list_all(model):
        name = source.name(model.tensors)
        if name not in shapes or name in found:
            continue
        shape = shapes[name]
        is_plain = is_exact or len(shape) < 2
        found[name] = _EXACT if is_plain else fit_width(mixture.choose(source, model), shape[-1])
    return found


def fit_width(name: str, width: int) -> str:
    """Return ``name``, or the format nearest to it whose blocks fill rows of ``width``."""
    while width % find_format(name).block:
        name = _FALLBACKS.get(name, _PLAIN)
    return name


def _list_all(model: Model) -> Iterator[tuple[Source, bool]]:
    """Yield what a checkpoint must have, and whether a store keeps it in float32."""
    for tensor in list_tensors(model):
        yield from ((own, tensor.packing.is_float32) for own in tensor.sources if own.key)
    for layer, block in enumerate(model.blocks):
        yield from ((own, False) for own in list_neuron_sources(Place(model, layer), block.ffn))
