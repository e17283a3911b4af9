"""Shape, FFN, experts and storage of a model document."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from pi2.formats import name_packings
from pi2.plan.documents.common import Count, FilePath, LayerNumber, Origin, Share, Table
from pi2.plan.weights.layout import fill_groups


class Shape(Table):
    """Sizes, in elements."""

    layers: Annotated[int, Field(ge=1, le=1024, examples=[32])]
    """Number of transformer blocks."""
    hidden: Annotated[int, Field(ge=1, le=2**20, examples=[4096])]
    """Width of the residual stream."""
    ffn: Annotated[int, Field(ge=1, le=2**22, examples=[11008])]
    """FFN neurons per layer; MoE: of one expert."""
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
    """``rmsnorm``: x / sqrt(mean(x^2) + epsilon) * weight; ``layernorm``: the same for x -
    mean(x)."""
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
    """Whether the inputs of attention and FFN are normalised (not in OLMo 2)."""
    embedding: bool = False
    """Whether embeddings go through an RMSNorm without weights before the first layer
    (nanochat)."""
    embedding_weights: bool = False
    """Whether that norm is of ``kind``, with weights, and biases if others have them (BLOOM)."""
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


class Moe(Table):
    """MoE: for every token a router picks a few of a layer's FFNs."""

    experts: Annotated[int, Field(ge=1, le=4096, examples=[8])]
    """FFNs of a layer, each of ``shape.ffn`` neurons."""
    active_experts: Count
    """Number of experts that compute each token."""
    router: Literal["softmax", "sigmoid", "mixer", "root_softplus", "none"] = "softmax"
    """Function that turns router scores into weights; ``mixer``: a softmax for each active expert
    of the scores that are not far below its own (Phi-3.5-MoE); ``root_softplus``: the root of their
    softplus (DeepSeek V4); ``none``: no router: the experts are equal parts of one FFN and compute
    every token; layers may have FFNs of different widths (Gemma 4 E2B)."""
    router_input: Literal["ffn", "layer", "stream"] = "ffn"
    """Input of the router: the normalised input of the FFN, the layer's unchanged input, or the
    FFN's unnormalised input through an RMSNorm of the router's own (Gemma 4)."""
    input_scale: float = Field(default=1.0, gt=0.0, examples=[0.02])
    """Factor of what the router reads (``stream``)."""
    weighs: Literal["output", "input"] = "output"
    """Whether the weight of an expert multiplies its output, or its input (Llama 4)."""
    expert_scale: bool = False
    """Whether the weight of each active expert is multiplied by a number of the expert's own."""
    normalise_weights: bool = True
    """Whether the weights of the active experts are scaled to add up to 1."""
    shared_experts: Annotated[int, Field(ge=0, le=4096, examples=[4])] = 0
    """Additional FFNs of ``shape.ffn`` neurons each, which compute every token; one of four times
    as many neurons is four."""
    shared_gate: bool = False
    """Whether a router of their own weights the shared experts, by the sigmoid of its score."""
    shared_factor: float = Field(default=1.0, gt=0.0, examples=[0.5])
    """Factor of what the shared experts give (Cohere 2 with experts)."""
    shared_ffn: Count | None = None
    """Neurons of all shared experts together, if the last one has fewer than the others."""
    router_bias: bool = False
    """Whether the router's scores have a bias."""
    choice_bias: bool = False
    """Whether experts are chosen by their weights and a bias of each, which is not part of the
    weights (DeepSeek V3)."""
    choice_bias_of: Literal["weight", "score"] = "weight"
    """What that bias is added to: weights, or the scores that they are made of (Kolibri)."""
    listed_layers: tuple[LayerNumber, ...] = Field(default=(), examples=[[0, 1, 2]])
    """Layers whose experts a table lists for each token of the vocabulary; scores only weigh them
    (DeepSeek V4)."""
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
    """Layers with one dense FFN.  Its neurons are stored as the first experts, which then compute
    every token."""
    dense_ffn: Count | None = Field(default=None, examples=[10944])
    """Neurons of the FFN of ``dense_layers``."""
    latent: Annotated[int, Field(ge=1, le=2**20)] | None = Field(default=None, examples=[1024])
    """Width of experts' inputs and outputs, if it differs from the residual stream's: one
    projection leads to it, another one back (Nemotron 3).  Shared experts are then a
    ``side_ffn``."""

    def count_shared(self, ffn: int) -> int:
        """Neurons of the shared experts, of ``ffn`` neurons each unless stated otherwise."""
        return self.shared_experts * ffn if self.shared_ffn is None else self.shared_ffn

    def count_dense(self, ffn: int) -> int:
        """Experts of ``ffn`` neurons that it takes to hold the FFN of a dense layer."""
        if not self.dense_layers or self.dense_ffn is None:
            return 0
        return -(-self.dense_ffn // ffn)


class SideFfn(Table):
    """A dense FFN in every layer; its output is added to the experts'.

    It is stored with attention's weights, in their precision, and computes every token.  Activation
    and gates are as in ``ffn``."""

    width: Annotated[int, Field(ge=1, le=2**22, examples=[2112])]
    """Neurons."""
    norms: bool = True
    """Whether it has its own norms before and after it (Gemma 4); else it reads the router's input
    (Nemotron 3)."""


Activation = Literal["relu", "drelu", "fatrelu", "relu2", "silu", "gelu", "gelu_tanh", "xielu"]
"""Activation of the FFN.  dReLU applies ReLU to gate and up (TurboSparse, eq. 2); FATReLU is zero
below a threshold (ProSparse); relu2 is the square of ReLU; gelu_tanh is the approximation of GELU
that Gemma uses."""

SMOOTH_ACTIVATIONS = frozenset({"silu", "gelu", "gelu_tanh", "xielu"})
"""Activations that are never exactly zero: leaving a neuron out always changes the result."""


Curve = Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]


_NO_LIMIT = 3e38


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
    limits: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(default=(), examples=[[0.0, 7.0]])
    """Limits of each layer's experts, if they differ; 0 means none."""
    other_limits: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        default=(), examples=[[0.0, 16.0]]
    )
    """The same of dense FFNs and shared experts."""
    limit_of: Literal["gate", "activation"] = "gate"
    """Whether gates are cut, or their activations."""
    curves: tuple[Curve, ...] = Field(default=(), examples=[[[0.8, 0.8, 0.5]]])
    """Each layer's a, b and c of ``xielu``: a x^2 + c x above 0, b (exp(x) - 1 - x) + c x below."""
    up_offset: float = 0.0
    """Added to ups before they are multiplied with gates (gpt-oss: 1)."""

    def describe_gate(
        self, layer: int | None = None, *, is_routed: bool = False
    ) -> tuple[str, float, float, float]:
        """The kind of activation of a layer's gates, as instructions name it, with its limit, slope
        and offset; an absent limit is huge for ``swiglu``, else 0."""
        limits = self.limits if is_routed else self.other_limits
        own = limits[layer] or None if layer is not None and layer < len(limits) else self.limit
        match self.activation:
            case "silu" if own is not None and self.limit_of == "activation":
                return "cut_silu", own, self.slope, self.up_offset
            case "silu" if own is not None or self.slope != 1.0:
                return "swiglu", _NO_LIMIT if own is None else own, self.slope, self.up_offset
            case "xielu":
                assert layer is not None
                rise, below, straight = self.curves[layer]
                return "xielu", rise, below, straight
            case "fatrelu":
                return "fatrelu", self.threshold, self.slope, self.up_offset
        return self.activation, own or 0.0, self.slope, self.up_offset


class Predictor(Table):
    """Low-rank activation predictors: fc2 relu(fc1 x) + bias >= threshold, x after the FFN norm."""

    rank: Count
    """Rows of fc1, a multiple of 32; the largest where layers differ."""
    recall: Share | None = None
    """Recall: share of the active neurons that are predicted, on held-out text."""
    active: Share | None = None
    """Share of neurons that are predicted to be active."""


class Sparsity(Origin):
    """Statistics of the FFN's activations."""

    active: Share
    """Mean share of neurons that a token activates; MoE: of its active experts' neurons."""
    skew: Share | None = None
    """Share of a layer's neurons that make 80 % of its activations."""
    gate_open: Share | None = None
    """Mean share of neurons with an open gate, which compute if gates find active neurons; absent
    means unknown."""


if TYPE_CHECKING:
    Precision = str
    AttentionPrecision = str
    FfnPrecision = str
    BlockFormat = str
else:
    Precision = Literal[name_packings("tables")]
    AttentionPrecision = Literal[name_packings("projections")]
    FfnPrecision = Literal[name_packings("neurons")]
    BlockFormat = Literal[name_packings("gates")]


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
    gate_up: BlockFormat | None = None
    """Gate and up rows, if a store keeps them as a GGUF file has them; ``ffn`` is then of down
    columns."""
    attention: AttentionPrecision = "int4"
    """Query, key, value and output projections."""
    embedding: Precision = "int8"
    """Embedding table, and the head where it is tied."""
    head: Precision = "int8"
    """Output head where it is not tied."""
    predictor: Precision = "int8"
    """Activation predictors."""

    @property
    def gates(self) -> str:
        """Precision of gate and up rows."""
        return self.gate_up or self.ffn


_Whole = Annotated[int, Field(ge=0, le=2**53)]


class GatedStreams(Table):
    """Residual streams that attention, FFNs and the head read by gates (Qwen3.8 Flash Next).

    A token has ``streams`` vectors x, each its embedding at first.  n is all of them, each with a
    norm of its own.  With m = silu(down n / streams), an operator reads the mean of all streams of
    n sigmoid(up m).  With o, which it gives, stream j becomes x[j] + 2 sigmoid(w[j] / streams) o;
    w is inject n.  The head reads in the same way, without a further norm."""

    streams: Annotated[int, Field(ge=2, le=16, examples=[4])]
    """Vectors of a token."""
    rank: Count
    """Elements of m."""


SMALLEST_PRODUCT = 1e-6
"""Lower bound of |k q| / sqrt(hidden) in `Ngrams`; 0 stays 0."""


class Ngrams(Table):
    """Rows of a table, chosen by a token and those before it, which a layer adds to its streams.

    A token is number 0, the one before it 1, and so on.  From an end token on, and before the
    first token, all count as end tokens.  The hash of n of them is the exclusive or of their
    products with ``multipliers``, of 64 bits.  For each n from 2 on, equally many rows are looked
    up: number ``offsets[h]`` + hash mod ``sizes[h]`` is row h.  All of them together are e.

    With k = norm(key e), q = norm(x) and v = value e, stream j gets y[j] = sigmoid(s) v.  Here s is
    the root of |k[j] q[j]| / sqrt(hidden), with the sign of the product.  It also gets silu(c): c
    is a convolution of norm(y), which reads tokens whose distance is a multiple of the longest
    n."""

    layer: Annotated[int, Field(ge=0, examples=[1])]
    """The layer that begins with them."""
    rows: Annotated[int, Field(ge=1, le=2**31 - 1, examples=[8_000_000])]
    """Rows of the table."""
    kernel: Annotated[int, Field(ge=1, le=16, examples=[4])]
    """Tokens that the convolution reads."""
    end_token: Annotated[int, Field(ge=0, examples=[151643])]
    """Token that ends a text."""
    multipliers: Annotated[
        tuple[_Whole, ...], Field(min_length=2, max_length=8, examples=[[3, 5, 7]])
    ]
    """Factors of a token and those before it: as many as the longest n."""
    sizes: Annotated[tuple[Count, ...], Field(min_length=1, examples=[[499_979, 499_957]])]
    """Rows that a row is chosen from, of all n in turn."""
    offsets: Annotated[tuple[_Whole, ...], Field(min_length=1, examples=[[0, 499_979]])]
    """The first of these."""

    @property
    def length(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def count(self) -> int:
        """Rows of a token."""
        return len(self.sizes)

    @property
    def fits(self) -> bool:
        """Whether every n has equally many rows, and the table all of them."""
        if len(self.offsets) != self.count or self.count % (self.length - 1):
            return False
        pairs = zip(self.offsets, self.sizes, strict=True)
        return max(first + size for first, size in pairs) <= self.rows

    @property
    def window(self) -> int:
        """Tokens that the convolution reaches over, the token itself included."""
        return (self.kernel - 1) * self.length + 1


_KEYS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TENSOR_OPTIONS = frozenset(key for key, own in _KEYS.items() if "default" in own)
"""Keys of `Tensors` that are not names."""


def _describe(own: Mapping[str, Any]) -> tuple[Any, Any]:
    """Type and default of a key."""
    if "name" in own:
        return str, own["name"]
    if "example" in own:
        return str | None, Field(default=None, examples=[own["example"]])
    return Literal[tuple(own["choices"])] if "choices" in own else bool, own["default"]


def _make_class() -> type[Table]:
    found = {key: _describe(own) for key, own in _KEYS.items()}
    kinds = {key: kind for key, (kind, _) in found.items()}
    texts = {key: own["says"] for key, own in _KEYS.items()}
    values = {
        "__module__": __name__,
        "__qualname__": "Tensors",
        "__doc__": _TEXT,
        "__annotations__": {"TEXTS": ClassVar[Mapping[str, str]], **kinds},
        "TEXTS": texts,
        **{key: default for key, (_, default) in found.items()},
    }
    return new_class("Tensors", (Table,), exec_body=lambda names: names.update(values))


_TEXT = """Names of the checkpoint's tensors; ``{layer}`` stands for the layer's number, and
``{expert}`` for the expert's in the FFN's and predictors' names.  An FFN's name without
``{expert}`` means one tensor of all experts, [experts, ...]."""

if TYPE_CHECKING:

    class Tensors(Table):
        fused_order: Literal["stacked", "grouped"] = "stacked"
        fused_qkv: str | None = None
        fused_gate_up: str | None = None
        fused_shared: str | None = None
        fused_dense: str | None = None
        query_gate: str | None = None
        experts_turned: bool = False

        def __getattr__(self, name: str) -> str: ...

else:
    Tensors = _make_class()
