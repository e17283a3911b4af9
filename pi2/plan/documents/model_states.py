"""Layers that keep a state of fixed size instead of keys and values."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Table

Mixer = Literal["attention", "delta", "mamba", "mamba1", "convolution"]
"""What mixes tokens: softmax attention, a gated delta rule (Gated DeltaNet), Mamba-2, the first
Mamba, or a short gated convolution."""

_MIXER = "(attention|delta|mamba|mamba1|convolution)"

LayerKind = Annotated[
    str, Field(pattern=rf"^(none|{_MIXER}(\+{_MIXER}){{0,63}})$", examples=["mamba+attention"])
]
"""What mixes the tokens of a layer: a mixer, several with ``+`` between them, one after the other,
each with a norm of its own and added to the residual stream (Nemotron-H), or ``none``."""

StepLimit = Annotated[float, Field(ge=0.0, examples=[0.001])]
"""A limit of step sizes."""


class LayerKinds(Table):
    """What mixes the tokens of each layer, where it is not attention in all of them."""

    kinds: Annotated[
        tuple[LayerKind, ...], Field(min_length=1, examples=[["delta", "delta", "attention"]])
    ]
    """One kind for every layer, the first first. ``delta``, ``mamba`` (Mamba-2), ``mamba1`` (the
    first Mamba) and ``convolution`` keep a state of fixed size for each sequence instead of keys
    and values; a model has at most one of them beside ``attention``. Layers of the kind
    ``mamba+attention`` have both, Mamba-2 first; those of the kind ``mamba+mamba+mamba`` have three
    of Mamba-2, each with its own weights and state; those of the kind ``none`` have an FFN alone.
    No layer has attention twice."""


class Recurrence(Table):
    """Sizes of layers of the kinds ``delta`` (Yang, Kautz and Hatamizadeh 2024, "Gated Delta
    Networks"; with decays of keys, Kimi Team 2025, "Kimi Linear"), ``mamba`` (Dao and Gu 2024,
    "Transformers are SSMs") and ``mamba1`` (Gu and Dao 2023, "Mamba"), which has one head, whose
    channels are its values."""

    key_heads: Annotated[int, Field(ge=1, le=2**14, examples=[16])]
    """Heads of queries and keys; Mamba-2's groups."""
    value_heads: Annotated[int, Field(ge=1, le=2**14, examples=[32])]
    """Heads of values, a multiple of ``key_heads``; Mamba-2's heads."""
    key_dim: Annotated[int, Field(ge=1, le=2**14, examples=[128])]
    """Width of a key; Mamba-2's state size."""
    value_dim: Annotated[int, Field(ge=1, le=2**14, examples=[128])]
    """Width of a value; Mamba-2's head width."""
    kernel: Annotated[int, Field(ge=1, le=64, examples=[4])] = 4
    """Tokens that the convolution before it reads, the token itself included."""
    convolution_bias: bool = False
    """Whether that convolution has a bias."""
    projection_bias: bool = False
    """Whether the projections into and out of the layer have biases (``mamba``)."""
    step_rank: Annotated[int, Field(ge=1, le=2**14)] | None = Field(default=None, examples=[256])
    """Elements that the step sizes of all channels are made of (``mamba1``, which needs it)."""
    part_norm: Literal["none", "plain", "weighted"] = "none"
    """Whether these elements, B and C go through an RMSNorm each, without weights (Falcon Mamba) or
    with them (Jamba; ``mamba1``)."""
    part_epsilon: float = Field(default=1e-6, gt=0.0)
    """Added to the mean of squares there."""
    decay_of: Literal["head", "key"] = "head"
    """Whether a head's state decays as a whole, or every element of its keys has a decay of its
    own (``delta``: Kimi Linear)."""
    decay_rank: Annotated[int, Field(ge=1, le=2**14)] | None = Field(default=None, examples=[128])
    """Elements that the decays of keys are made of, and these of the layer's input; absent means
    that decays are made of the input."""
    decay_floor: Annotated[float, Field(lt=0.0)] | None = Field(default=None, examples=[-5.0])
    """Least logarithm of a decay of keys: decays are exp(floor sigmoid(rate step)) then (Ling 3);
    absent means exp(-rate softplus(step))."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """What gates of the output go through (``delta``)."""
    gate_rank: Annotated[int, Field(ge=1, le=2**14)] | None = Field(default=None, examples=[128])
    """Elements that these gates are made of, and these of the layer's input (``delta``); absent
    means that gates are made of the input."""
    norm_groups: Count = 1
    """Parts of its output that are normalised apart (``mamba``)."""
    shortest_step: StepLimit = 0.0
    """Least step size (``mamba``)."""
    longest_step: Annotated[float, Field(gt=0.0, examples=[0.1])] | None = None
    """Greatest step size (``mamba``); absent means no limit."""

    @property
    def width(self) -> int:
        """Elements of all value heads together."""
        return self.value_heads * self.value_dim


class Convolution(Table):
    """Layers of the kind ``convolution``: out(c * conv(b * x)), b, c and x projected (LFM2)."""

    width: Annotated[int, Field(ge=1, le=2**20, examples=[2048])]
    """Channels."""
    kernel: Annotated[int, Field(ge=1, le=64, examples=[3])] = 3
    """Tokens that the convolution reads, the token itself included."""
    bias: bool = False
    """Whether projections and convolution have biases."""
