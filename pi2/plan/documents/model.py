"""The model document: everything about a model that is not a weight."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from pi2.formats import find_packing
from pi2.model.blocks import Block, make_blocks
from pi2.model.options import check_operators
from pi2.model.tensor import DenseTensor
from pi2.model.tensors import list_tensors
from pi2.plan.documents.common import Document, Identifier, Sampling
from pi2.plan.documents.model_mixing import (
    AltUp,
    Attention,
    BlockEntry,
    Convolution,
    Hyper,
    LayerEmbedding,
    LayerKinds,
    OtherHeads,
    OtherRope,
    Positions,
    Recurrence,
    Rope,
)
from pi2.plan.documents.model_parts import (
    SMOOTH_ACTIVATIONS,
    Ffn,
    GatedStreams,
    Moe,
    Multipliers,
    Ngrams,
    Norm,
    Predictor,
    Quantization,
    Shape,
    SideFfn,
    Sparsity,
    Tensors,
    Tokenizer,
)
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
    """MoE; absent means one FFN per layer."""
    side_ffn: SideFfn | None = None
    """A dense FFN in addition to the experts."""
    layer_embedding: LayerEmbedding | None = None
    """Embeddings that every layer has of its own, if there are some."""
    altup: AltUp | None = None
    """Several residual streams, if the model has them."""
    hyper: Hyper | None = None
    """Residual streams that attention and FFNs mix, if the model has them."""
    gated_streams: GatedStreams | None = None
    """Residual streams with gates of low rank, if the model has them."""
    ngrams: Ngrams | None = None
    """Rows that n-grams of tokens choose and a layer adds to these streams, if there are some."""
    operators: Annotated[dict[str, dict[str, Any]], AfterValidator(check_operators)] = {}
    """Options of operators that modules of ``pi2.model`` add, by name: ``mtp`` is the input of an
    MTP head, others work at the end of every layer."""
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
    """Default tokens of a text's embedding: all, or the last one."""
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
    runs use only their plan's."""


class WrittenModel(ModelKeys):
    """A model (``*.model.toml``): shape, operators, tensors, tokenizer, quantisation."""

    blocks: tuple[BlockEntry, ...] = Field(default=(), exclude=True)
    """What layers differ in, instead of the keys that list layers: entries of ``[[blocks]]``."""


class Model(ModelKeys):
    """A model document as it was read: blocks are keys by layer."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return make_blocks(self)

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What others have made of it, by their keys."""
        return {}

    @cached_property
    def dense_tensors(self) -> tuple[DenseTensor, ...]:
        """Its dense tensors, predictors excepted, in the order of stores."""
        return tuple(list_tensors(self))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update)  # values are frozen: deep ones are shared, too
        for derived in ("blocks", "dense_tensors", "derived"):
            copied.__dict__.pop(derived, None)
        return copied

    @property
    def layer_neurons(self) -> int:
        """FFN neurons of a layer, including all of its experts."""
        return self.shape.ffn * self.expert_count

    @property
    def expert_count(self) -> int:
        """FFNs of a layer: its experts, then shared experts, then any that only dense layers need;
        1 without experts."""
        moe = self.moe
        if moe is None:
            return 1
        dense = moe.count_dense(self.shape.ffn) if moe.latent is None else 0
        return max(moe.experts + moe.shared_experts, dense)

    @property
    def token_neurons(self) -> int:
        """FFN neurons that may compute a token, of all layers together."""
        return sum(block.ffn.neurons for block in self.blocks)

    @property
    def most_active(self) -> int:
        """FFNs that compute a token, of the layer with most."""
        return max(block.ffn.active for block in self.blocks)

    @property
    def neuron_width(self) -> int:
        """Width of the vectors that neurons read and add to: the residual stream's, unless experts
        have a width of their own."""
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

    @property
    def cut_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, block in enumerate(self.blocks) if block.ffn.closed > 0.0)

    @property
    def states(self) -> tuple[tuple[int, int], ...]:
        """The states that a sequence has: of each the layer, and the number of the mixer in it."""
        blocks = enumerate(self.blocks)
        return tuple((layer, number) for layer, block in blocks for number in block.states)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state, or several of them."""
        return tuple(layer for layer, block in enumerate(self.blocks) if block.states)

    @property
    def is_mtp(self) -> bool:
        """Whether it is the MTP head of another model, for which it drafts."""
        return "mtp" in self.operators

    @property
    def side_width(self) -> int:
        """Neurons that stores keep next to a layer's experts; layers with fewer are padded with
        zeros. If experts have another width than the residual stream, dense layers keep their FFN
        there."""
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
            gate_up=self.quantization.gate_up,
        )
