"""The one table of a model's tensors: stores, converters, sizes and backends read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pi2.model.attention import list_attention_tensors
from pi2.model.blocks import Attention, Block
from pi2.model.extras import list_own
from pi2.model.ffn import (
    list_cutoff_tensors,
    list_down_biases,
    list_neuron_sources,
    list_predictor_tensors,
    list_router_tensors,
    list_side_tensors,
)
from pi2.model.states import list_state_tensors
from pi2.model.streams import (
    list_embedding_tensors,
    list_head_tensors,
    list_input_norms,
    list_layer_tensors,
)
from pi2.model.tensor import DenseTensor, Place, Source, name_mixer_norm

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


def list_tensors(model: Model, ranks: Sequence[int] | None = None) -> list[DenseTensor]:
    """The dense tensors of ``model`` in their order in stores; ``ranks`` of its predictors by
    layer, None without."""
    whole = Place(model)
    found = list(list_embedding_tensors(whole))
    for layer, block in enumerate(model.blocks):
        found += _list_block(model, layer, block)
        if ranks is not None:
            found += list_predictor_tensors(Place(model, layer), ranks[layer])
    return [*found, *list_head_tensors(whole)]


def _list_block(model: Model, layer: int, block: Block) -> Iterator[DenseTensor]:
    at, ffn = Place(model, layer), block.ffn
    for number, mixer in enumerate(block.mixers):
        own = Place(model, layer, number)
        yield from list_input_norms(own, name_mixer_norm(number))
        if isinstance(mixer, Attention):
            yield from list_attention_tensors(at, mixer)
        elif mixer.shape is not None:
            yield from list_state_tensors(own, mixer.shape)
    if model.norm.outputs:
        yield at.norm("attention_output_norm")
    yield from list_input_norms(at, "ffn_norm", is_there=ffn.kind != "none")
    yield from list_down_biases(at, ffn)
    if model.norm.outputs:
        yield at.norm("ffn_output_norm")
    yield from list_layer_tensors(at)
    for operator, options in list_own(model):
        yield from operator.list_tensors(at, options)
    yield from list_cutoff_tensors(at, ffn)
    yield from list_router_tensors(at, ffn)
    yield from list_side_tensors(at, ffn)


def list_sources(model: Model) -> Iterator[Source]:
    """Everything that a checkpoint must have: what tensors and neurons are made of.  Several may
    be of one tensor."""
    for tensor in list_tensors(model):
        yield from (source for source in tensor.sources if source.key)
    for layer, block in enumerate(model.blocks):
        yield from list_neuron_sources(Place(model, layer), block.ffn)
