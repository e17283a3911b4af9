"""The model document: everything about a model that is not a weight."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field

from pi2.plan.documents.common import (
    Count,
    Document,
    FilePath,
    Identifier,
    LayerNumber,
    Origin,
    Share,
    Table,
)
from pi2.plan.documents.model_attention import (
    Attention,
    OtherHeads,
    OtherRope,
    Positions,
    Rope,
)
from pi2.plan.documents.model_experts import Moe, SideFfn
from pi2.plan.documents.model_residual import AltUp, LayerEmbedding
from pi2.plan.documents.model_states import (
    Convolution,
    LayerKind,
    LayerKinds,
    Mixer,
    Recurrence,
)
from pi2.plan.documents.model_tensors import Tensors
from pi2.plan.documents.sampling import Sampling
from pi2.plan.weights.layout import BundleLayout, ScalesPlace, fill_groups, lay_out_bundle

Precision = Literal["int4", "int8", "fp16"]
"""Storage type of weights.  int4 and int8 have one fp16 scale per group of 32."""

AttentionPrecision = Literal["ternary", "int4", "int8", "fp16"]
"""Storage type of projections.  ternary weights are -1, 0 or 1, with one scale for a row: BitNet's
are published so, and stores hold them exactly."""

FfnPrecision = Literal["ternary", "int4", "int8", "fp16", "mxfp4"]
"""Storage type of neurons.  mxfp4 is what gpt-oss is published in: 4-bit floats, of which 32 have a
power of two as their scale; stores hold the published weights exactly."""

Activation = Literal["relu", "drelu", "fatrelu", "relu2", "silu", "gelu", "gelu_tanh"]
"""Activation of the FFN.  dReLU applies ReLU to gate and up (TurboSparse, eq. 2); FATReLU is zero
below a threshold (ProSparse); relu2 is the square of ReLU; gelu_tanh is the approximation of GELU
that Gemma uses."""

SMOOTH_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh"})
"""Those that are zero nowhere: no neuron can be left out without changing the result."""


class Shape(Table):
    """Sizes, in elements."""

    layers: Annotated[int, Field(ge=1, le=1024, examples=[32])]
    """Number of transformer blocks."""
    hidden: Annotated[int, Field(ge=1, le=2**20, examples=[4096])]
    """Width of the residual stream."""
    ffn: Annotated[int, Field(ge=1, le=2**22, examples=[11008])]
    """FFN neurons per layer; in a mixture of experts, of one expert."""
    heads: Annotated[int, Field(ge=1, le=2**14, examples=[32])]
    """Query heads."""
    kv_heads: Annotated[int, Field(ge=1, le=2**14, examples=[8])]
    """Key and value heads; fewer than ``heads`` is grouped-query attention (GQA)."""
    head_dim: Annotated[int, Field(ge=1, le=2**14, examples=[128])]
    """Width of one head."""
    vocab: Annotated[int, Field(ge=1, le=2**24, examples=[32000])]
    """Tokens of the vocabulary."""
    context: Annotated[int, Field(ge=1, le=2**27, examples=[4096])]
    """Longest sequence the model was made for, in tokens."""

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def stored_hidden(self) -> int:
        """Length of the residual stream's vectors in stores and backends: zeros fill it up."""
        return fill_groups(self.hidden)

    @property
    def stored_query(self) -> int:
        """Length of attention's output in stores and backends: zeros fill it up."""
        return fill_groups(self.query)


class Norm(Table):
    """Normalisation before attention, before the FFN, and at the end."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """``rmsnorm``: x / sqrt(mean(x^2) + epsilon) * weight; ``layernorm``: that of x - mean(x)."""
    epsilon: float = Field(default=1e-5, gt=0.0)
    """Added to the mean of squares."""
    bias: bool = False
    """Whether a bias is added."""
    weights: bool = True
    """Whether checkpoints have weights of the norms before attention, before the FFN and at the
    end; else all of them are 1 (OLMo)."""
    weight_offset: float = 0.0
    """Constant added to the checkpoint's weights: 1 for Gemma, whose norms multiply by 1 +
    weight."""
    inputs: bool = True
    """Whether the inputs of attention and FFN are normalised (not those of OLMo 2)."""
    embedding: bool = False
    """Whether embeddings go through an RMSNorm without weights before the first layer
    (nanochat)."""
    outputs: bool = False
    """Whether the outputs of attention and FFN are normalised before they are added to the
    residual stream (Gemma 2)."""


class Ffn(Table):
    """The feed-forward network: down(act(gate x) * up x), or down(act(up x)) without gates."""

    activation: Activation
    """Activation function."""
    threshold: float = 0.0
    """Activations at or below it are zero (``fatrelu``)."""
    gated: bool = True
    """Whether neurons have a gate."""
    bias: bool = False
    """Whether gate, up and down have biases."""
    absent_layers: tuple[LayerNumber, ...] = Field(default=(), examples=[[51]])
    """Layers that have no FFN; stores keep zeros for them, which add nothing."""
    sub_norm: bool = False
    """Whether the activations of all neurons go through an RMSNorm before they are multiplied with
    down vectors (BitNet)."""
    gate_sparsity: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], ...] = Field(
        default=(), examples=[[0.95, 0.95, 0.0]]
    )
    """Share of each layer's gates that a cutoff closes, where it is not 0 (Gemma 3n).  For a token
    the cutoff is the mean of all gates and as many of their standard deviations above it as leave
    that share of a normal distribution below.  It is subtracted from gates, those below it count
    as 0, and the activation follows."""
    slope: float = Field(default=1.0, gt=0.0)
    """SiLU is x sigmoid(slope x) (gpt-oss: 1.702)."""
    limit: float | None = Field(default=None, gt=0.0, examples=[7.0])
    """Gates are cut to at most the limit, ups to -limit..limit, where it is stated (``silu``)."""
    up_offset: float = 0.0
    """Added to ups before they are multiplied with gates (gpt-oss: 1)."""


class Multipliers(Table):
    """Constants that a few families multiply by; 1 where they do not."""

    embedding: float = 1.0
    """Embeddings, as they enter the first layer."""
    residual: float = 1.0
    """What attention and the FFN add to the residual stream."""
    logits: float = 1.0
    """Logits, before their soft cap."""


class Tokenizer(Table):
    """How text becomes tokens."""

    file: FilePath = "tokenizer.json"
    """File of the `tokenizers` library, relative to the neuron store."""
    bos: int | None = Field(default=None, ge=0, examples=[1])
    """Id of the beginning-of-sequence token."""
    eos: tuple[int, ...] = Field(default=(), examples=[[2]])
    """Ids of end-of-sequence tokens."""
    add_bos: bool = False
    """Whether a prompt begins with ``bos``."""


class Quantization(Table):
    """Precision of the weights by class of tensor."""

    ffn: FfnPrecision = "int4"
    """Neuron bundles."""
    attention: AttentionPrecision = "int4"
    """Query, key, value and output projections."""
    embedding: Precision = "int8"
    """Embedding table, and the head where it is tied."""
    head: Precision = "int8"
    """Output head where it is not tied."""
    predictor: Precision = "int8"
    """Activation predictors."""


class Predictor(Table):
    """Low-rank activation predictors: fc2 relu(fc1 x) + bias >= threshold, x after the FFN norm."""

    rank: Count
    """Rows of fc1, a multiple of 32; the largest where layers differ."""
    recall: Share | None = None
    """Recall: share of the active neurons that are predicted, on held-out text."""
    active: Share | None = None
    """Share of neurons that are predicted to be active."""


class Sparsity(Origin):
    """What is known of the FFN's activations."""

    active: Share
    """Mean share of neurons that a token activates; in a mixture, of its active experts'."""
    skew: Share | None = None
    """Share of a layer's neurons that make 80 % of its activations."""
    gate_open: Share | None = None
    """Mean share whose gate is open, which is what is computed where gates find active neurons;
    absent means that it is not known."""


def find_normal_quantile(share: float) -> float:
    """Standard deviations above the mean that leave ``share`` of a normal distribution below."""
    # It imports modules that start-up does without.
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


class Model(Document):
    """A model (``*.model.toml``): shape, operators, tensors, tokenizer, quantisation."""

    id: Identifier
    """Short name, the same as the file's."""
    licence: str = Field(default="", max_length=200, examples=["Apache-2.0"])
    """Licence of the weights."""
    shape: Shape
    """Sizes."""
    norm: Norm = Norm.default()
    """Normalisation."""
    rope: Rope = Rope.default()
    """Positions."""
    other_rope: OtherRope | None = None
    """Rotary positions of some layers, if they differ."""
    other_heads: OtherHeads | None = None
    """Heads of some layers, if they differ."""
    positions: Positions | None = None
    """Learned position vectors, if the model has them."""
    attention: Attention = Attention.default()
    """Attention."""
    layers: LayerKinds | None = None
    """What mixes the tokens of each layer; absent means attention in all."""
    recurrence: Recurrence | None = None
    """Sizes of layers of the kinds ``delta``, ``mamba`` and ``mamba1``, if there are some."""
    convolution: Convolution | None = None
    """Sizes of layers of the kind ``convolution``, if there are some."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """``sequential``: the FFN reads the output of attention; ``parallel``: it reads the layer's
    input."""
    ffn: Ffn
    """Feed-forward network."""
    moe: Moe | None = None
    """Mixture of experts; absent means one FFN per layer."""
    side_ffn: SideFfn | None = None
    """A dense FFN beside the experts, if the model has it."""
    layer_embedding: LayerEmbedding | None = None
    """Embeddings that every layer has of its own, if there are some."""
    altup: AltUp | None = None
    """Several residual streams, if the model has them."""
    multipliers: Multipliers = Multipliers.default()
    """Constant factors."""
    layer_scale: bool = False
    """Whether what a layer gives, its input added, is multiplied by a number of the layer's own
    (Gemma 4)."""
    logit_softcap: float | None = Field(default=None, gt=0.0, examples=[30.0])
    """Logits x become c tanh(x / c), where it is stated."""
    tied_head: bool = False
    """Whether the head is the embedding table."""
    head_bias: bool = False
    """Whether the head has a bias."""
    tokenizer: Tokenizer = Tokenizer.default()
    """Tokenizer."""
    quantization: Quantization = Quantization.default()
    """Precisions."""
    tensors: Tensors = Tensors.default()
    """Names in the checkpoint."""
    predictor: Predictor | None = None
    """Activation predictors, if the model has them."""
    sparsity: Sparsity | None = None
    """Activation statistics."""
    sampling: Sampling | None = None
    """How the model's authors recommend that tokens are drawn: the table ``sampling`` of new plans;
    runs heed their plan's alone."""

    @property
    def layer_neurons(self) -> int:
        """FFN neurons of a layer, those of all experts together."""
        return self.shape.ffn * self.expert_count

    @property
    def expert_count(self) -> int:
        """FFNs of a layer, shared experts after the others, and after them those that only dense
        layers need: 1 without experts."""
        if self.moe is None:
            return 1
        mixed = self.moe.experts + self.moe.shared_experts
        return max(mixed, self._count_dense())

    @property
    def active_experts(self) -> int:
        """FFNs of a layer that compute a token, of the layer with most: 1 without experts."""
        if self.moe is None:
            return 1
        mixed = self.moe.active_experts + self.moe.shared_experts
        return max(mixed, self._count_dense())

    def _count_dense(self) -> int:
        """Experts that it takes to hold the FFN of a dense layer."""
        moe = self.moe
        return 0 if moe is None or moe.latent is not None else moe.count_dense(self.shape.ffn)

    @property
    def token_neurons(self) -> int:
        """FFN neurons of a layer that may compute a token: those of its active experts."""
        return self.shape.ffn * self.active_experts

    @property
    def neuron_width(self) -> int:
        """Elements of what neurons read and add to: those of the residual stream, but for experts
        that have a width of their own."""
        latent = None if self.moe is None else self.moe.latent
        return self.shape.hidden if latent is None else latent

    @property
    def stored_neuron_width(self) -> int:
        """Length of a neuron's vectors in stores and backends: zeros fill it up."""
        return fill_groups(self.neuron_width)

    @property
    def is_smooth(self) -> bool:
        """Whether no activation is ever exactly zero."""
        return self.ffn.activation in SMOOTH_ACTIVATIONS

    def find_cutoff(self, layer: int) -> float | None:
        """Standard deviations that the cutoff of a layer's gates is above their mean; None where
        there is none."""
        share = self.find_closed_share(layer)
        return find_normal_quantile(share) if share > 0.0 else None

    def find_closed_share(self, layer: int) -> float:
        """Share of a layer's gates that a cutoff closes; 0 where there is none."""
        shares = self.ffn.gate_sparsity
        return shares[layer] if layer < len(shares) else 0.0

    @property
    def cut_layers(self) -> tuple[int, ...]:
        """Layers whose gates have a cutoff."""
        layers = range(self.shape.layers)
        return tuple(layer for layer in layers if self.find_cutoff(layer) is not None)

    @property
    def qkv_rows(self) -> int:
        """Rows of a layer's projection to queries, keys and values, and to gates of its output;
        with latent attention to what they are made of, or to queries and that."""
        shape, latent = self.shape, self.attention.latent
        if latent is not None:
            gates = shape.heads if self.attention.output_gate else 0
            return (latent.query_rank or shape.heads * latent.key) + gates + latent.kept
        gates = shape.query if self.attention.output_gate else 0
        own = 2 * shape.kv_heads * shape.head_dim if self.has_keys else 0
        return shape.query + own + gates

    @property
    def state_kind(self) -> Literal["delta", "mamba", "mamba1", "convolution"] | None:
        """What the layers with a state are; None where all layers are attention."""
        for layer in range(self.shape.layers):
            for mixer in self.list_mixers(layer):
                if mixer != "attention":
                    return mixer
        return None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have attention."""
        layers = range(self.shape.layers)
        return tuple(layer for layer in layers if "attention" in self.list_mixers(layer))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state, instead or beside, or several of them."""
        return tuple(dict.fromkeys(layer for layer, _ in self.states))

    @property
    def states(self) -> tuple[tuple[int, int], ...]:
        """The states that a sequence has: of each the layer, and the number of the mixer in it."""
        return tuple(
            (layer, number)
            for layer in range(self.shape.layers)
            for number, mixer in enumerate(self.list_mixers(layer))
            if mixer != "attention"
        )

    @property
    def uneven_layers(self) -> tuple[int, ...]:
        """Layers that have no mixer, or several."""
        layers = range(self.shape.layers)
        return tuple(layer for layer in layers if len(self.list_mixers(layer)) != 1)

    def find_kind(self, layer: int) -> LayerKind:
        """What mixes the tokens of ``layer``."""
        kinds = () if self.layers is None else self.layers.kinds
        return kinds[layer] if layer < len(kinds) else "attention"

    def list_mixers(self, layer: int) -> tuple[Mixer, ...]:
        """What mixes the tokens of ``layer``, in this order."""
        kind = self.find_kind(layer)
        return () if kind == "none" else tuple(cast(Mixer, part) for part in kind.split("+"))

    def has_router(self, layer: int) -> bool:
        """Whether a router chooses among the experts of ``layer``."""
        if self.moe is None or layer in self.ffn.absent_layers:
            return False
        return self.moe.has_router(layer)

    def count_unrouted(self, layer: int) -> int:
        """Experts that compute every token in a ``layer`` of a mixture that has no router: those
        that hold its FFN, if it has one and that is not kept beside experts."""
        assert self.moe is not None and not self.has_router(layer)
        if layer in self.ffn.absent_layers or self.moe.latent is not None:
            return 0
        return self.moe.count_unrouted(layer, self.shape.ffn)

    @property
    def side_width(self) -> int:
        """Neurons that stores keep beside a layer's experts: zeros fill up those of layers that
        have fewer.  What experts of another width than the residual stream's have beside them is,
        in dense layers, the layer's FFN."""
        width = 0 if self.side_ffn is None else self.side_ffn.width
        if self.moe is None or self.moe.latent is None:
            return width
        return max(width, self.moe.dense_ffn or 0)

    def lay_out_bundle(
        self, stride: int | None = None, scales: ScalesPlace = "inline"
    ) -> BundleLayout:
        """Lay out a neuron of this model; ``stride`` defaults to the next multiple of 512 bytes.
        Of mxfp4, stores know one place for scales alone."""
        ffn = self.ffn
        if self.quantization.ffn == "mxfp4":
            scales = "resident"
        return lay_out_bundle(
            self.stored_neuron_width,
            self.quantization.ffn,
            stride,
            gated=ffn.gated,
            bias=ffn.bias,
            factor=ffn.sub_norm,
            mixed=self.moe is not None,
            scales=scales,
        )

    def find_window(self, layer: int) -> int | None:
        """Tokens that queries of ``layer`` look back, themselves included; None means all."""
        layers = self.attention.window_layers
        return self.attention.sliding_window if layers is None or layer in layers else None

    def has_head_norm(self, layer: int) -> bool:
        """Whether queries and keys of ``layer`` have a norm."""
        layers = self.attention.head_norm_layers
        return self.attention.head_norm and (layers is None or layer in layers)

    def view_layer(self, layer: int) -> Model:
        """The model as attention of ``layer`` sees it: ``shape`` has the heads of that layer, and
        `has_keys` says whether it has keys and values of its own."""
        other, view = self.other_heads, self
        if other is not None and layer in other.layers:
            heads = {
                "heads": other.heads or self.shape.heads,
                "kv_heads": other.kv_heads,
                "head_dim": other.head_dim,
            }
            view = self.model_copy(update={"shape": self.shape.model_copy(update=heads)})
        if self.find_key_layer(layer) != layer:
            # `has_keys` tells by it: no document leaves all layers without keys and values.
            shared = {"kv_shared_layers": self.shape.layers}
            attention = self.attention.model_copy(update=shared)
            view = view.model_copy(update={"attention": attention})
        return view

    def list_views(self) -> list[tuple[Model, int]]:
        """The model as its layers of attention see it, by the number of layers that see the same;
        layers with the heads of ``shape`` come first, and of those that have the same heads the
        ones with keys and values of their own."""
        other, alike = self.other_heads, dict[tuple[bool, bool], list[int]]()
        for layer in self.attention_layers:
            is_apart = other is not None and layer in other.layers
            key = (is_apart, self.find_key_layer(layer) != layer)
            alike.setdefault(key, []).append(layer)
        if not alike:
            return [(self, 0)]
        return [(self.view_layer(found[0]), len(found)) for _, found in sorted(alike.items())]

    @property
    def has_keys(self) -> bool:
        """Whether the layer whose view this is has keys and values of its own."""
        return self.attention.kv_shared_layers < self.shape.layers

    def find_key_layer(self, layer: int) -> int:
        """The layer whose keys and values attention of ``layer`` reads: itself, but for the last
        ``attention.kv_shared_layers``, which read those of the last layer before them that has the
        same window and heads."""
        first = self.shape.layers - self.attention.kv_shared_layers
        if layer < first:
            return layer
        own = self._describe_keys(layer)
        alike = (n for n in reversed(range(first)) if self._describe_keys(n) == own)
        return next(alike, layer)

    def _describe_keys(self, layer: int) -> tuple[int | None, bool, bool]:
        """What layers that share keys and values have in common."""
        other = self.other_heads
        is_apart = other is not None and layer in other.layers
        return self.find_window(layer), is_apart, self.find_kind(layer) == "attention"

    def shares_key_rows(self, layer: int) -> bool:
        """Whether keys and values of ``layer`` have one projection."""
        other = self.other_heads
        return other is not None and other.keys_are_values and layer in other.layers

    def find_turn(self, layer: int) -> tuple[bool, int]:
        """Whether rotary positions of ``layer`` are ``other_rope``, and the width of a head."""
        is_other = self.other_rope is not None and layer in self.other_rope.layers
        return is_other, self.view_layer(layer).turned_width

    def list_turns(self) -> dict[tuple[bool, int], Rope]:
        """The rotary positions that layers of attention have, by what `find_turn` gives."""
        turns = dict.fromkeys(self.find_turn(layer) for layer in self.attention_layers)
        ropes = {False: self.rope, True: self.other_rope or self.rope}
        return {turn: ropes[turn[0]] for turn in turns}

    @property
    def turned_width(self) -> int:
        """Width of what is rotated of a head, or of which a share is."""
        latent = self.attention.latent
        return self.shape.head_dim if latent is None else latent.rotated

    @property
    def head_norm_widths(self) -> tuple[int, int]:
        """Lengths of the weights of the norms of queries and of keys."""
        shape = self.shape
        if self.attention.head_norm_of == "head":
            return shape.head_dim, shape.head_dim
        return shape.query, shape.kv_heads * shape.head_dim

    def find_rope(self, layer: int) -> Rope:
        """Rotary positions of ``layer``."""
        other = self.other_rope
        return self.rope if other is None or layer not in other.layers else other
