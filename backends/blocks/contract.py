"""Arguments of the kernels: tables of int64, numbers and addresses, by name.

Plain Python: no TVM.  A kernel is called ``(table, first, end, thread)`` and computes items
``first`` to ``end``.  Strides of float32 are elements, those of quantised tokens and of weights
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from pi2.backends.kernels.isa import Isa, choose_features, choose_isa
from pi2.model.blocks import Attention, list_attention
from pi2.model.options import find_unknown as find_undeclared
from pi2.model.options import read_options
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_mixing import Attention as AttentionOptions

if TYPE_CHECKING:
    from pi2.plan.documents.plan import KvType

PLANES: Mapping[str, int] = {"int8": 1, "int16": 2, "fp32": 3}
"""Planes of 8 bits that inputs of quantised matrices have, by `activations` of a plan."""
STEPS, COMMON, ROUTING, ATTENTION, STATES = "steps", "common", "routing", "attention", "states"
INDEX = "index"
"""Libraries that belong to no format: attention, and attention to chosen keys, have one for each
choice of `TOGETHER`."""
TOGETHER = (4, 3, 2, 1)
"""Heads that read the KV cache together; each takes as long to compile as a format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A library for a processor: the kernels of a format, or of no format."""

    program: ClassVar[str] = "pi2.backends.blocks.program"
    library: str
    architecture: str
    features: tuple[str, ...]
    """Sorted features of the processor that choose the instructions."""

    @property
    def isa(self) -> Isa:
        return choose_isa(frozenset(self.features), self.architecture)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})


def describe_libraries(
    names: Iterable[str], features: Set[str], architecture: str
) -> list[BlockSpec]:
    """Return the libraries of such a processor: they depend on nothing else of it."""
    own = choose_features(features, architecture)
    return [BlockSpec(library=name, architecture=architecture, features=own) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What attention of a layer reads."""

    key_heads: int
    """Vectors of a kind that a token has in the KV cache."""
    widths: tuple[int, ...]
    """Elements of each kind: of a key and a value, or of a latent vector."""
    group: int
    """Heads that are computed together with the same keys."""
    key: int
    value: int
    """Elements of a head's query, and of its value."""


LATENT_GROUP = 16
"""Heads at most that share a tile or a part of a latent context: threads share the others."""


def describe_heads(own: Attention) -> Heads:
    latent = own.latent
    if latent is None and own.pooled is None:
        width = own.options.value_width or own.head_dim
        return Heads(
            key_heads=own.kv_heads,
            widths=(own.head_dim, width),
            group=own.heads // own.kv_heads,
            key=own.head_dim,
            value=width,
        )
    group = max(n for n in range(1, LATENT_GROUP + 1) if own.heads % n == 0)
    key, value = (own.head_dim,) * 2 if latent is None else (latent.kept, latent.rank)
    return Heads(key_heads=1, widths=(key,), group=group, key=key, value=value)


KV_TYPES: Mapping[KvType, str] = {"fp16": "float16", "fp32": "float32", "int8": "int8"}
"""Elements of the KV cache."""


def name_attention(kind: KvType, counts: Collection[int], library: str = ATTENTION) -> str:
    """Name the library of attention that computes so many heads together."""
    return "_".join([library, kind, *map(str, sorted(counts, reverse=True))])


def read_attention(library: str) -> tuple[KvType, list[int]]:
    """Return the arguments of `name_attention` by its result."""
    kind, *counts = library.split("_")[1:]
    return cast("KvType", kind), [int(count) for count in counts]


def list_libraries(model: Model, kind: KvType) -> list[str]:
    """Return the libraries that any model needs: `STEPS`, then the slowest to compile first."""
    groups = [describe_heads(own).group for own, _ in list_attention(model)]
    counts = {TOGETHER[0] for group in groups if group >= TOGETHER[0]}
    counts |= {group % TOGETHER[0] for group in groups} - {0}
    attention = name_attention(kind, counts)
    more = {ROUTING: model.moe is not None, STATES: _needs_states(model)}
    is_chosen = model.attention.index is not None or model.attention.pooled is not None
    more[name_attention(kind, counts, INDEX)] = is_chosen
    return [STEPS, COMMON, attention, *(name for name, is_needed in more.items() if is_needed)]


def _needs_states(model: Model) -> bool:
    """Whether the kernels of layers with a state compute something of it."""
    gates_heads = model.attention.output_gate or model.gated_streams is not None
    return bool(model.states) or gates_heads


COMPUTED = read_options("""
    norm: kind=layernorm bias inputs embedding embedding_weights outputs
    other_heads: . heads keys_are_values
    positions: . offset
    attention: qkv_bias output_bias head_norm head_norm_weights head_norm_layers
    attention: head_norm_of=all head_norm_place=after value_width value_scale value_norm sub_norm
    attention: sinks sink_layers scale softcap clip growth growth_interval growth_offset
    attention: growth_layers sliding_window window_kind=chunked window_layers kv_shared_layers alibi
    attention: output_gate output_gate_of=head output_gate_function=softplus
    attention: latent index pooled pooled.overlapping
    attention.latent: query_rank bias
    attention.index: kind=tokens kind=blocks block local pairs=neighbours layers shared_layers
    recurrence: . kernel convolution_bias projection_bias step_rank part_norm=plain
    recurrence: part_norm=weighted part_epsilon decay_of=key decay_rank decay_floor
    recurrence: gate=sigmoid gate_rank output_norm norm_groups shortest_step longest_step
    convolution: . kernel bias
    layers: parallel kinds=+ kinds=none kinds=delta kinds=mamba kinds=mamba1 kinds=convolution
    : residual=parallel layer_scale logit_softcap head_bias other_rope
    ffn: activation=relu activation=drelu activation=fatrelu activation=relu2 activation=silu
    ffn: activation=gelu activation=gelu_tanh activation=xielu threshold gated bias
    ffn: absent_layers sub_norm gate_sparsity slope limit limits other_limits
    ffn: limit_of=activation curves up_offset
    moe: . router=sigmoid router=mixer router=none router=root_softplus listed_layers
    moe: router_input=layer router_input=stream
    moe: input_scale weighs=input expert_scale normalise_weights shared_experts shared_gate
    moe: shared_factor shared_ffn router_bias choice_bias choice_bias_of=score groups
    moe: active_groups group_score=best scaling tolerance dense_layers dense_ffn latent
    side_ffn: . norms
    layer_embedding: . vocab factor projection_factor
    altup: . scaled
    hyper: . rounds epsilon head
    : gated_streams ngrams
    multipliers: embedding residual logits
    rope: kind=linear kind=llama3 kind=yarn kind=longrope kind=proportional kind=none
    rope: pairs=swapped pairs=neighbours
    operators: mtp
""")
"""Options of models that there are kernels for."""
OF_STORES = COMPUTED - read_options(
    "ffn: activation=xielu curves limits other_limits limit_of=activation\n"
    "attention: pooled\n"
    "moe: listed_layers\n"
    ": gated_streams ngrams"
)
"""Options of models in stores: their neurons have one activation in all layers, their tables no
tokens, and their tokens no n-grams."""
APART = (("attention.clip", "attention.output_gate"), ("attention.alibi", "attention.index"))
"""Options that do not go together."""


def cuts_normed(attention: AttentionOptions) -> bool:
    """Whether queries and keys are cut between their norm and their rotation."""
    is_first = attention.head_norm_of == "head" and attention.head_norm_place == "before"
    return attention.clip is not None and is_first


def find_unknown(model: Model) -> list[str]:
    """Return what a model has that there are no kernels for, by the keys of its document; empty
    where all of it can be computed."""
    tensors, moe = model.tensors, model.moe
    fused, order = tensors.fused_gate_up is not None, tensors.gate_up_order
    # The norm's weights are of FFNs as wide as an expert.
    has_others = moe is not None and bool(moe.shared_experts or moe.dense_layers)
    lying = {
        "ffn.sub_norm (moe)": model.ffn.sub_norm and has_others,
        "tensors.experts_turned": moe is not None and tensors.experts_turned,
        "tensors.fused_order": tensors.fused_qkv is not None and tensors.fused_order != "stacked",
        "tensors.gate_up_order": fused and order != "stacked",
    }
    unknown = find_undeclared(model, COMPUTED, APART)
    return unknown + [key for key, is_there in lying.items() if is_there]


_ROWS = (
    "weights grid x x_stride y y_stride blocks tokens bias has_bias added factor scales"
    " rows scratch scratch_stride expert_of place_of x_of y_of expert_bytes pairs starts experts"
    " routes has_routes planes plane_stride"
)
_CACHES = (
    " key_width value_width key_cache value_cache key_scales value_scales sequences positions"
    " key_sequence_stride key_head_stride value_sequence_stride value_head_stride"
)
_ATTENTION = (
    f"queries query_stride heads group{_CACHES} value_stride window is_chunked reach chosen"
    " lists list_stride scale cap sinks has_sinks slopes has_slopes y y_stride tokens tile parts"
    " partials scratch scratch_stride"
)
_INDEX = (
    "queries query_stride weights weights_stride has_weights heads width lists key_cache"
    " key_sequence_stride sequences positions scores scores_stride chosen list_stride count block"
    " local reach parts scratch scratch_stride"
)

_STREAMS = "x y stride length count factors factors_stride"

FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(fields.split())
    for name, fields in {
        # Of a format; items are rows, panels of rows, and tokens.
        "multiply": _ROWS,
        "multiply_few": _ROWS,
        "multiply_many": _ROWS,
        # Of a format; items are heads.
        "multiply_turned": "weights grid x x_stride x_each y y_stride y_each blocks tokens rows"
        " each factor",
        "take_rows": "weights grid numbers y y_stride blocks factor added",
        # Of all formats; items are tokens.
        "normalize": "x x_stride weights has_weights bias has_bias y y_stride length epsilon"
        " centred added factor",
        # Blocks of tokens.
        "quantize_q8_k": "x x_stride y y_stride length rest has_rest rest_stride order",
        "quantize_q8_0": "x x_stride y y_stride length rest has_rest rest_stride together rounds",
        # Heads of tokens.
        "turn": "x x_stride heads head_dim weights norm_place epsilon positions cos sin"
        " table_stride rotated neighbours swapped",
        "spread_heads": "x x_stride heads head_dim block",
        # Key heads of tokens.
        "keep": f"keys values x_stride heads{_CACHES}",
        "keep_index": f"keys values x_stride heads{_CACHES}",
        # Parts of heads of a token that share keys; heads of tokens; tiles of tokens of heads that
        # share keys.
        "attend": _ATTENTION,
        "join": _ATTENTION,
        "attend_many": _ATTENTION,
        "attend_chosen": _ATTENTION,
        # Parts of contexts of tokens; tokens.
        "rank": _INDEX,
        "choose": _INDEX,
        # Tokens.
        "record": "x x_stride length memory sequence_stride ring sequences positions",
        "pool": "memory sequence_stride ring width block overlaps bias y y_stride starts rows base"
        " spare sequences positions",
        "see": "window block base chosen list_stride positions",
        # Tokens; one item; tokens.
        "route": "scores scores_stride experts active chosen weights choice_bias has_choice_bias"
        " expert_scale has_expert_scale kind bias_of_score groups active_groups best_two"
        " normalise scaling tolerance numbers table has_table scratch scratch_stride",
        "group": "chosen active tokens experts starts pairs",
        "weigh": "x x_stride length scores scores_stride",
        # Tokens.
        "spread": "chosen weights active experts shared factor scores scores_stride has_scores y"
        " y_stride length",
        # Pieces of `PIECE` elements of tokens.
        "gate": "gates ups has_ups x_stride y y_stride length kind limit slope up_offset",
        "cap": "x x_stride y y_stride length limit factor",
        # Tokens.
        "grow": "x x_stride length positions factors",
        "cut": "x x_stride length deviations",
        "term": "x x_stride y y_stride length weights has_weights",
        "predict": _STREAMS,
        "correct": _STREAMS,
        "match": f"{_STREAMS} x_stride",
        "mix": "x x_stride count scales bias epsilon rounds read read_stride kept kept_stride",
        "inject": "x x_stride y y_stride weights weights_stride length count",
        # Pieces of `PIECE` elements of tokens; streams of tokens.
        "collapse": "x x_stride gates gates_stride y y_stride length count",
        "admit": "keys keys_stride queries queries_stride values values_stride y y_stride length"
        " count",
        # Of `STATES`; items are blocks of channels, value heads of tokens, blocks of columns of
        # heads, blocks of channels, and heads of tokens.
        "convolve": "x x_stride before after has_gates y y_stride weights bias has_bias places"
        " has_places tails sequence_stride channels window is_silu tokens sequences positions",
        "prepare": "queries keys x_stride key_heads key_dim heads is_delta of_keys entries"
        " entries_stride entry_of steps steps_stride step_of bias rates floor has_floor shortest"
        " longest y y_stride",
        "recur": "queries keys values x_stride heads group key_dim value_dim value_of factors"
        " factors_stride of_keys is_delta skip has_skip memory sequence_stride y y_stride tokens"
        " sequences positions",
        "scan": "x x_stride gates gates_stride steps steps_stride keys queries parts_stride bias"
        " rates skip memory sequence_stride width key_dim y y_stride tokens sequences positions",
        "gate_heads": "x x_stride x_of gates gates_stride gate_of gate_each kind y y_stride y_of"
        " heads width weights weights_step norm_place epsilon",
    }.items()
}
"""Names of each kernel's arguments, in the order of its table."""

PIECE = 1024
"""Elements of an item of kernels that take every element for itself."""
ACTIVATIONS = (
    *("silu", "gelu_tanh", "gelu", "relu", "drelu", "fatrelu", "relu2", "swiglu", "cut_silu"),
    "xielu",
)
"""What becomes of gates, by number; ``swiglu`` cuts gates and ups, and has a slope (gpt-oss);
``cut_silu`` cuts activations and ups; ``xielu`` has its numbers in limit, slope and up_offset;
``limit`` is the threshold of ``fatrelu``."""
XIELU_END = -1e-6
"""Largest exponent of ``xielu``: its definition cuts inputs there."""
ROUTERS = ("softmax", "sigmoid", "mixer", "root_softplus")
"""What makes weights of experts of scores, by number."""
NORM_PLACES = ("none", "before", "after")
"""Whether heads have a norm, and when, by number."""
STATE_BLOCK = 16
"""Channels, or columns of a state, that go through all tokens together."""
GATES = ("silu", "sigmoid", "softplus")
"""What becomes of gates of heads, by number."""
