"""Names of the dense tensors in a neuron store."""

from __future__ import annotations

import re

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
    (`pi2.plan.weights.cutoffs`) of layers whose gates have a cutoff; ``predictor_in`` [rank,
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
