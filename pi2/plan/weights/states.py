"""What a layer with a state is made of: the rows of its projections, its tensors, its state.

Pure arithmetic, shared by the store, the backends and the plan's sizes.

A layer of the kind ``delta`` or ``mamba`` projects its input to queries, keys and values of all
heads, which go through a causal convolution of some tokens and SiLU, and to a gate for each of the
values; of ``mamba``, queries are called C, keys B and values x.  A layer of the kind ``mamba1``
projects to values x, which are convolved, and a gate for each of them; of what is convolved,
further projections make step sizes, B and C.  A layer of the kind ``convolution`` projects to b, c
and x. Rows of the projection are in this order, heads one after the other.

Where every element of a key has a decay (``decay_of``), decays are as many as keys, and are made of
``decay_rank`` elements, which are rows of ``state_gates``, by a second projection; gates of values
likewise of ``gate_rank`` elements, and are no rows of ``state_in`` then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pi2.plan.weights.layout import fill_groups

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_parts import AttentionPrecision

StateKind = Literal["delta", "mamba", "mamba1", "convolution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Sizes of a layer with a state, in elements; plain values, from which kernels are made."""

    kind: StateKind
    kernel: int
    """Tokens that the convolution reads, the token itself included."""
    width: int
    """Elements of what is mixed, before it is projected back."""
    channels: int
    """Elements that go through the convolution."""
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    step_rank: int = 0
    """Elements that step sizes are made of; 0 where the layer's input gives them."""
    part_norm: Literal["none", "plain", "weighted"] = "none"
    part_epsilon: float = 0.0
    """Added to the mean of squares there."""
    decay_of: Literal["head", "key"] = "head"
    decay_rank: int = 0
    """Elements that decays of keys are made of; 0 where the layer's input gives them."""
    decay_floor: float | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_rank: int = 0
    """Elements that gates of values are made of; 0 where the layer's input gives them."""
    convolution_bias: bool = False
    projection_bias: bool = False
    norm_groups: int = 1
    shortest_step: float = 0.0
    longest_step: float | None = None

    @property
    def stored_width(self) -> int:
        """Length of what is mixed in stores and backends: zeros fill it up."""
        return fill_groups(self.width)

    @property
    def rows(self) -> int:
        """Rows of the projection ``state_in``: what is convolved, and gates or b and c."""
        return self.channels if self.gate_rank else self.entries

    @property
    def entries(self) -> int:
        """Elements of a token that are convolved or gate what is mixed, wherever they come from."""
        return 3 * self.width if self.kind == "convolution" else self.channels + self.width

    @property
    def decays(self) -> int:
        """Decays of a token: of value heads, or of all elements of keys."""
        return self.value_heads * (self.key_dim if self.decay_of == "key" else 1)

    @property
    def gates(self) -> int:
        """Rows of the projection ``state_gates``: input gates of value heads, decays or what they
        are made of, and what gates are made of; or step sizes."""
        if self.kind == "delta":
            return self.value_heads + (self.decay_rank or self.decays) + self.gate_rank
        return self.value_heads if self.kind == "mamba" else 0

    @property
    def parts(self) -> int:
        """Rows of the projection ``state_parts``: what step sizes are made of, keys and queries."""
        return self.step_rank + 2 * self.key_dim if self.step_rank else 0

    @property
    def stored_rank(self) -> int:
        """Length of what step sizes are made of in stores and backends: zeros fill it up."""
        return fill_groups(self.step_rank)

    @property
    def stored_decay_rank(self) -> int:
        """Length of what decays are made of in stores and backends: zeros fill it up."""
        return fill_groups(self.decay_rank)

    @property
    def stored_gate_rank(self) -> int:
        """Length of what gates are made of in stores and backends: zeros fill it up."""
        return fill_groups(self.gate_rank)

    @property
    def factors(self) -> int:
        """Elements that backends keep of a token beside its projections: input gates and decays, or
        step sizes, keys and queries."""
        if self.step_rank:
            return 2 * self.key_dim + self.width
        return self.value_heads + self.decays

    @property
    def ranks(self) -> int:
        """Elements that backends keep of a token of what its factors and gates are made of."""
        return self.stored_rank + self.stored_decay_rank + self.stored_gate_rank

    @property
    def kept(self) -> int:
        """Elements of earlier tokens that the convolution needs."""
        return (self.kernel - 1) * self.channels

    @property
    def memory(self) -> int:
        """Elements of the recurrent state: a matrix for every value head."""
        return self.value_heads * self.key_dim * self.value_dim


def describe_state(model: Model, kind: StateKind | None = None) -> StateShape | None:
    """Sizes of the layers with a state, those of ``kind`` where a document has several; None of a
    model whose layers are all attention, or that does not state the sizes."""
    kind = kind or model.state_kind
    if kind is None:
        return None
    if kind == "convolution":
        if model.convolution is None:
            return None
        own = model.convolution
        return StateShape(
            kind=kind,
            kernel=own.kernel,
            width=own.width,
            channels=own.width,
            convolution_bias=own.bias,
            projection_bias=own.bias,
        )
    if model.recurrence is None:
        return None
    sizes = model.recurrence
    if kind == "mamba1":
        channels = sizes.width
    else:
        channels = 2 * sizes.key_heads * sizes.key_dim + sizes.width
    return StateShape(
        kind=kind,
        kernel=sizes.kernel,
        width=sizes.width,
        channels=channels,
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        step_rank=(sizes.step_rank or 0) if kind == "mamba1" else 0,
        part_norm=sizes.part_norm if kind == "mamba1" else "none",
        part_epsilon=sizes.part_epsilon if kind == "mamba1" else 0.0,
        decay_of=sizes.decay_of,
        decay_rank=sizes.decay_rank or 0,
        decay_floor=sizes.decay_floor,
        gate=sizes.gate,
        gate_rank=sizes.gate_rank or 0,
        convolution_bias=sizes.convolution_bias,
        projection_bias=sizes.projection_bias,
        norm_groups=sizes.norm_groups,
        shortest_step=sizes.shortest_step,
        longest_step=sizes.longest_step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a layer with a state; ``precision`` None is float32."""

    kind: str
    precision: AttentionPrecision | None
    rows: int
    length: int


def list_state_tensors(model: Model, shape: StateShape) -> list[StateTensor]:
    """Tensors of a layer's mixer besides the norm before it, in their order in the store.

    ``state_in`` [rows, hidden]; ``state_gates`` [gates, hidden], fp16 because decays multiply up;
    ``state_convolution`` float32 [kernel, channels], the oldest token's first; ``state_decay``
    float32 [1, value heads], the rate of decay -exp(A_log); ``state_step`` [1, decays], added
    to step sizes; ``state_skip`` [1, value heads], Mamba-2's D; ``state_norm`` [1, value_dim] or,
    of Mamba-2, [1, width]; ``state_output`` [hidden, width]; biases.

    Of ``mamba1``, fp16 ``state_parts`` [step_rank + 2 key_dim, width], which gives what step sizes
    are made of, B and C, float32 ``state_part_norm`` [1, step_rank + 2 key_dim], the weights of
    their norms, and fp16 ``state_steps`` [width, step_rank]; ``state_decay`` is float32 [key_dim,
    width], and ``state_step`` and ``state_skip`` are [1, width]; there is no ``state_norm``.

    With ranks, fp16 ``state_decays`` [decays, decay_rank] and ``state_output_gates`` [width,
    gate_rank]."""
    hidden, precision = model.shape.stored_hidden, model.quantization.attention
    found = [
        StateTensor(kind="state_in", precision=precision, rows=shape.rows, length=hidden),
    ]

    def add_vector(kind: str, length: int, rows: int = 1) -> None:
        found.append(StateTensor(kind=kind, precision=None, rows=rows, length=length))

    if shape.projection_bias:
        add_vector("state_in_bias", shape.rows)
    if shape.gates:
        found.append(
            StateTensor(kind="state_gates", precision="fp16", rows=shape.gates, length=hidden)
        )
    if shape.decay_rank:
        found.append(
            StateTensor(
                kind="state_decays",
                precision="fp16",
                rows=shape.decays,
                length=shape.stored_decay_rank,
            )
        )
    if shape.gate_rank:
        found.append(
            StateTensor(
                kind="state_output_gates",
                precision="fp16",
                rows=shape.width,
                length=shape.stored_gate_rank,
            )
        )
    add_vector("state_convolution", shape.channels, shape.kernel)
    if shape.convolution_bias:
        add_vector("state_convolution_bias", shape.channels)
    if shape.kind == "mamba1":
        found += [
            StateTensor(
                kind="state_parts", precision="fp16", rows=shape.parts, length=shape.stored_width
            ),
            StateTensor(
                kind="state_steps", precision="fp16", rows=shape.width, length=shape.stored_rank
            ),
        ]
        if shape.part_norm == "weighted":
            add_vector("state_part_norm", shape.parts)
        add_vector("state_decay", shape.width, shape.key_dim)
        add_vector("state_step", shape.width)
        add_vector("state_skip", shape.width)
    elif shape.kind != "convolution":
        add_vector("state_decay", shape.value_heads)
        add_vector("state_step", shape.decays)
        if shape.kind == "mamba":
            add_vector("state_skip", shape.value_heads)
        add_vector("state_norm", shape.width if shape.kind == "mamba" else shape.value_dim)
    found.append(
        StateTensor(
            kind="state_output", precision=precision, rows=hidden, length=shape.stored_width
        )
    )
    if shape.projection_bias:
        add_vector("state_output_bias", hidden)
    return found
