"""`KernelSpec`: everything that the generated code depends on, and nothing else.

Plain Python: no TVM.  Two requests with equal specs share one compiled library.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pi2.backends.executor import count_parts
from pi2.backends.kernels.isa import Isa, choose_isa
from pi2.model.attention import LatentShape
from pi2.model.states import StateShape
from pi2.plan.documents.model_parts import SMOOTH_ACTIVATIONS, Activation
from pi2.plan.documents.plan import KvType
from pi2.plan.weights.layout import (
    GROUP,
    BundleLayout,
    Precision,
    ScalesPlace,
    fill_groups,
    lay_out_bundle,
)

PANEL = 256
"""Neurons whose activations are kept at once by the dense FFN."""
UNPACKED = 32
"""Neurons whose down weights are unpacked together in the dense FFN: a bit each in a mask."""
KEPT = 33
"""Tokens whose y a thread of the dense FFN keeps by it at a time, a multiple of those that share
the loads of weights."""
PARTS = PANEL // UNPACKED
"""Masks of a panel."""
BLOCK = 240
"""Neurons that are taken through all tokens of a step before the next ones: with fewer, threads
begin anew too often, with more, tokens do not find in a cache what others have read."""
BLOCK_ROOM = BLOCK + 16
"""Room of a list of them, which is written 16 at a time."""
MOST_NAMING = 31
"""Tokens of a step that a mask of neurons has bits for."""
KV_BLOCK = 16
"""Tokens whose keys lie together, one per lane."""
SPANS = 16
"""Most parts that the context is divided into for one token's attention."""

KV_DTYPES: Mapping[KvType, str] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
"""Types of the kernels' arrays that hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What layers of attention differ in."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    """Tokens that a query looks back, itself included."""
    borrows_keys: bool = False
    """Whether keys and values are those that another layer has kept."""
    head_norm: bool = False
    """Whether queries and keys have a norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputShape:
    """Sizes and factors of embeddings that layers have of their own."""

    layers: int
    width: int
    """Elements that a layer has of a token."""
    factor: float
    """Of the table's rows."""
    projection_factor: float
    """Of what the projection of the first layer's input gives."""

    @property
    def stored_width(self) -> int:
        """Length of a layer's vectors: zeros fill up the last group."""
        return fill_groups(self.width)

    @property
    def row(self) -> int:
        """Length of a row of the table."""
        return fill_groups(self.layers * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpShape:
    """Sizes of several residual streams, and of LAuReL."""

    streams: int
    """Vectors of a token, x included."""
    laurel_rank: int
    scaled: bool
    """Whether what gates a layer's own embedding is multiplied with a vector first."""

    @property
    def others(self) -> int:
        """Vectors of a token beside x."""
        return self.streams - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """How a mixture's router chooses, where `pi2.backends.kernels.side_ffn` does it."""

    kind: Literal["softmax", "sigmoid"]
    experts: int
    """Those that it chooses from."""
    active: int
    normalise: bool
    """Whether weights of the active ones add up to 1."""
    scaling: float
    has_bias: bool
    """Whether scores have a bias."""
    has_choice_bias: bool
    """Whether experts are chosen by their weights and a bias of each."""
    chooses_scores: bool
    """Whether that bias is added to scores instead, of which sigmoids become weights."""
    shared: int
    """Experts beside them that compute every token."""
    shared_factor: float
    """What their weights are multiplied by."""
    shared_gate: bool
    reads_layer_input: bool
    """Whether it reads the layer's input, instead of the FFN's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Sizes and choices that the kernels of one model are specialised for.

    Context length and chunk size are not part of it: they are arguments of the kernels.
    """

    program: ClassVar[str] = "pi2.backends.kernels.program"
    hidden: int
    """Length of the residual stream's vectors: zeros fill up the last group."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    epsilon: float
    activation: Activation
    threshold: float
    """Threshold of ``fatrelu``; 0 for other activations."""
    qkv_bias: bool
    window: int | None
    """Tokens that a query looks back, itself included."""
    kv: KvType
    attention: Precision
    embedding: Precision
    head: Precision
    ffn: Precision
    gate_rows: Precision | None
    """Precision of the resident gate rows; None if there are none."""
    predictor: Precision | None
    """Precision of the low-rank predictors; None if there are none."""
    ranks: tuple[int, ...]
    """Different ranks among the layers' predictors, ascending."""
    stride: int
    threads: int
    planes: int
    """Bytes of an activation: 1 (int8), 2 (int16 as two int8 planes), 4 (float32, not rounded)."""
    chunk_planes: int
    """Bytes of an activation where several tokens go through a layer together."""
    architecture: str
    features: tuple[str, ...]
    """Sorted."""
    upper_steps: bool = False
    """Whether several tokens of a step are multiplied by the upper 8 of their 16 bits alone."""
    other_qkv: int = 0
    """First rows of the projection to queries, keys and values that another unit computes."""
    other_output: int = 0
    """First rows of the projection of what attention has mixed that another unit computes."""
    other_head: int = 0
    """First rows of the head that another unit computes."""
    sequences: bool = False
    """Whether tokens of several sequences are decoded together: there are functions for it."""
    looks_ahead: bool = False
    """Whether predictions are made before the layer's own input is known."""
    passes: Literal[1, 2] = 1
    """Passes over gathered neurons: one for everything, or gates first (`kernels.gathered`)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_width: int = 0
    """Elements that norms of the residual stream are taken of; 0 stands for all."""
    norm_bias: bool = False
    norm_inputs: bool = True
    """Whether what attention and the FFN read is normalised."""
    norm_outputs: bool = False
    """Whether what attention and the FFN give is normalised before it is added."""
    parallel: bool = False
    """Whether the FFN reads the layer's input."""
    embedding_norm: bool = False
    positions: bool = False
    """Whether there are learned position vectors."""
    output_bias: bool = False
    head_norm: bool = False
    """Whether queries and keys have a norm."""
    head_norm_of: Literal["head", "all"] = "head"
    """Whether that is of every head, or of all together."""
    head_norm_place: Literal["before", "after"] = "before"
    """Whether it comes before or after the rotation."""
    qkv_clip: float | None = None
    """Largest magnitude of queries, keys and values."""
    sinks: bool = False
    """Whether every head has a score that no token has."""
    value_norm: bool = False
    value_scale: float = 1.0
    """Factor of values, by which what heads mix is multiplied."""
    growth: bool = False
    """Whether queries have a factor for each position."""
    score_scale: float | None = None
    """Factor of attention scores; None stands for 1 / sqrt(head_dim)."""
    score_cap: float | None = None
    """Soft cap of attention scores."""
    borrows_keys: bool = False
    """Whether keys and values are those that another layer has kept."""
    chunked_windows: bool = False
    """Whether windows are chunks of so many tokens, counted from the first."""
    others: tuple[AttentionShape, ...] = ()
    """Shapes of attention that some layers have instead; their functions have numbers from 1 on."""
    gated: bool = True
    slope: float = 1.0
    """Factor of x in the sigmoid of SiLU."""
    gate_limit: float | None = None
    """Largest gate, and largest magnitude of an up."""
    up_offset: float = 0.0
    """Added to ups before they are multiplied with gates."""
    ffn_bias: bool = False
    sub_norm: int = 0
    """Neurons whose activations are normalised together; 0 where they are not."""
    attention_sub_norm: bool = False
    """Whether what the heads have mixed is normalised before it is projected."""
    weighs_input: bool = False
    """Whether weights of experts multiply what these read."""
    experts: int = 0
    """Experts of a mixture, shared ones included; 0 where the model is none."""
    side_ffn: int = 0
    """Neurons of a dense FFN beside the experts; 0 without it."""
    side_norms: bool = True
    latent_experts: int = 0
    """Elements that experts read and give; 0 where it is the residual stream's."""
    layer_input: LayerInputShape | None = None
    """Embeddings that layers have of their own, if there are some."""
    altup: AltUpShape | None = None
    """Several residual streams, if the model has them."""
    cutoff_rows: int = 0
    """Rows of the matrices that tell cutoffs of gates; 0 where no layer has one."""
    router: RouterShape | None = None
    """The mixture's router; None where none is compiled."""
    keeps_input: bool = False
    """Whether the layer's input is kept: for the FFN, or for the router."""
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float | None = None
    head_bias: bool = False
    scales: ScalesPlace = "inline"
    """Where the scales of neurons lie."""
    layer_scale: bool = False
    """Whether what a layer gives is multiplied by a number."""
    output_gate: bool = False
    """Whether gates of what attention mixes come with queries, keys and values."""
    softplus_gates: bool = False
    """Whether these multiply by their softplus, and not by their sigmoids."""
    latent: LatentShape | None = None
    """Sizes of latent attention, if the model has it."""
    state: StateShape | None = None
    """Sizes of layers with a state, if there are some."""

    def __post_init__(self) -> None:
        assert self.hidden % GROUP == 0 and self.norm_width <= self.hidden, self
        assert self.latent is not None or self.head_dim % 2 == 0
        assert self.heads % self.kv_heads == 0
        assert {self.planes, self.chunk_planes} <= {1, 2, 4} and self.threads >= 1
        assert list(self.features) == sorted(set(self.features))

    @property
    def divides_attention(self) -> bool:
        """Whether another unit computes rows of the attention block's projections."""
        return self.other_qkv > 0 or self.other_output > 0

    def take_other(self, number: int) -> KernelSpec:
        """The spec of layers with another shape of attention."""
        shape = self.others[number - 1]
        return dataclasses.replace(
            self,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            borrows_keys=shape.borrows_keys,
            head_norm=shape.head_norm,
            others=(),
        )

    def has_other_heads(self, number: int) -> bool:
        """Whether layers with another shape of attention have other projections, not only a
        window."""
        shape = self.others[number - 1]
        own = (self.heads, self.kv_heads, self.head_dim, self.borrows_keys)
        return (shape.heads, shape.kv_heads, shape.head_dim, shape.borrows_keys) != own

    @property
    def width(self) -> int:
        """Length of the attention output: ``heads * head_dim``, and zeros in the last group."""
        return fill_groups(self.heads * self.head_dim)

    @property
    def normalized_width(self) -> int:
        """Elements that norms of the residual stream are taken of."""
        return self.norm_width or self.hidden

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused query, key and value projection."""
        if self.latent is not None:
            return self.latent.count_rows(self.heads)
        gates = self.heads if self.output_gate else 0
        own = 0 if self.borrows_keys else 2 * self.kv_heads
        return (self.heads + own + gates) * self.head_dim

    @property
    def neuron_width(self) -> int:
        """Length of what neurons read and add to."""
        return fill_groups(self.latent_experts) or self.hidden

    def describe_neurons(self) -> KernelSpec:
        """The spec of functions that know neurons and what these read, and nothing of the residual
        stream: ``hidden`` is the neurons' width."""
        if not self.latent_experts:
            return self
        return dataclasses.replace(self, hidden=self.neuron_width, latent_experts=0, norm_width=0)

    @property
    def bundle(self) -> BundleLayout:
        """Layout of a neuron."""
        return lay_out_bundle(
            self.neuron_width,
            self.ffn,
            self.stride,
            gated=self.gated,
            bias=self.ffn_bias,
            factor=self.sub_norm > 0,
            mixed=self.experts > 0,
            scales=self.scales,
        )

    @property
    def most_planes(self) -> int:
        """Bytes of an activation that arrays have room for."""
        return max(self.planes, self.chunk_planes)

    @property
    def isa(self) -> Isa:
        """The schedule; tokens are taken in pairs as integers only."""
        isa = choose_isa(frozenset(self.features), self.architecture)
        return isa if self.most_planes < 4 else dataclasses.replace(isa, pairs=False, blocks=False)

    @property
    def has_other_chunks(self) -> bool:
        """Whether the tokens of a chunk are computed otherwise than one alone."""
        return self.chunk_planes != self.planes or self.isa.pairs or self.upper_steps

    @property
    def foresees(self) -> bool:
        """Whether a function predicts for a layer to come and begins the present one: not where
        experts have to be known before, or gates have cutoffs."""
        return self.looks_ahead and not self.experts and not self.cutoff_rows

    @property
    def multiplies_at_end(self) -> bool:
        """Whether an FFN ends with projections."""
        return bool(self.side_ffn or self.latent_experts) or self.layer_input is not None

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.activation in SMOOTH_ACTIVATIONS

    @property
    def takes_stretches(self) -> bool:
        """Whether `pi2.backends.kernels.plain` computes the neurons of one token, however they
        were chosen: none of them is ever inactive."""
        return self.is_smooth and (self.experts > 0 or not self.has_gathered_ffn)

    @property
    def parts(self) -> int:
        """Parts of a token's neurons whose sums are kept until all are added: they are computed in
        any order then."""
        keeps = self.takes_stretches and self.experts > 0 and not self.sub_norm
        return count_parts(self.threads) if keeps else 1

    @property
    def has_plain_ffn(self) -> bool:
        """Whether `pi2.backends.kernels.plain` computes the FFN of all neurons of a layer."""
        return not self.takes_stretches and (not self.has_gathered_ffn or self.experts > 0)

    @property
    def uses_known_gates(self) -> bool:
        """Whether gates that have named neurons are not computed again with these."""
        return self.gate_rows is not None and self.has_gathered_ffn and self.experts == 0

    @property
    def has_gathered_ffn(self) -> bool:
        """Whether `pi2.backends.kernels.gathered` computes the neurons that a predictor names."""
        return self.gated and not self.ffn_bias

    @property
    def skips_ups(self) -> bool:
        """Whether a chunk's tokens need the ups of those neurons alone whose gates are open: of
        others, the activation is zero."""
        return self.gated and not self.is_smooth

    @property
    def closes_gates(self) -> bool:
        """Whether a gate alone tells that a gathered neuron has no effect."""
        return self.skips_ups and not self.ffn_bias

    @property
    def shares_neurons(self) -> bool:
        """Whether `pi2.backends.kernels.shared` computes what the tokens of a step name."""
        return self.sequences and self.closes_gates

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        values["ranks"] = tuple(values["ranks"])
        values["features"] = tuple(values["features"])
        values["others"] = tuple(AttentionShape(**shape) for shape in values["others"])
        if values["latent"] is not None:
            values["latent"] = LatentShape(**values["latent"])
        if values["layer_input"] is not None:
            values["layer_input"] = LayerInputShape(**values["layer_input"])
        if values["altup"] is not None:
            values["altup"] = AltUpShape(**values["altup"])
        if values["state"] is not None:
            values["state"] = StateShape(**values["state"])
        if values["router"] is not None:
            values["router"] = RouterShape(**values["router"])
        return cls(**values)
