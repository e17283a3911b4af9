"""The model document: everything about a model that is not a weight."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents import Count, Document, Identifier, Origin, Share, Table

Precision = Literal["int4", "int8", "fp16"]
"""Storage type of weights.  int4 and int8 have one fp16 scale per group of 32."""

Activation = Literal["relu", "drelu", "fatrelu", "relu2", "silu"]
"""Activation of the FFN.  dReLU applies ReLU to gate and up (TurboSparse, eq. 2); FATReLU is zero
below a threshold (ProSparse); relu2 is the square of ReLU."""


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


class Norm(Table):
    """Normalisation before attention, before the FFN, and at the end."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    """``rmsnorm``: x / sqrt(mean(x^2) + epsilon) * weight."""
    epsilon: float = Field(default=1e-5, gt=0.0)
    """Added to the mean of squares."""


class Rope(Table):
    """Rotary position embedding, rotating the two halves of a head."""

    kind: Literal["plain", "linear", "llama3"] = "plain"
    """Scaling of positions or frequencies."""
    theta: float = Field(default=10000.0, gt=1.0)
    """Base of the frequencies."""
    factor: float = Field(default=1.0, ge=1.0)
    """By how much the context is stretched (``linear``, ``llama3``)."""
    low_frequency_factor: float = Field(default=1.0, gt=0.0)
    """Longest wavelength kept unscaled by factor (``llama3``)."""
    high_frequency_factor: float = Field(default=4.0, gt=0.0)
    """Shortest wavelength that is scaled (``llama3``)."""
    original_context: Count = 8192
    """Context before stretching, in tokens (``llama3``)."""


class Attention(Table):
    """Attention beyond its sizes."""

    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    sliding_window: Count | None = None
    """Tokens that a query looks back, itself included; absent means all."""


class Ffn(Table):
    """The gated feed-forward network: down(act(gate x) * up x)."""

    activation: Activation
    """Its activation."""
    threshold: float = 0.0
    """Activations at or below it are zero (``fatrelu``)."""


class Moe(Table):
    """A mixture of experts: for every token a router picks a few of a layer's FFNs."""

    experts: Annotated[int, Field(ge=2, le=4096, examples=[8])]
    """FFNs of a layer, each of ``shape.ffn`` neurons."""
    active_experts: Count
    """How many of them compute a token."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's scores into weights."""
    router_input: Literal["ffn", "layer"] = "ffn"
    """What the router reads: the normalised input of the FFN, or the layer's input as it is."""
    normalise_weights: bool = True
    """Whether the weights of the active experts are scaled to add up to 1."""


class Tokenizer(Table):
    """How text becomes tokens."""

    file: str = "tokenizer.json"
    """File of the `tokenizers` library, relative to the neuron store."""
    bos: int | None = Field(default=None, ge=0, examples=[1])
    """Id of the token that begins a sequence."""
    eos: tuple[int, ...] = Field(default=(), examples=[[2]])
    """Ids that end a generation."""
    add_bos: bool = False
    """Whether a prompt begins with ``bos``."""


class Quantization(Table):
    """Precision of the weights by class of tensor."""

    ffn: Precision = "int4"
    """Neuron bundles."""
    attention: Precision = "int4"
    """Query, key, value and output projections."""
    embedding: Precision = "int8"
    """Embedding table, and the head where it is tied."""
    head: Precision = "int8"
    """Output head where it is not tied."""
    predictor: Precision = "int8"
    """Activation predictors."""


class Tensors(Table):
    """Names of the checkpoint's tensors; ``{layer}`` stands for the layer's number and, in a
    mixture of experts, ``{expert}`` for the expert's in the FFN's and predictors' names."""

    embedding: str = "model.embed_tokens.weight"
    """Embedding table [vocab, hidden]."""
    attention_norm: str = "model.layers.{layer}.input_layernorm.weight"
    """Norm before attention [hidden]."""
    query: str = "model.layers.{layer}.self_attn.q_proj.weight"
    """Query projection [heads x head_dim, hidden]."""
    key: str = "model.layers.{layer}.self_attn.k_proj.weight"
    """Key projection [kv_heads x head_dim, hidden]."""
    value: str = "model.layers.{layer}.self_attn.v_proj.weight"
    """Value projection [kv_heads x head_dim, hidden]."""
    output: str = "model.layers.{layer}.self_attn.o_proj.weight"
    """Output projection of attention [hidden, heads x head_dim]."""
    query_bias: str = "model.layers.{layer}.self_attn.q_proj.bias"
    """Bias of the query projection."""
    key_bias: str = "model.layers.{layer}.self_attn.k_proj.bias"
    """Bias of the key projection."""
    value_bias: str = "model.layers.{layer}.self_attn.v_proj.bias"
    """Bias of the value projection."""
    ffn_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    """Norm before the FFN [hidden]."""
    gate: str = "model.layers.{layer}.mlp.gate_proj.weight"
    """Gate projection [ffn, hidden]."""
    up: str = "model.layers.{layer}.mlp.up_proj.weight"
    """Up projection [ffn, hidden]."""
    down: str = "model.layers.{layer}.mlp.down_proj.weight"
    """Down projection [hidden, ffn]."""
    final_norm: str = "model.norm.weight"
    """Norm after the last layer [hidden]."""
    head: str = "lm_head.weight"
    """Output head [vocab, hidden], where it is not tied."""
    router: str = "model.layers.{layer}.block_sparse_moe.gate.weight"
    """Router of a mixture of experts [experts, hidden]."""
    predictor_in: str = "model.layers.{layer}.mlp.predictor.fc1.weight"
    """First matrix of the activation predictor [rank, hidden]."""
    predictor_out: str = "model.layers.{layer}.mlp.predictor.fc2.weight"
    """Second matrix of the activation predictor [ffn, rank]."""
    predictor_bias: str = "model.layers.{layer}.mlp.predictor.bias"
    """Bias of the activation predictor [ffn]."""


class Predictor(Table):
    """Low-rank activation predictors: fc2 relu(fc1 x) + bias >= threshold, x after the FFN norm."""

    rank: Count
    """Rows of fc1, a multiple of 32; the largest where layers differ."""
    recall: Share | None = None
    """Share of truly active neurons that are predicted, on held-out text."""
    active: Share | None = None
    """Share of neurons that are predicted to be active."""


class Sparsity(Origin):
    """What is known of the FFN's activations."""

    active: Share
    """Mean share of neurons that a token activates; in a mixture, of its active experts'."""
    skew: Share | None = None
    """Share of a layer's neurons that make 80 % of its activations."""


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
    attention: Attention = Attention.default()
    """Attention."""
    ffn: Ffn
    """Feed-forward network."""
    moe: Moe | None = None
    """Mixture of experts; absent means one FFN per layer."""
    tied_head: bool = False
    """Whether the head is the embedding table."""
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

    @property
    def layer_neurons(self) -> int:
        """FFN neurons of a layer, those of all experts together."""
        return self.shape.ffn * (self.moe.experts if self.moe is not None else 1)
