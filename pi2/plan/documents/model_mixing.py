"""What mixes tokens in a model document, and its residual stream."""

from typing import Annotated, Literal

from pydantic import Field

from pi2.plan.documents.common import Count, Document, LayerNumber, Table
from pi2.plan.weights.layout import fill_groups

Divisor = Annotated[float, Field(ge=1e-6, le=1e9, examples=[1.5])]
"""What a frequency is divided by."""


class Rope(Table):
    """Rotary position embedding, rotating pairs of a head's elements."""

    kind: Literal["plain", "linear", "llama3", "yarn", "longrope", "proportional", "none"] = "plain"
    """Scaling of positions or frequencies; ``proportional``: frequencies and pairs are of the whole
    head, and the first ``share`` of the pairs rotate (Gemma 4); ``none`` rotates nothing."""
    theta: float = Field(default=10000.0, gt=1.0)
    """Base of the frequencies."""
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Part of a head that is rotated, from its first element on."""
    pairs: Literal["halves", "swapped", "neighbours"] = "halves"
    """Which elements of the checkpoint's heads turn together: one of each half of the rotated
    part, the one of the second half taken for the first (``swapped``: heads turn the other way;
    nanochat), or two that follow each other."""
    factor: float = Field(default=1.0, ge=1.0)
    """Factor by which the context is extended (all kinds but ``plain`` and ``none``)."""
    low_frequency_factor: float = Field(default=1.0, gt=0.0)
    """Longest wavelength kept unscaled by factor (``llama3``)."""
    high_frequency_factor: float = Field(default=4.0, gt=0.0)
    """Shortest wavelength that is scaled (``llama3``)."""
    original_context: Count = 8192
    """Context length before extension, in tokens (``llama3``, ``yarn``, ``longrope``)."""
    fast_rotations: float = Field(default=32.0, gt=0.0)
    """Pairs that turn at least so often within the original context are not scaled (``yarn``)."""
    slow_rotations: float = Field(default=1.0, gt=0.0)
    """Pairs that turn at most so often within it are scaled in full (``yarn``)."""
    whole_pairs: bool = True
    """Whether the two bounds are rounded to whole pairs (``yarn``)."""
    attention_factor: float | None = Field(default=None, gt=0.0, le=1e6, examples=[1.1])
    """Factor of sines and cosines; default: 0.1 ln(factor) + 1 (``yarn``), sqrt(1 + ln(factor)
    / ln(original_context)) (``longrope``), 1 (other kinds)."""
    short_factors: tuple[Divisor, ...] = ()
    """Divisors of each pair's frequency in sequences of up to ``original_context`` tokens
    (``longrope``)."""
    long_factors: tuple[Divisor, ...] = ()
    """Divisors of each pair's frequency in longer sequences (``longrope``)."""
    long_attention_factor: float | None = Field(default=None, gt=0.0, le=1e6, examples=[1.2])
    """Factor of sines and cosines in longer sequences, where it is another (``longrope``)."""

    def count_rotated(self, head_dim: int) -> int:
        """Elements of a head that have a pair; with ``proportional`` some of them may not
        rotate."""
        if self.kind == "proportional":
            return head_dim
        return 0 if self.kind == "none" else int(head_dim * self.share)

    def is_long(self, end: int) -> bool:
        """Whether sequences of ``end`` tokens have frequencies of longer ones (``longrope``)."""
        return self.kind == "longrope" and end > self.original_context


class OtherRope(Rope):
    """Rotary positions of some layers that differ from ``rope``."""

    layers: Annotated[tuple[LayerNumber, ...], Field(min_length=1, examples=[[0, 2, 4]])]
    """The layers that have them."""


class OtherHeads(Table):
    """Heads of some layers of attention that differ from ``shape`` (Gemma 4)."""

    layers: Annotated[tuple[LayerNumber, ...], Field(min_length=1, examples=[[5, 11]])]
    """The layers that have them."""
    heads: Annotated[int, Field(ge=1, le=2**14)] | None = Field(default=None, examples=[64])
    """Query heads; default: as many as other layers have."""
    kv_heads: Annotated[int, Field(ge=1, le=2**14, examples=[2])]
    """Key and value heads."""
    head_dim: Annotated[int, Field(ge=1, le=2**14, examples=[512])]
    """Width of one head."""
    keys_are_values: bool = False
    """Whether values are what the key projection gives: there is no other one."""


class Positions(Table):
    """Learned position vectors, added to the embeddings."""

    offset: int = Field(default=0, ge=0, le=2**16, examples=[2])
    """Rows of the checkpoint's table before position 0: 2 for OPT."""


class Latent(Table):
    """Latent attention (DeepSeek V2): the KV cache keeps one short vector a token, from which every
    head's key and value are projected.

    A head's query and key have a part that is not rotated and a rotated one; the rotated part of
    the key is the same for all heads.  ``shape.head_dim`` is the width of a head's value."""

    rank: Annotated[int, Field(ge=1, le=2**16, examples=[512])]
    """Width of that vector."""
    query_rank: Annotated[int, Field(ge=1, le=2**16)] | None = Field(default=None, examples=[1536])
    """Width of the vector that queries are made of; absent means that they are projected at
    once."""
    plain: Annotated[int, Field(ge=1, le=2**14, examples=[128])]
    """Elements of a head's query and key that are not rotated."""
    rotated: Annotated[int, Field(ge=0, le=2**14, multiple_of=2, examples=[64])]
    """Elements of a head's query and key that are rotated."""
    epsilon: float = Field(default=1e-6, gt=0.0)
    """Added to the mean of squares in the norms of both vectors."""
    bias: bool = False
    """Whether the projections to both vectors have a bias."""

    @property
    def key(self) -> int:
        """Width of a head's query and key."""
        return self.plain + self.rotated

    @property
    def kept(self) -> int:
        """Elements that the KV cache keeps of a token: the vector and the rotated key."""
        return self.rank + self.rotated


class Index(Table):
    """Attention to keys that an index chooses for every query.  Contexts of fewer keys are attended
    as a whole.  Of equal scores, the first position's counts.

    ``tokens`` (DeepSeek V3.2, GLM 5): heads of queries q, made of the vector that attention's
    queries are made of, meet one key k of each token, which has a LayerNorm; a token's score is the
    sum of w relu(q k) over heads, with weights w made of the layer's input.  ``blocks`` (MiniMax
    M3): a head for each key head of attention chooses blocks of keys by the largest q k in them;
    queries and keys have the norm of heads."""

    kind: Literal["tokens", "blocks"]
    """Whether it chooses tokens, for all heads, or blocks of tokens, for each key head."""
    heads: Annotated[int, Field(ge=1, le=2**12, examples=[64])]
    """Heads of the index."""
    width: Annotated[int, Field(ge=2, le=2**14, examples=[128])]
    """Elements of a head's query, and of the key; the first ones are rotated, as many as in
    attention."""
    chosen: Annotated[int, Field(ge=1, le=2**24, examples=[2048])]
    """Tokens or blocks that are chosen."""
    block: Annotated[int, Field(ge=1, le=2**16, examples=[128])] = 1
    """Tokens of a block (``blocks``)."""
    local: Annotated[int, Field(ge=0, le=2**16, examples=[1])] = 0
    """Last blocks, the query's own included, that are always chosen (``blocks``)."""
    pairs: Literal["halves", "neighbours"] = "halves"
    """Which elements turn together, as ``rope.pairs`` (``neighbours``: GLM 5)."""
    epsilon: float = Field(default=1e-6, gt=0.0)
    """Added to the variance in the LayerNorm of keys (``tokens``)."""
    layers: tuple[LayerNumber, ...] | None = Field(default=None, examples=[[3, 4, 5]])
    """Layers of attention that choose; absent means all."""
    shared_layers: tuple[LayerNumber, ...] = Field(default=(), examples=[[3, 4, 5]])
    """Layers among them without an index of their own: the choice of the last layer before them
    with one counts for them (GLM 5.2)."""

    @property
    def reach(self) -> int:
        """Tokens of the longest context of which every key is attended."""
        return self.chosen * self.block


class Pooled(Table):
    """Attention of query heads to one vector of each token, key and value at once, and to pooled
    vectors of blocks of tokens (DeepSeek V4).

    Queries have a norm without weights, vectors one of ``tensors.latent_norm``.  The last elements
    turn; mixes of heads turn back.  Groups of heads have an output projection each, and all of them
    one more.  A pooled vector is a sum over the tokens of a whole block.  Each token has values
    and gates; the softmax of an element's gates over the block, with a bias for each place, weighs
    its values.  The sum has a norm, and turns as the block's first token does.  Queries see pooled
    vectors of every block that ends before them, also behind their window."""

    query_rank: Annotated[int, Field(ge=1, le=2**16, examples=[1024])]
    """Width of the vector that queries are made of."""
    rotated: Annotated[int, Field(ge=2, le=2**14, multiple_of=2, examples=[64])]
    """Elements of a head that turn, the last ones."""
    groups: Annotated[int, Field(ge=1, le=2**14, examples=[8])]
    """Groups of heads with an output projection each."""
    output_rank: Annotated[int, Field(ge=1, le=2**16, examples=[1024])]
    """Elements that each of them gives."""
    blocks: tuple[Annotated[int, Field(ge=0, le=2**16)], ...] = Field(examples=[[0, 4, 128]])
    """Tokens of a block in every layer; 0 in those without pooled vectors."""
    overlapping: tuple[LayerNumber, ...] = Field(default=(), examples=[[1]])
    """Layers whose pooled vectors add the block before, by values and gates of its own."""


BY_LAYER = {
    "sliding_window": "window_layers",
    "head_norm": "head_norm_layers",
    "sinks": "sink_layers",
    "growth": "growth_layers",
}
"""Keys of ``attention`` that layers may differ in, and the key of the layers that have them."""


class Attention(Table):
    """Attention beyond its sizes."""

    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    output_bias: bool = False
    """Whether the output projection has a bias."""
    head_norm: bool = False
    """Whether queries and keys go through an RMSNorm."""
    head_norm_weights: bool = True
    """Whether checkpoints have weights of that norm; else all of them are 1 (Llama 4)."""
    head_norm_layers: tuple[LayerNumber, ...] | None = Field(default=None, examples=[[0, 1, 2]])
    """Layers that have that norm; absent means all."""
    head_norm_of: Literal["head", "all"] = "head"
    """What that norm is taken of: every head, or all heads together (OLMo 2)."""
    head_norm_place: Literal["before", "after"] = "before"
    """Whether it comes ``before`` the rotation, or ``after`` it (Hunyuan)."""
    value_width: Annotated[int, Field(ge=1, le=2**14)] | None = Field(default=None, examples=[128])
    """Elements of a head's value in checkpoints, where it is narrower than its key: stores fill it
    up with zeros, and the output projection's columns (MiMo V2 Flash)."""
    value_scale: float = Field(default=1.0, gt=0.0, le=1e6)
    """Factor of values (MiMo V2 Flash)."""
    value_norm: bool = False
    """Whether values go through an RMSNorm that has no weights, one for each head (Gemma 4)."""
    output_gate: bool = False
    """Whether queries come with as many gates, which multiply what the heads have mixed
    (Qwen3-Next)."""
    output_gate_of: Literal["element", "head"] = "element"
    """Gated outputs: each element of a head's output, or each head (LFM3), whose row of
    ``tensors.query_gate`` stores repeat for its elements. Latent attention gates heads, without
    repeated rows (Ling 3)."""
    output_gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
    """What becomes of a gate before it multiplies (``softplus``: Laguna)."""
    sub_norm: bool = False
    """Whether what the heads have mixed goes through an RMSNorm, all heads together, before the
    output projection (BitNet)."""
    clip: float | None = Field(default=None, gt=0.0, examples=[8.0])
    """Query, key and value elements are cut to -clip..clip."""
    sinks: bool = False
    """Whether every head has an additional score whose share of the attention is dropped
    (gpt-oss)."""
    sink_layers: tuple[LayerNumber, ...] | None = Field(default=None, examples=[[1, 2, 3]])
    """Layers that have such scores; absent means all (MiMo V2 Flash)."""
    growth: float = Field(default=0.0, ge=0.0)
    """Queries at position p are multiplied by 1 + growth ln(1 + floor((p + growth_offset) /
    growth_interval)) (Ministral 3, Llama 4)."""
    growth_interval: Count | None = Field(default=None, examples=[8192])
    """Tokens after which queries grow; default: ``rope.original_context``."""
    growth_offset: Annotated[int, Field(ge=0, le=1)] = 0
    """Added to positions first: 1 for Llama 4."""
    growth_layers: tuple[LayerNumber, ...] | None = Field(default=None, examples=[[3, 7]])
    """Layers whose queries grow; absent means all."""
    latent: Latent | None = None
    """Latent attention, if the model has it."""
    index: Index | None = None
    """Index that chooses keys, if the model has one."""
    pooled: Pooled | None = None
    """Attention to pooled vectors, if the model has it."""
    scale: float | None = Field(default=None, gt=0.0, examples=[0.0625])
    """Factor of attention scores; default: 1 / sqrt(head_dim)."""
    softcap: float | None = Field(default=None, gt=0.0, examples=[50.0])
    """Scores s become c tanh(s / c), where it is stated."""
    alibi: float | None = Field(default=None, gt=0.0, le=64.0, examples=[8.0])
    """Scores fall with the distance of tokens, where it is stated (BLOOM): by 2^(-alibi h / n)
    times the distance, for head h of n = 2^k, from 1 on. Heads beyond the last power of two have
    the odd ones of twice as many heads."""
    sliding_window: Count | None = None
    """Sliding window in tokens, the query's own included; absent means the whole context."""
    window_kind: Literal["sliding", "chunked"] = "sliding"
    """Whether a query sees that many tokens before it, or its own chunk of so many tokens, counted
    from the first (``chunked``; Llama 4)."""
    window_layers: tuple[LayerNumber, ...] | None = Field(default=None, examples=[[0, 2, 4]])
    """Layers that have the sliding window; absent means all."""
    kv_shared_layers: Annotated[int, Field(ge=0, le=1024, examples=[20])] = 0
    """Last layers without a KV cache of their own: they read the cache of the last earlier layer
    with the same window and heads (Gemma 4 E2B)."""

    def choose(self, layer: int) -> "Attention":
        """The options of a layer; those that others have are at their defaults."""
        lists = {key: getattr(self, listed) for key, listed in BY_LAYER.items()}
        absent = [key for key, own in lists.items() if own is not None and layer not in own]
        usual = {key: type(self).model_fields[key].default for key in absent}
        return self.model_copy(update=usual) if usual else self

    @property
    def has_bias(self) -> bool:
        return self.qkv_bias or (self.latent is not None and self.latent.bias)


_MIXER = "(attention|delta|mamba|mamba1|convolution)"

LAYER_KIND = rf"^(none|{_MIXER}(\+{_MIXER}){{0,63}})$"
LayerKind = Annotated[str, Field(pattern=LAYER_KIND, examples=["mamba+attention"])]
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
    first Mamba) and ``convolution`` keep a state of fixed size for each sequence instead of a KV
    cache; a model has at most one of them in addition to ``attention``. Layers of the kind
    ``mamba+attention`` have both, Mamba-2 first; ``mamba+mamba+mamba`` means three of Mamba-2, each
    with its own weights and state; ``none`` means only an FFN. No layer has attention twice."""
    parallel: bool = False
    """Whether mixers of a layer read the same input, by one norm (Falcon-H1)."""


class Recurrence(Table):
    """Sizes of recurrent layers: ``delta`` (Yang, Kautz and Hatamizadeh 2024, "Gated Delta
    Networks"; with decays of keys, Kimi Team 2025, "Kimi Linear"), ``mamba`` (Dao and Gu 2024,
    "Transformers are SSMs") and ``mamba1`` (Gu and Dao 2023, "Mamba"). The last has one head, whose
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
    output_norm: bool = True
    """Whether its output goes through an RMSNorm (``mamba``; not in Falcon-H1)."""
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


class LayerEmbedding(Table):
    """Embeddings that every layer has of its own (Gemma 4 E2B), in one table that stays on flash: a
    token needs one row of it.

    A layer's row times ``factor``, plus the norm of a projection of the first layer's input times
    ``projection_factor``, divided by sqrt(2), is e. After its FFN the layer adds
    norm(output(act(gate x) * e)) to the residual stream x, with the FFN's activation."""

    width: Annotated[int, Field(ge=1, le=2**14, examples=[256])]
    """Elements of a token's embedding for one layer."""
    vocab: Count | None = Field(default=None, examples=[262144])
    """Rows of the table, if fewer than tokens: other tokens have the first row."""
    factor: float = Field(default=1.0, gt=0.0, examples=[16.0])
    """Factor of the table's rows."""
    projection_factor: float = Field(default=1.0, gt=0.0, examples=[0.0255])
    """Factor of what the projection gives, before its norm."""

    @property
    def stored_width(self) -> int:
        """Length of a layer's vectors in backends: zeros fill it up."""
        return fill_groups(self.width)


SMALLEST_SQUARE = 1e-5
"""Lower bound of a mean square when `AltUp` scales a stream to the first stream."""


class AltUp(Table):
    """Residual streams that predict each other, and LAuReL (Gemma 3n; arXiv 2301.13310 and
    2411.07501).

    A token has ``streams`` vectors h.  The first is its embedding; of that, projections make the
    others, each with the root mean square of the first.  A layer begins with predictions p = h + C
    h, whose coefficients C [streams, streams] are a projection of m = tanh(R norm(h[0]) / hidden).
    Attention and the FFN change only the first, x, and after attention LAuReL adds u +
    norm(output(input u)), with u the input of attention; the sum is divided by sqrt(2).  After the
    FFN, m is made anew, of x, and all streams become h = p + (1 + Q m) (x - p[0]).  A layer's own
    embedding is gated by the first of them, times a vector where ``scaled``, and added to the
    others.  After the last layer, projections of the others, each with the root mean square of the
    first, and the first are averaged."""

    streams: Annotated[int, Field(ge=2, le=16, examples=[4])]
    """Vectors of a token."""
    laurel_rank: Count
    """Rows of LAuReL's projection."""
    scaled: bool = True
    """Whether what gates a layer's own embedding is multiplied with a vector first."""

    @property
    def others(self) -> int:
        """Vectors of a token after the first."""
        return self.streams - 1


class Hyper(Table):
    """Residual streams that layers mix (manifold-constrained hyper-connections; arXiv 2512.24880).

    A token has ``streams`` vectors x, each its embedding at first.  Attention and FFN have a
    projection m of norm(x), the norm of all streams together.  Parts of m have scales s and biases
    b.  They read the sum of p x, with p = sigmoid(s m + b) + ``epsilon``.  With o, which they give,
    stream j becomes q[j] o and the sum of C[i, j] x[i]; q is 2 sigmoid(s m + b).  C is softmax(s m
    + b) of every row, + ``epsilon``.  Its columns and rows are divided by their sums in turns,
    columns ``rounds`` times.  After the last layer, streams are averaged.  With ``head``, one more
    projection makes coefficients p of a sum instead."""

    streams: Annotated[int, Field(ge=2, le=8, examples=[4])]
    """Vectors of a token."""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 20
    """How often columns are divided by their sums."""
    epsilon: Annotated[float, Field(ge=0.0, le=1.0)] = 1e-6
    """Number that coefficients and sums have added."""
    head: bool = False
    """Whether the head reads a sum by coefficients of a projection (DeepSeek V4)."""

    @property
    def factors(self) -> int:
        """Numbers that a projection makes of a token."""
        return self.streams * (self.streams + 2)


_PART = r"(-?\d{1,4}|\d{1,4}-\d{1,4}|(-?\d{1,4})?:(-?\d{1,4})?(:0*[1-9]\d{0,3})?)"
LAYER_CHOICE = rf"^\s*{_PART}(\s*,\s*{_PART})*\s*$"

Size = Annotated[int, Field(ge=1, le=2**14, examples=[4])]


class BlockMixer(Table):
    """What mixes the tokens of some layers.  Keys other than ``op`` belong to attention.  Values
    that all layers share are in the tables ``attention``, ``rope``, ``recurrence``,
    ``convolution``."""

    op: LayerKind
    """The operator: ``attention``, ``delta``, ``mamba`` (Mamba-2), ``mamba1``, ``convolution``,
    ``none``, or several with ``+`` between them, one after the other."""
    heads: Size | None = None
    """Query heads; default: ``shape.heads``."""
    kv_heads: Size | None = None
    """Key and value heads; default: ``shape.kv_heads``."""
    head_dim: Size | None = None
    """Width of one head; default: ``shape.head_dim``."""
    keys_are_values: bool = False
    """Whether values are what the key projection gives."""
    rope: Rope | None = None
    """Rotary positions; default: the table ``rope``."""
    sliding_window: Count | None = None
    """Tokens that a query looks back, its own included; absent means the whole context."""
    head_norm: bool = False
    """Whether queries and keys have a norm."""
    sinks: bool = False
    """Whether every head has a score of its own."""
    growth: Annotated[float, Field(ge=0.0, examples=[0.1])] = 0.0
    """Growth of queries, as ``attention.growth``."""


class BlockFfn(Table):
    """The feed-forward network of some layers; the tables ``ffn`` and ``moe`` have its options."""

    op: Literal["dense", "experts", "none"]
    """``experts`` needs the table ``moe``; ``none``: the layer has no FFN."""
    width: Count | None = None
    """Neurons of a dense FFN in a model that has experts in other layers."""
    gate_sparsity: Annotated[float, Field(ge=0.0, lt=1.0, examples=[0.95])] = 0.0
    """Share of the gates that a cutoff closes, as ``ffn.gate_sparsity``."""


class BlockEntry(Table):
    """Kinds of some layers.  Later entries replace earlier ones, operator by operator."""

    layers: Annotated[str, Field(pattern=LAYER_CHOICE, max_length=4000)] = Field(
        default=":", examples=["3::4"]
    )
    """The layers: numbers, ranges (``0-7``) and slices (``3::4``, ``-20:``) with commas between
    them; negative numbers count from the end. Absent means all."""
    mix: BlockMixer | None = None
    """What mixes their tokens; default: attention."""
    ffn: BlockFfn | None = None
    """Their FFN; default: experts with the table ``moe``, else dense."""


class BlockEntries(Document):
    """A document that has nothing but blocks."""

    blocks: tuple[BlockEntry, ...]
    """The entries."""
