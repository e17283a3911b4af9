"""What a model document says of experts, and of what is beside them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, LayerNumber, Table


class Moe(Table):
    """A mixture of experts: for every token a router picks a few of a layer's FFNs."""

    experts: Annotated[int, Field(ge=1, le=4096, examples=[8])]
    """FFNs of a layer, each of ``shape.ffn`` neurons."""
    active_experts: Count
    """Number of experts that compute each token."""
    router: Literal["softmax", "sigmoid", "mixer", "none"] = "softmax"
    """Function that turns router scores into weights; ``mixer``: a softmax for each active expert
    of the scores that are not far below its own (Phi-3.5-MoE); ``none``: there is no router, the
    experts are equal parts of one FFN and compute every token, so that layers may have FFNs of
    different widths (Gemma 4 E2B)."""
    router_input: Literal["ffn", "layer", "stream"] = "ffn"
    """What the router reads: the normalised input of the FFN, the layer's input as it is, or what
    the FFN normalises, through an RMSNorm of the router's own (Gemma 4)."""
    input_scale: float = Field(default=1.0, gt=0.0, examples=[0.02])
    """Factor of what the router reads (``stream``)."""
    weighs: Literal["output", "input"] = "output"
    """Whether the weight of an expert multiplies what it gives, or what it reads (Llama 4)."""
    expert_scale: bool = False
    """Whether the weight of each active expert is multiplied by a number of the expert's own."""
    normalise_weights: bool = True
    """Whether the weights of the active experts are scaled to add up to 1."""
    shared_experts: Annotated[int, Field(ge=0, le=4096, examples=[4])] = 0
    """FFNs beside them, of ``shape.ffn`` neurons each, that compute every token; one of four times
    as many neurons is four."""
    shared_gate: bool = False
    """Whether a router of their own weights the shared experts, by the sigmoid of its score."""
    shared_factor: float = Field(default=1.0, gt=0.0, examples=[0.5])
    """Factor of what the shared experts give (Cohere 2 with experts)."""
    shared_ffn: Count | None = None
    """Neurons of all shared experts together, where the last one has fewer than the others."""
    router_bias: bool = False
    """Whether the router's scores have a bias."""
    choice_bias: bool = False
    """Whether experts are chosen by their weights and a bias of each, which is not part of the
    weights (DeepSeek V3)."""
    choice_bias_of: Literal["weight", "score"] = "weight"
    """What that bias is added to: weights, or the scores that they are made of (Kolibri)."""
    groups: Annotated[int, Field(ge=1, le=4096)] = 1
    """Groups of neighbouring experts, of which the best ones are chosen first."""
    active_groups: Annotated[int, Field(ge=1, le=4096)] = 1
    """Groups whose experts may be active."""
    group_score: Literal["best", "best-two"] = "best-two"
    """What groups are compared by: their best expert, or the sum of the best two."""
    scaling: float = Field(default=1.0, gt=0.0)
    """Factor of the active experts' weights."""
    tolerance: float = Field(default=0.01, gt=0.0)
    """Scores that are lower by more than twice this share do not count (``mixer``)."""
    dense_layers: tuple[LayerNumber, ...] = Field(default=(), examples=[[0]])
    """Layers that are no mixture but have one FFN.  Its neurons are stored as those of the first
    experts, as many as it takes, which then compute every token."""
    dense_ffn: Count | None = Field(default=None, examples=[10944])
    """Neurons of the FFN of ``dense_layers``."""
    latent: Annotated[int, Field(ge=1, le=2**20)] | None = Field(default=None, examples=[1024])
    """Width of what experts read and give, where it is not that of the residual stream: a
    projection makes it of the FFN's input, and another one brings what they give back (Nemotron
    3).  What is shared is a ``side_ffn`` then."""

    def has_router(self, layer: int) -> bool:
        """Whether a router chooses among the experts of ``layer``."""
        return self.router != "none" and layer not in self.dense_layers

    def find_dense_width(self, layer: int, ffn: int) -> int:
        """Neurons of the FFN of a ``layer`` without router, whose experts have ``ffn`` each."""
        if layer in self.dense_layers:
            assert self.dense_ffn is not None
            return self.dense_ffn
        return self.experts * ffn

    def count_shared(self, ffn: int) -> int:
        """Neurons of the shared experts, of ``ffn`` neurons each unless stated otherwise."""
        return self.shared_experts * ffn if self.shared_ffn is None else self.shared_ffn

    def count_unrouted(self, layer: int, ffn: int) -> int:
        """Experts of ``ffn`` neurons that compute every token in a ``layer`` without router."""
        return -(-self.find_dense_width(layer, ffn) // ffn)

    def count_dense(self, ffn: int) -> int:
        """Experts of ``ffn`` neurons that it takes to hold the FFN of a dense layer."""
        if not self.dense_layers or self.dense_ffn is None:
            return 0
        return -(-self.dense_ffn // ffn)


class SideFfn(Table):
    """A dense FFN beside the experts of every layer: what it and the experts give is added.

    It is kept with the weights of attention, in their precision, and computes every token.  The
    activation is that of ``ffn``, and so is whether neurons have gates.
    """

    width: Annotated[int, Field(ge=1, le=2**22, examples=[2112])]
    """Neurons."""
    norms: bool = True
    """Whether it has a norm of its own before it, and what it and the experts give is normalised
    apart (Gemma 4); else it reads what the router reads (Nemotron 3)."""
