"""Which formats of a store keep the weights of a GGUF file without fewer bits than they have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from pi2.formats import find_packing, list_packings
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.gguf_checkpoint import GgufCheckpoint, GgufTensor
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.ffn import list_neuron_sources
from pi2.model.tensor import Place, fill_name
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Quantization

_WIDE, _WIDEST = find_packing("int8"), find_packing("fp16")
_WIDE_BITS = _WIDE.bits + 8 * _WIDE.count_scale_bytes(256) / 256


def keep_bits(checkpoint: Checkpoint, model: Model) -> Model:
    """Return ``model`` with a format for each class of tensors that has the bits of all of its
    tensors in a GGUF file; as it is for other checkpoints, and where they come in a format of
    stores.

    Rows of Q4_0 and Q8_0 are kept bit for bit.  Other blocks, and down projections whose blocks
    run across neurons, get 8 bits, what has more of them fp16: the widest that stores have.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        return model
    own = model.quantization
    kept = {
        key: _find_widest(checkpoint, model, key)
        for key in Quantization.model_fields
        if not find_packing(getattr(own, key)).is_published
    }
    chosen = own.model_copy(update={key: name for key, name in kept.items() if name is not None})
    return model.model_copy(update={"quantization": chosen})


def describe_kept(model: Model) -> str:
    """Return the formats of a model's weights, for people."""
    formats = model.quantization.model_dump()
    return ", ".join(f"{key} {name}" for key, name in formats.items())


def _find_widest(checkpoint: Checkpoint, model: Model, key: str) -> str | None:
    """Return the widest format that tensors of a class need; None if there is no such tensor."""
    tensors, order = checkpoint.tensors, list(list_packings())
    found = {
        _choose(tensors[name], is_across=is_across)
        for name, is_across in _list_names(model, key)
        if name in tensors and len(tensors[name].shape) > 1
    }
    return max(found, key=order.index, default=None)


def _choose(tensor: SourceTensor, *, is_across: bool) -> str:
    if isinstance(tensor, GgufTensor):
        own = tensor.block.name.lower()
        same = next((p for p in list_packings().values() if p.like == own and p.top), None)
        # Blocks lie along the rows of the file.
        if same is not None and tensor.is_turned == is_across and tensor.factors is None:
            return same.name
    bits = 8 * tensor.size_bytes / prod(tensor.shape)
    return _WIDE.name if bits <= _WIDE_BITS else _WIDEST.name


def _list_names(model: Model, key: str) -> Iterator[tuple[str, bool]]:
    """Yield the names of a class of tensors, and whether a store has their columns as rows."""
    names = model.tensors
    if key == "ffn":
        for layer, block in enumerate(model.blocks):
            for source in list_neuron_sources(Place(model, layer), block.ffn):
                yield source.name(names), source.key.endswith("down") != source.is_turned
    elif key == "predictor":
        for layer, expert in product(range(model.shape.layers), range(model.expert_count)):
            for pattern in (names.predictor_in, names.predictor_out):
                yield fill_name(pattern, layer, expert), False
    else:
        wide = dict.fromkeys(Quantization.model_fields, _WIDE.name)
        low, high = (
            list_tensors(model.model_copy(update={"quantization": Quantization(**wide | own)}))
            for own in ({}, {key: _WIDEST.name})
        )
        for tensor, other in zip(low, high, strict=True):
            if tensor.precision != other.precision and tensor.transform != "cutoff":
                yield from ((own.name(names), own.is_turned) for own in tensor.sources if own.key)
