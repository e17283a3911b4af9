"""The model document: everything about a model that is not a weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self, cast

from pydantic import Field

from pi2.formats import find_packing
from pi2.model.blocks import Block, make_blocks
from pi2.model.ffn import find_normal_quantile
from pi2.plan.documents.common import (
    Document,
    Identifier,
    Sampling,
)
from pi2.plan.documents.model_blocks import BlockEntry
from pi2.plan.documents.model_mixing import (
    AltUp,
    Attention,
    Convolution,
    LayerEmbedding,
    LayerKind,
    LayerKinds,
    Mixer,
    OtherHeads,
    OtherRope,
    Positions,
    Recurrence,
    Rope,
)
from pi2.plan.documents.model_parts import (
    SMOOTH_ACTIVATIONS,
    Ffn,
    Moe,
    Multipliers,
    Norm,
    Predictor,
    Quantization,
    Shape,
    SideFfn,
    Sparsity,
    Tokenizer,
)
from pi2.plan.documents.model_tensors import Tensors
from pi2.plan.weights.layout import BundleLayout, ScalesPlace, fill_groups, lay_out_bundle


class ModelKeys(Document):
    """Keys of a model document that say one thing of all layers, or list layers."""

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
    pooling: Literal["mean", "last"] = "mean"
    """Which tokens an embedding of a text is made of, if nobody says: all, or the last one."""
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


class WrittenModel(ModelKeys):
    """A model (``*.model.toml``): shape, operators, tensors, tokenizer, quantisation."""

    blocks: tuple[BlockEntry, ...] = Field(default=(), exclude=True)
    """What layers differ in, instead of the keys that list layers: entries of ``[[blocks]]``."""


class Model(ModelKeys):
    """A model document as it was read: blocks are keys by layer."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """What each layer is, the first layer first."""
        return make_blocks(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update)  # values are frozen: deep ones are shared, too
        copied.__dict__.pop("blocks", None)
        return copied

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

    def count_active(self, layer: int) -> int:
        """FFNs of ``layer`` that compute a token: 1 without experts, 0 without an FFN."""
        if layer in self.ffn.absent_layers:
            return 0
        if self.moe is None:
            return 1
        if not self.has_router(layer):
            return self.count_unrouted(layer)
        return self.moe.active_experts + self.moe.shared_experts

    def count_token_neurons(self, layer: int) -> int:
        """FFN neurons of ``layer`` that may compute a token, without those that fill experts up."""
        moe, count = self.moe, self.count_active(layer)
        if moe is None or count == 0:
            return count * self.shape.ffn
        if not self.has_router(layer):
            return moe.find_dense_width(layer, self.shape.ffn)
        return moe.active_experts * self.shape.ffn + moe.count_shared(self.shape.ffn)

    @property
    def token_neurons(self) -> int:
        """FFN neurons that may compute a token, of all layers together."""
        return sum(self.count_token_neurons(layer) for layer in range(self.shape.layers))

    @property
    def most_active(self) -> int:
        """FFNs that compute a token, of the layer with most."""
        return max(self.count_active(layer) for layer in range(self.shape.layers))

    def _count_dense(self) -> int:
        """Experts that it takes to hold the FFN of a dense layer."""
        moe = self.moe
        return 0 if moe is None or moe.latent is not None else moe.count_dense(self.shape.ffn)

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
        Shared scales of downs have one place in stores."""
        ffn = self.ffn
        if find_packing(self.quantization.ffn).shares_down_scales:
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
