"""The feed-forward network of a model, and what is known of its sparsity."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, LayerNumber, Origin, Share, Table

Activation = Literal["relu", "drelu", "fatrelu", "relu2", "silu", "gelu", "gelu_tanh"]
"""Activation of the FFN.  dReLU applies ReLU to gate and up (TurboSparse, eq. 2); FATReLU is zero
below a threshold (ProSparse); relu2 is the square of ReLU; gelu_tanh is the approximation of GELU
that Gemma uses."""

SMOOTH_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh"})
"""Those that are zero nowhere: no neuron can be left out without changing the result."""


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
