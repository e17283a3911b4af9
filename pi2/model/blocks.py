"""The blocks of a model: what each layer computes, by its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from pi2.plan.weights.layout import fill_groups
from pi2.plan.weights.states import StateKind, StateShape, describe_state

if TYPE_CHECKING:
    from pi2.plan.documents import model_mixing, model_parts
    from pi2.plan.documents.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Softmax attention of a block; equal where layers compute the same."""

    options: model_mixing.Attention
    """Options that all attention of the model shares; the fields here say what its keys by layer
    mean for this block."""
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head; with latent attention, of its value."""
    window: int | None
    """Tokens that a query looks back, itself included; None means all."""
    rope: model_mixing.Rope
    head_norm: bool
    """Whether queries and keys have a norm."""
    sinks: bool
    """Whether heads have a score that no token has."""
    growth: float
    """Growth of queries; 0 where they keep their length."""
    keys_are_values: bool = False
    """Whether values are what the key projection gives."""
    key_layer: int | None = None
    """Earlier layer whose keys and values it reads; None where it has its own."""

    @property
    def latent(self) -> model_mixing.Latent | None:
        return self.options.latent

    @property
    def has_keys(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.key_layer is None

    @property
    def query(self) -> int:
        """Width of all query heads together; with latent attention, of their values."""
        return self.heads * self.head_dim

    @property
    def stored_query(self) -> int:
        """Length of the output of all heads in stores and backends: zeros fill it up."""
        return fill_groups(self.query)

    @property
    def turned_width(self) -> int:
        """Width of the part of a head that RoPE sees."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def turn(self) -> tuple[model_mixing.Rope, int]:
        """What tables of sines and cosines depend on: RoPE, and the width it sees."""
        return self.rope, self.turned_width

    @property
    def head_norm_widths(self) -> tuple[int, int]:
        """Lengths of the weights of the norms of queries and of keys."""
        if self.options.head_norm_of == "head":
            return self.head_dim, self.head_dim
        return self.query, self.kv_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Rows of the projection ``qkv``: queries, keys, values, gates of the output; with latent
        attention the vectors that these are made of."""
        gates, latent = self.options.output_gate, self.latent
        if latent is not None:
            return (latent.query_rank or self.heads * latent.key) + gates * self.heads + latent.kept
        own = 2 * self.kv_heads * self.head_dim if self.has_keys else 0
        return self.query * (1 + gates) + own

    @property
    def kept(self) -> tuple[int, int, int]:
        """Kinds of vectors that the KV cache keeps of a token, vectors of a kind, elements of one:
        keys and values of every key head; one vector with latent attention; no kinds where it
        reads those of another layer."""
        if not self.has_keys:
            return 0, self.kv_heads, self.head_dim
        if self.latent is not None:
            return 1, 1, self.latent.kept
        return 2, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Delta rule, Mamba, Mamba-2 or short convolution: it keeps a state instead of keys."""

    kind: StateKind
    shape: StateShape | None
    """Sizes; None if the document states none, which a rule reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """The feed-forward network of a block."""

    kind: Literal["none", "dense", "experts"]
    options: model_parts.Ffn
    moe: model_parts.Moe | None
    """The model's mixture, of which dense blocks may be a part."""
    width: int
    """Neurons of the FFN, or of one expert."""
    active: int
    """FFNs of the store that compute a token: experts with shared ones, those that hold a dense
    FFN's neurons; 0 for a dense FFN that is kept beside experts."""
    neurons: int
    """Neurons of these, without those that fill the last one up."""
    side: int = 0
    """Neurons of a dense FFN that is kept and computed beside experts."""
    closed: float = 0.0
    """Share of the gates that a cutoff closes; 0 without one."""

    @property
    def has_router(self) -> bool:
        return self.kind == "experts"

    @property
    def cutoff(self) -> float | None:
        """Standard deviations that the cutoff of gates is above their mean; None without one."""
        return find_normal_quantile(self.closed) if self.closed > 0.0 else None


Mixer = Attention | State


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A layer: mixers of tokens, one after the other, then an FFN."""

    mixers: tuple[Mixer, ...]
    ffn: Ffn

    @property
    def attention(self) -> Attention | None:
        """Its attention; no block has two."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, Attention)), None)

    @property
    def states(self) -> tuple[int, ...]:
        """Numbers of the mixers that keep a state."""
        return tuple(n for n, mixer in enumerate(self.mixers) if isinstance(mixer, State))


def list_attention(blocks: Sequence[Block]) -> list[tuple[Attention, int]]:
    """The attention of ``blocks`` by sizes and keys, each with the number of its layers."""
    found: dict[tuple[int, int, int, bool], list[Attention]] = {}
    for own in filter(None, (block.attention for block in blocks)):
        found.setdefault((own.heads, own.kv_heads, own.head_dim, own.has_keys), []).append(own)
    return [(alike[0], len(alike)) for alike in found.values()]


def list_turns(blocks: Sequence[Block]) -> list[tuple[model_mixing.Rope, int]]:
    """`Attention.turn` of all blocks, each once."""
    return list(dict.fromkeys(own.turn for block in blocks if (own := block.attention)))


def find_normal_quantile(share: float) -> float:
    """Standard deviations above the mean that leave ``share`` of a normal distribution below."""
    # It imports modules that start-up does without.
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


def make_blocks(model: Model) -> tuple[Block, ...]:
    """The blocks of a document, which need not have passed the rules."""
    shape, found = model.shape, list[Block]()
    states: dict[str, State] = {}
    for layer in range(shape.layers):
        kinds = () if model.layers is None else model.layers.kinds
        kind = kinds[layer] if layer < len(kinds) else "attention"
        mixers: list[Mixer] = []
        for part in () if kind == "none" else kind.split("+"):
            if part == "attention":
                mixers.append(_make_attention(model, layer, kind == "attention", found))
            else:
                own = cast(StateKind, part)
                state = State(kind=own, shape=describe_state(model, own))
                mixers.append(states.setdefault(own, state))
        found.append(Block(mixers=tuple(mixers), ffn=_make_ffn(model, layer)))
    return tuple(found)


def _make_attention(model: Model, layer: int, is_single: bool, before: list[Block]) -> Attention:
    shape, options = model.shape, model.attention
    heads, rope = model.other_heads, model.other_rope
    if heads is not None and layer not in heads.layers:
        heads = None
    if rope is None or layer not in rope.layers:
        rope = None

    def holds(layers: Sequence[int] | None) -> bool:
        return layers is None or layer in layers

    sizes = (
        (heads and heads.heads) or shape.heads,
        heads.kv_heads if heads else shape.kv_heads,
        heads.head_dim if heads else shape.head_dim,
    )
    window = options.sliding_window if holds(options.window_layers) else None
    first = max(0, shape.layers - options.kv_shared_layers)
    key_layer = None
    if layer >= first:
        for number in reversed(range(first)):
            own = before[number].attention
            if (
                own is not None
                and (own.window, own.heads, own.kv_heads, own.head_dim) == (window, *sizes)
                and is_single == (len(before[number].mixers) == 1)
            ):
                key_layer = number
                break
    return Attention(
        options=options,
        heads=sizes[0],
        kv_heads=sizes[1],
        head_dim=sizes[2],
        window=window,
        rope=rope or model.rope,
        head_norm=options.head_norm and holds(options.head_norm_layers),
        sinks=options.has_sinks(layer),
        growth=options.growth if holds(options.growth_layers) else 0.0,
        keys_are_values=heads is not None and heads.keys_are_values,
        key_layer=key_layer,
    )


def _make_ffn(model: Model, layer: int) -> Ffn:
    options, moe, width = model.ffn, model.moe, model.shape.ffn
    shares = options.gate_sparsity
    closed = shares[layer] if layer < len(shares) else 0.0

    def make(kind: Literal["none", "dense", "experts"], *sizes: int) -> Ffn:
        own, active, neurons, side = sizes
        return Ffn(
            kind=kind,
            options=options,
            moe=moe,
            width=own,
            active=active,
            neurons=neurons,
            side=side,
            closed=closed,
        )

    if layer in options.absent_layers:
        return make("none", 0, 0, 0, 0)
    if moe is None:
        return make("dense", width, 1, width, 0)
    if moe.router == "none" or layer in moe.dense_layers:
        own = (moe.dense_ffn or 0) if layer in moe.dense_layers else moe.experts * width
        if moe.latent is not None:
            return make("dense", own, 0, 0, own)
        return make("dense", own, -(-own // width), own, 0)
    shared = moe.shared_experts * width if moe.shared_ffn is None else moe.shared_ffn
    side = 0 if model.side_ffn is None else model.side_ffn.width
    active = moe.active_experts + moe.shared_experts
    return make("experts", width, active, moe.active_experts * width + shared, side)
