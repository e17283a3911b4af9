"""Sizes of a layer's attention: its matrices and vectors in a store, and what the KV cache keeps of
a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pi2.plan.weights.layout import fill_groups
from pi2.plan.weights.tensor_names import (
    LAYER_EMBEDDING,
    LAYER_PROJECTION,
    STREAM_IN,
    STREAM_OUT,
)

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


def list_projections(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of a layer's matrices, by the kind in their names
    (`pi2.plan.weights.tensor_names`)."""
    shape, latent = model.shape, model.attention.latent
    found = {"qkv": (model.qkv_rows, shape.stored_hidden)}
    if latent is not None:
        if latent.query_rank is not None:
            found["latent_query_out"] = (shape.heads * latent.key, fill_groups(latent.query_rank))
        found["latent_key"] = (shape.heads * latent.rank, fill_groups(latent.plain))
        found["latent_value"] = (shape.query, fill_groups(latent.rank))
    found["output"] = (shape.stored_hidden, shape.stored_query)
    return found


def list_projection_vectors(model: Model) -> Mapping[str, int]:
    """Lengths of a layer's vectors, float32, that belong to its attention and are no norms of the
    residual stream."""
    attention, latent = model.attention, model.attention.latent
    found = {"qkv_bias": model.qkv_rows} if attention.has_bias else {}
    if attention.head_norm:
        found["query_norm"], found["key_norm"] = model.head_norm_widths
        if not model.has_keys:
            del found["key_norm"]
    if attention.sub_norm:
        found["attention_sub_norm"] = model.shape.stored_query
    if attention.sinks:
        found["sinks"] = model.shape.heads
    if latent is not None:
        if latent.query_rank is not None:
            found["latent_query_norm"] = fill_groups(latent.query_rank)
        found["latent_norm"] = latent.rank
    if attention.output_bias:
        found["output_bias"] = model.shape.stored_hidden
    return found


def list_side_matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of the matrices of an FFN beside a layer's experts, and of those that lead to
    experts of another width and back; none without them."""
    side, hidden, found = model.side_ffn, model.shape.stored_hidden, dict[str, tuple[int, int]]()
    if side is not None:
        found["side_in"] = ((1 + model.ffn.gated) * model.side_width, hidden)
        found["side_down"] = (hidden, fill_groups(model.side_width))
    if model.moe is not None and model.moe.latent is not None:
        found["experts_in"] = (model.moe.latent, hidden)
        found["experts_out"] = (hidden, fill_groups(model.moe.latent))
    return found


def list_layer_input_matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of the matrices that bring a layer's own embedding into the residual stream;
    none without such embeddings."""
    own, hidden = model.layer_embedding, model.shape.stored_hidden
    if own is None:
        return {}
    return {
        "layer_input_gate": (own.width, hidden),
        "layer_input_output": (hidden, own.stored_width),
    }


def list_laurel_matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of a layer's matrices of LAuReL; none without it."""
    altup, hidden = model.altup, model.shape.stored_hidden
    if altup is None:
        return {}
    return {
        "laurel_in": (altup.laurel_rank, hidden),
        "laurel_out": (hidden, fill_groups(altup.laurel_rank)),
    }


def list_altup_floats(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of a layer's float32 tensors for several residual streams, and of LAuReL's
    norm; none without them."""
    altup, hidden = model.altup, model.shape.stored_hidden
    if altup is None:
        return {}
    streams = altup.streams
    found = {
        "altup_router": (streams, hidden),
        "altup_router_norm": (1, hidden),
        "altup_predict": (streams * streams, streams),
        "altup_correct": (streams, streams),
        "laurel_norm": (1, hidden),
    }
    return found | ({"altup_scale": (1, hidden)} if altup.scaled else {})


def list_stream_matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of what makes residual streams and what joins them; none without them."""
    if model.altup is None:
        return {}
    hidden = model.shape.stored_hidden
    return dict.fromkeys((STREAM_IN, STREAM_OUT), ((model.altup.streams - 1) * hidden, hidden))


def list_layer_embedding_matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of the table of the layers' own embeddings, and of the projection beside it;
    none without such embeddings."""
    own, shape = model.layer_embedding, model.shape
    if own is None:
        return {}
    width = shape.layers * own.width
    return {
        LAYER_EMBEDDING: (own.vocab or shape.vocab, fill_groups(width)),
        LAYER_PROJECTION: (width, shape.stored_hidden),
    }


def list_routing_vectors(model: Model) -> Mapping[str, int]:
    """Lengths of a layer's vectors, float32, that belong to its router, or to an FFN beside its
    experts."""
    moe, hidden = model.moe, model.shape.stored_hidden
    found: dict[str, int] = {}
    if moe is not None and moe.router_input == "stream":
        found["router_norm"] = hidden
    if moe is not None and moe.expert_scale:
        found["expert_scale"] = moe.experts
    if model.side_ffn is not None and model.side_ffn.norms:
        norms = ("side_norm", "side_output_norm", "experts_output_norm")
        found |= dict.fromkeys(norms, hidden)
    return found


def list_kept_vectors(model: Model) -> tuple[int, int, int]:
    """Kinds of vectors that a layer of attention keeps of a token, how many there are of each kind,
    and the elements of each: keys and values, one for every key head; one vector with latent
    attention; no kinds where it reads those of another layer."""
    latent = model.attention.latent
    if not model.has_keys:
        return 0, model.shape.kv_heads, model.shape.head_dim
    if latent is not None:
        return 1, 1, latent.kept
    return 2, model.shape.kv_heads, model.shape.head_dim
