"""Sizes of a layer's attention: its matrices and vectors in a store, and what the KV cache keeps of
a token.

What tells the cutoff of a layer's gates for a token, without computing a single gate.

The cutoff is mean + d deviation of the gates G u of all n neurons, with d of the model document.
Their mean is g u, g the mean of the rows of G; and their variance is that of (G - g) u, which is
|R u|^2 / n, where R is a triangular factor: R^T R = (G - g)^T (G - g).  So a matrix of at most
1 + hidden rows gives both: g, then the rows of R times |d| / sqrt(n).  It is exact, it is smaller
than the gates, and it does not matter which neurons are in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pi2.plan.weights.layout import fill_groups

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of latent attention's vectors, as model documents have them."""

    rank: int
    """Elements of what keys and values are made of."""
    query_rank: int | None
    """Elements of what queries are made of; None where they are projected at once."""
    plain: int
    """Elements of a head's query that are not rotated."""
    rotated: int
    epsilon: float
    """Epsilon of the norms of what keys, values and queries are made of."""
    gates: int = 0
    """Gates of what heads have mixed, one for each, or none."""

    @property
    def key(self) -> int:
        """Elements of a head's query."""
        return self.plain + self.rotated

    @property
    def kept(self) -> int:
        """Elements that are kept of a token."""
        return self.rank + self.rotated

    def count_rows(self, heads: int) -> int:
        """Rows of the projection that all of it comes from: queries or what they are made of,
        gates, and what is kept."""
        return (self.query_rank or heads * self.key) + self.gates + self.kept


def describe_latent(model: Model) -> LatentShape | None:
    """The shape of a model's latent attention, if it has any."""
    latent = model.attention.latent
    if latent is None:
        return None
    return LatentShape(
        rank=latent.rank,
        query_rank=latent.query_rank,
        plain=latent.plain,
        rotated=latent.rotated,
        epsilon=latent.epsilon,
        gates=model.shape.heads if model.attention.output_gate else 0,
    )


GATE_CUTOFF = "gate_cutoff"
"""The matrix, of layers whose gates have a cutoff."""


def list_cutoff_matrices(model: Model) -> dict[int, tuple[int, int]]:
    """Rows and length of the matrix of each layer that has one."""
    rows = count_cutoff_rows(model) * (2 if has_remainders(model) else 1)
    return dict.fromkeys(model.cut_layers, (rows, model.shape.stored_hidden))


def count_cutoff_rows(model: Model) -> int:
    """Numbers of which a cutoff is made: the mean, and those of which the deviation is the
    length."""
    return 1 + min(model.shape.ffn, model.shape.hidden)


def find_cutoff_precision(model: Model) -> Literal["int8", "fp16"]:
    """How these matrices are stored: an error of a cutoff is one of all gates."""
    return "fp16" if model.quantization.attention == "fp16" else "int8"


def has_remainders(model: Model) -> bool:
    """Whether as many rows follow that have what fp16 leaves of the first: stores of fp16 hold the
    published weights exactly, and cutoffs are none of them."""
    return find_cutoff_precision(model) == "fp16"


EMBEDDING = "embedding"
HEAD = "head"
HEAD_BIAS = "head_bias"
"""Float32 [1, vocab], of models that have one."""
FINAL_NORM = "final_norm"
FINAL_NORM_BIAS = "final_norm_bias"
POSITIONS = "positions"
"""Learned position vectors, fp16 [context, hidden], that of position 0 first."""

LAYER_EMBEDDING = "layer_embedding"
"""The layers' own embeddings [vocab, layers width]: of a token those of all layers."""
LAYER_PROJECTION = "layer_projection"
"""What is made of the first layer's input beside them [layers width, hidden]."""
LAYER_PROJECTION_NORM = "layer_projection_norm"
"""Float32 [1, width]."""

STREAM_IN = "stream_in"
"""What makes the other residual streams of the embedding, one after the other [(streams - 1)
hidden, hidden]."""
STREAM_OUT = "stream_out"
"""What is made of them after the last layer, likewise."""


def name_layer_tensor(layer: int, kind: str) -> str:
    """Name of a layer's tensor, for example ``layers.3.qkv``.

    Kinds: ``attention_norm`` and ``ffn_norm`` (float32 [1, hidden], what the checkpoint leaves out
    of them added), with ``_bias`` their biases; ``qkv`` [(heads + 2 kv_heads) head_dim, hidden],
    query rows first, then key, then value, then gates of what is mixed if there are some [heads
    head_dim]; ``qkv_bias`` float32 [1, rows of qkv]; ``query_norm`` and ``key_norm`` float32 [1,
    head_dim], or of all heads; ``sinks`` float32 [1, heads]; ``attention_sub_norm`` float32 [1,
    heads head_dim]; ``output`` [hidden, heads head_dim] and ``output_bias`` float32 [1, hidden];
    ``down_bias`` float32 [1, hidden], in a mixture [experts, hidden]; ``attention_output_norm`` and
    ``ffn_output_norm`` float32 [1, hidden]; ``layer_scale`` float32 [1, 1]; ``router`` float32
    [experts, hidden], ``router_bias`` and ``choice_bias`` float32 [1, experts], and
    ``shared_router`` [1, hidden]; ``router_norm`` float32 [1, hidden] and ``expert_scale`` float32
    [1, experts]; ``side_in`` [2 width, hidden], gates and then ups, and ``side_down`` [hidden,
    width] of an FFN beside the experts, ``side_norm``, ``side_output_norm`` and
    ``experts_output_norm`` float32 [1, hidden]; ``layer_input_gate`` [width, hidden] and
    ``layer_input_output`` [hidden, width] of a layer's own embedding, and ``layer_input_norm``
    float32 [1, hidden]; ``laurel_in`` [rank, hidden], ``laurel_out`` [hidden, rank] and
    ``laurel_norm`` float32 [1, hidden]; ``altup_router`` float32 [streams, hidden],
    ``altup_router_norm`` and ``altup_scale`` float32 [1, hidden], ``altup_predict`` float32
    [streams streams, streams] and ``altup_correct`` float32 [streams, streams]; ``gate_cutoff``
    (`pi2.plan.weights.projections`) of layers whose gates have a cutoff; ``predictor_in`` [rank,
    hidden], ``predictor_out`` [ffn, rank] in stored order, ``predictor_bias`` float32 [1, ffn] in
    stored order. In a mixture every expert has a predictor: ``predictor_in`` [experts rank,
    hidden], ``predictor_out`` [experts ffn, rank] and ``predictor_bias`` [1, experts ffn] are those
    of expert 0, 1, ... one after the other, each in stored order. Layers with a state have what
    `pi2.plan.weights.states.list_state_tensors` lists instead of ``qkv``, ``output`` and theirs;
    layers with several mixers have what each of them needs, and ``inner_norm`` float32 [1, hidden]
    before the second, and so on; `name_state_tensor` tells states apart.

    With latent attention ``qkv`` has the rows of queries, or of what they are made of, then of what
    keys and values are made of, then of the rotated key.  ``latent_query_norm`` and ``latent_norm``
    are norms of both vectors; ``latent_query_out`` [heads (plain + rotated), query_rank] gives
    queries; ``latent_key`` [heads rank, plain] turns the plain part of a head's query into one of
    what keys are made of, ``latent_value`` [heads head_dim, rank] what a head has mixed of that
    into its values.

    Rows of query and key (also of their biases and norms) are in an order in which element i of a
    head is rotated with element i + head_dim / 2, whatever the checkpoint's is.
    """
    return f"layers.{layer}.{kind}"


def name_mixer_norm(mixer: int) -> str:
    """Kind of the tensor that is the norm before mixer number ``mixer`` of a layer."""
    return "attention_norm" if mixer == 0 else f"{_name_inner(mixer)}norm"


def name_state_tensor(layer: int, mixer: int, kind: str) -> str:
    """Name of the tensor ``kind`` of a state, which begins with ``state_``; ``mixer``: number of
    the mixer in its layer."""
    return name_layer_tensor(layer, kind if mixer == 0 else _name_inner(mixer) + kind)


def _name_inner(mixer: int) -> str:
    """How kinds of tensors begin that belong to mixer number ``mixer``, which is not the first."""
    return "inner_" if mixer == 1 else f"inner_{mixer}_"


_INNER = re.compile(r"inner_(?:([0-9]+)_)?(norm|state_.+)")


def split_mixer_kind(kind: str) -> tuple[str, int]:
    """What `name_state_tensor` or `name_mixer_norm` made ``kind`` of: a kind that begins with
    ``state_``, or ``inner_norm``, and the number of the mixer; others as they are, with 0."""
    found = _INNER.fullmatch(kind)
    if found is None:
        return kind, 0
    own = "inner_norm" if found[2] == "norm" else found[2]
    return own, int(found[1] or 1)


def is_state_kind(kind: str) -> bool:
    """Whether a tensor of this kind belongs to a state."""
    return split_mixer_kind(kind)[0].startswith("state_")


def list_projections(model: Model) -> Mapping[str, tuple[int, int]]:
    """Rows and length of a layer's matrices, by the kind in their names
    (`pi2.plan.weights.projections`)."""
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
