"""Sizes of a model, its norms, and its constant factors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Table
from pi2.plan.weights.layout import fill_groups


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


class Multipliers(Table):
    """Constants that a few families multiply by; 1 where they do not."""

    embedding: float = 1.0
    """Embeddings, as they enter the first layer."""
    residual: float = 1.0
    """What attention and the FFN add to the residual stream."""
    logits: float = 1.0
    """Logits, before their soft cap."""
