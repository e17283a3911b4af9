"""Which rows of a checkpoint's tensors become which tensor of a layer with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pi2.arrays import F32, I64
from pi2.importing.gguf_states import RateLogarithms
from pi2.importing.rows import Rows, fill_name
from pi2.importing.safetensors_file import SourceTensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.projections import split_mixer_kind
from pi2.plan.weights.states import StateShape, describe_state

_PART_NORMS = ("state_step_norm", "state_key_norm", "state_query_norm")
"""Weights that are one tensor of a store, one after the other."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes in the checkpoint by key of ``model.tensors``."""


def list_state_shapes(model: Model) -> Shapes:
    """Tensors of a layer with a state, and their shapes in the checkpoint."""
    shape = _describe(model)
    hidden, order, heads = model.shape.hidden, model.tensors.state_order, shape.value_heads
    keys, values = shape.key_heads * shape.key_dim, shape.width
    needs: Shapes = {"state_convolution": (shape.channels, 1, shape.kernel)}
    if order == "single":
        for name, rows in (("in", keys), ("key", keys), ("value", values)):
            needs[f"state_{name}"] = (rows, hidden)
        for name, rows in (("", keys), ("key_", keys), ("value_", values)):
            needs[f"state_{name}convolution"] = (rows, 1, shape.kernel)
    elif order == "separate":
        needs["state_in"] = (shape.channels, hidden)
    if order in ("single", "separate"):
        needs["state_gate"] = (shape.gate_rank or values, hidden)
        needs["state_beta"] = (heads, hidden)
        needs["state_alpha"] = (shape.decay_rank or shape.decays, hidden)
        needs |= _list_rank_shapes(shape)
    elif order == "grouped":
        needs |= {"state_in": (shape.rows, hidden), "state_beta": (2 * heads, hidden)}
    else:
        needs["state_in"] = (shape.rows + shape.gates, hidden)
    if shape.projection_bias:
        needs |= {"state_in_bias": needs["state_in"][:1], "state_output_bias": (hidden,)}
    if shape.convolution_bias:
        needs["state_convolution_bias"] = (shape.channels,)
    if shape.kind == "mamba1":
        channels, keys, rank = shape.width, shape.key_dim, shape.step_rank
        needs |= {"state_parts": (shape.parts, channels), "state_steps": (channels, rank)}
        if shape.part_norm == "weighted":
            needs |= {"state_step_norm": (rank,)}
            needs |= dict.fromkeys(("state_key_norm", "state_query_norm"), (keys,))
        needs |= {"state_decay": (channels, keys), "state_step": (channels,)}
        needs["state_skip"] = (channels,)
    elif shape.kind != "convolution":
        needs |= {"state_decay": (heads,), "state_step": (shape.decays,)}
        needs["state_norm"] = (shape.width if shape.kind == "mamba" else shape.value_dim,)
    if shape.kind == "mamba":
        needs["state_skip"] = (heads,)
    needs["state_output"] = (hidden, shape.width)
    return needs


def _list_rank_shapes(shape: StateShape) -> Shapes:
    needs: Shapes = {}
    if shape.decay_rank:
        needs["state_decays"] = (shape.decays, shape.decay_rank)
    if shape.gate_rank:
        needs["state_output_gates"] = (shape.width, shape.gate_rank)
    return needs


def find_state_rows(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int
) -> list[Rows]:
    """Rows of a matrix of the store, ``state_in``, ``state_gates`` or ``state_output``, and of
    ``state_in_bias``, one after the other; ``inner_state_in`` is that of the layer's second mixer,
    and so on."""
    kind, mixer = split_mixer_kind(kind)

    def take(key: str, index: I64 | None = None) -> Rows:
        name = fill_name(getattr(model.tensors, key), layer, mixer=mixer)
        return Rows(tensor=tensors[name], index=index)

    return [take(key, index) for key, index in _list_rows(model, _describe(model), kind)]


def _list_rows(model: Model, shape: StateShape, kind: str) -> Iterator[tuple[str, I64 | None]]:
    order = model.tensors.state_order
    is_open = order in ("single", "separate")
    if kind == "state_in" and is_open:
        keys = ("state_in", *(("state_key", "state_value") if order == "single" else ()))
        yield from ((key, None) for key in (*keys, *(() if shape.gate_rank else ("state_gate",))))
    elif kind == "state_gates" and is_open:
        keys = ("state_beta", "state_alpha", *(("state_gate",) if shape.gate_rank else ()))
        yield from ((key, None) for key in keys)
    elif kind == "state_in" and order == "grouped":
        yield "state_in", _ungroup(shape)
    elif kind == "state_gates" and order == "grouped":
        together = shape.value_heads // shape.key_heads
        pairs = np.arange(shape.gates).reshape(shape.key_heads, 2, together)
        yield "state_beta", pairs.transpose(1, 0, 2).reshape(-1)
    elif kind in ("state_in", "state_in_bias") and order == "mamba":
        yield kind, _order_mamba(shape)
    elif kind == "state_gates" and order == "mamba":
        yield "state_in", np.arange(shape.gates) + shape.rows
    else:
        yield kind, None


def _ungroup(shape: StateShape) -> I64:
    values = shape.value_heads // shape.key_heads * shape.value_dim
    sizes = (shape.key_dim, shape.key_dim, values, values)
    rows = np.arange(shape.rows).reshape(shape.key_heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def _order_mamba(shape: StateShape) -> I64:
    return np.concatenate([_order_channels(shape) + shape.width, np.arange(shape.width)])


def _order_channels(shape: StateShape) -> I64:
    keys = shape.key_heads * shape.key_dim
    values, before, after = np.split(np.arange(shape.channels), [shape.width, shape.width + keys])
    return np.concatenate([after, before, values])


def read_state_vector(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int
) -> tuple[F32, SourceTensor]:
    """A float32 tensor [rows, length] of the store, and where it comes from."""
    shape = _describe(model)
    sources = list_vector_sources(tensors, model, kind, layer)
    kind, tensor = split_mixer_kind(kind)[0], sources[0]
    if kind == "state_part_norm":
        return np.concatenate([source.read().reshape(1, -1) for source in sources], axis=1), tensor
    is_rate = isinstance(tensor, RateLogarithms)
    values = tensor.source.read() if isinstance(tensor, RateLogarithms) else tensor.read()
    if kind == "state_convolution":
        every = [values, *(source.read() for source in sources[1:])]
        values = np.concatenate([each.reshape(-1, shape.kernel) for each in every]).T
    elif kind == "state_decay" and shape.kind == "mamba1":
        values = values.T
    else:
        values = values.reshape(1, -1)
    if kind == "state_decay" and not is_rate:
        values = -np.exp(values)
    if model.tensors.state_order == "mamba":
        if kind.startswith("state_convolution"):
            values = values[:, _order_channels(shape)]
        if kind == "state_step" and _has_step_bias(model):
            values = values + sources[1].read()[shape.rows :]
        if kind == "state_in_bias":
            values = values[:, _order_mamba(shape)]
    return np.ascontiguousarray(values), tensor


def list_vector_sources(
    tensors: Mapping[str, SourceTensor], model: Model, kind: str, layer: int
) -> list[SourceTensor]:
    """What `read_state_vector` reads."""
    kind, mixer = split_mixer_kind(kind)
    keys = list(_PART_NORMS) if kind == "state_part_norm" else [kind]
    if kind == "state_step" and _has_step_bias(model):
        keys.append("state_in_bias")
    if kind == "state_convolution" and model.tensors.state_order == "single":
        keys += ["state_key_convolution", "state_value_convolution"]
    names = (getattr(model.tensors, key) for key in keys)
    return [tensors[fill_name(name, layer, mixer=mixer)] for name in names]


def _has_step_bias(model: Model) -> bool:
    return model.tensors.state_order == "mamba" and _describe(model).projection_bias


def _describe(model: Model) -> StateShape:
    shape = describe_state(model)
    assert shape is not None, "a rule says so first"
    return shape
