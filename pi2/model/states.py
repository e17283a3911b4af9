"""Parts of a layer with a state: the rows of its projections, its tensors, its state.

Pure arithmetic, shared by the store, the backends and the plan's sizes.

A layer of the kind ``delta`` or ``mamba`` projects its input to the queries, keys, values and gates
of all heads. All but the gates go through a causal convolution of some tokens and SiLU. ``mamba``
calls queries C, keys B and values x. A layer of the kind ``mamba1`` projects to values x, which are
convolved, and a gate for each of them; further projections of the convolved values make step sizes,
B and C. A layer of the kind ``convolution`` projects to b, c and x. Rows of the projection are in
this order, heads one after the other.

If every element of a key has a decay (``decay_of``), there are as many decays as keys. A second
projection makes them from ``decay_rank`` elements, which are rows of ``state_gates``. Gates of
values come from ``gate_rank`` elements in the same way, and are no rows of ``state_in`` then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from pi2.formats.packing import fill_groups
from pi2.model.tensor import DenseTensor, Place, Source

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model

StateKind = Literal["delta", "mamba", "mamba1", "convolution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Sizes of a layer with a state, in elements; plain values, from which kernels are made."""

    kind: StateKind
    kernel: int
    """Tokens that the convolution reads, the token itself included."""
    width: int
    """Elements of the mixed values, before they are projected back."""
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
    has_norm: bool = True
    shortest_step: float = 0.0
    longest_step: float | None = None

    @property
    def stored_width(self) -> int:
        """Length of the mixed values in stores and backends, padded with zeros."""
        return fill_groups(self.width)

    @property
    def rows(self) -> int:
        """Rows of the projection ``state_in``: convolved values, and gates or b and c."""
        return self.channels if self.gate_rank else self.entries

    @property
    def entries(self) -> int:
        """Elements of a token that are convolved or gate the mixed values, from any projection."""
        return 3 * self.width if self.kind == "convolution" else self.channels + self.width

    @property
    def decays(self) -> int:
        """Decays of a token: of value heads, or of all elements of keys."""
        return self.value_heads * (self.key_dim if self.decay_of == "key" else 1)

    @property
    def gates(self) -> int:
        """Rows of the projection ``state_gates``: input gates of value heads, and decays and gates
        or their low-rank elements; or step sizes."""
        if self.kind == "delta":
            return self.value_heads + (self.decay_rank or self.decays) + self.gate_rank
        return self.value_heads if self.kind == "mamba" else 0

    @property
    def parts(self) -> int:
        """Rows of the projection ``state_parts``: what step sizes are made of, keys and queries."""
        return self.step_rank + 2 * self.key_dim if self.step_rank else 0

    @property
    def factors(self) -> int:
        """Elements that backends keep of a token in addition to its projections: input gates and
        decays, or step sizes, keys and queries."""
        if self.step_rank:
            return 2 * self.key_dim + self.width
        return self.value_heads + self.decays

    @property
    def ranks(self) -> int:
        """Elements that backends keep of a token of what its factors and gates are made of: zeros
        fill each of them up."""
        return sum(map(fill_groups, (self.step_rank, self.decay_rank, self.gate_rank)))

    @property
    def kept(self) -> int:
        """Elements of earlier tokens that the convolution needs."""
        return (self.kernel - 1) * self.channels

    @property
    def memory(self) -> int:
        """Elements of the recurrent state: a matrix for every value head."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Delta rule, Mamba, Mamba-2 or short convolution: it keeps a state instead of keys."""

    kind: StateKind
    shape: StateShape | None
    """Sizes; None if the document states none, which a rule reports."""


def describe_state(model: Model) -> StateShape | None:
    """Sizes of the layers with a state; None of a model whose layers are all attention, or that
    does not state the sizes."""
    mixers = (mixer for block in model.blocks for mixer in block.mixers)
    return next((mixer.shape for mixer in mixers if isinstance(mixer, State)), None)


_SAME = (
    *("kernel", "width", "key_heads", "value_heads", "key_dim", "value_dim", "decay_of", "gate"),
    *("decay_floor", "convolution_bias", "projection_bias", "norm_groups"),
    *("shortest_step", "longest_step"),
)
"""Keys of ``model.recurrence`` that are the same sizes."""


def shape_state(model: Model, kind: StateKind) -> StateShape | None:
    """Sizes of the layers of a ``kind``; None if the document does not state them."""
    own, sizes = model.convolution, model.recurrence
    if kind == "convolution":
        return (
            None
            if own is None
            else StateShape(
                kind=kind,
                kernel=own.kernel,
                width=own.width,
                channels=own.width,
                convolution_bias=own.bias,
                projection_bias=own.bias,
            )
        )
    if sizes is None:
        return None
    values = {key: getattr(sizes, key) for key in _SAME}
    if kind == "mamba1":
        parts = {key: getattr(sizes, key) for key in ("part_norm", "part_epsilon")}
        values |= {**parts, "step_rank": sizes.step_rank or 0}
    keys = 0 if kind == "mamba1" else 2 * sizes.key_heads * sizes.key_dim
    return StateShape(
        kind=kind,
        channels=keys + sizes.width,
        decay_rank=sizes.decay_rank or 0,
        gate_rank=sizes.gate_rank or 0,
        has_norm=sizes.output_norm,
        **values,
    )


def list_state_tensors(at: Place, shape: StateShape) -> Iterator[DenseTensor]:
    """Tensors of a mixer, without the norm before it.

    ``state_in`` [rows, hidden]; ``state_gates`` [gates, hidden], fp16 because decays multiply up;
    ``state_convolution`` float32 [kernel, channels], the oldest token's first; ``state_decay``
    float32 [1, value heads], the rate of decay -exp(A_log); ``state_step`` [1, decays], added to
    step sizes; ``state_skip`` [1, value heads], Mamba-2's D; ``state_norm`` [1, value_dim] or, of
    Mamba-2, [1, width]; ``state_output`` [hidden, width]; biases.

    Of ``mamba1``, fp16 ``state_parts`` [step_rank + 2 key_dim, width], which gives the latents of
    step sizes, B and C, float32 ``state_part_norm`` [1, step_rank + 2 key_dim], the weights of
    their norms, and fp16 ``state_steps`` [width, step_rank]; ``state_decay`` is float32 [key_dim,
    width], and ``state_step`` and ``state_skip`` are [1, width]; there is no ``state_norm``.

    With ranks, fp16 ``state_decays`` [decays, decay_rank] and ``state_output_gates`` [width,
    gate_rank]."""
    hidden, heads, width = at.model.shape.hidden, shape.value_heads, shape.width
    stored, order = at.model.shape.stored_hidden, at.model.tensors.state_order
    copy = partial(at.copy, precision="fp16")
    vector = partial(at.vector, transform="state")
    inputs = _count_input_rows(shape, order)
    channels = partial(_order_channels, shape) if order == "mamba" else None
    yield at.matrix("state_in", shape.rows, stored, *_list_inputs(at, shape))
    if shape.projection_bias:
        bias = partial(_order_mamba, shape) if order == "mamba" else None
        yield vector("state_in_bias", shape.rows, at.take("state_in_bias", inputs, rows=bias))
    if shape.gates:
        gates = _list_gates(at, shape)
        yield at.matrix("state_gates", shape.gates, stored, *gates, precision="fp16")
    if shape.decay_rank:
        yield copy("state_decays", shape.decays, shape.decay_rank)
    if shape.gate_rank:
        yield copy("state_output_gates", width, shape.gate_rank)
    parts = {"state_convolution": shape.channels}
    if order == "single":
        keys = shape.key_heads * shape.key_dim
        parts = {"state_convolution": keys, "state_key_convolution": keys}
        parts["state_value_convolution"] = width
    windows = [at.take(key, n, 1, shape.kernel, rows=channels) for key, n in parts.items()]
    yield vector("state_convolution", shape.channels, *windows, rows=shape.kernel)
    if shape.convolution_bias:
        source = at.take("state_convolution_bias", shape.channels, rows=channels)
        yield vector("state_convolution_bias", shape.channels, source)
    if shape.kind == "mamba1":
        rank, states = shape.step_rank, shape.key_dim
        yield copy("state_parts", shape.parts, width)
        yield copy("state_steps", width, rank)
        if shape.part_norm == "weighted":
            sizes = {"state_step_norm": rank, "state_key_norm": states, "state_query_norm": states}
            norms = [at.take(key, size) for key, size in sizes.items()]
            yield vector("state_part_norm", shape.parts, *norms)
        yield vector("state_decay", width, at.take("state_decay", width, states), rows=states)
        yield vector("state_step", width, at.take("state_step", width))
        yield vector("state_skip", width, at.take("state_skip", width))
    elif shape.kind != "convolution":
        yield vector("state_decay", heads, at.take("state_decay", heads))
        steps = [at.take("state_step", shape.decays)]
        if order == "mamba" and shape.projection_bias:
            rows = partial(range, shape.rows, shape.rows + shape.gates)
            steps.append(at.take("state_in_bias", inputs, rows=rows))
        yield vector("state_step", shape.decays, *steps)
        if shape.kind == "mamba":
            yield vector("state_skip", heads, at.take("state_skip", heads))
        length = width if shape.kind == "mamba" else shape.value_dim
        if shape.has_norm:
            yield vector("state_norm", length, at.take("state_norm", length))
    output = at.take("state_output", hidden, width)
    yield at.matrix("state_output", stored, shape.stored_width, output)
    if shape.projection_bias:
        yield vector("state_output_bias", stored, at.take("state_output_bias", hidden))


def _count_input_rows(shape: StateShape, order: str) -> int:
    """Rows of ``state_in`` in checkpoints."""
    if order == "single":
        return shape.key_heads * shape.key_dim
    if order == "separate":
        return shape.channels
    return shape.rows + (shape.gates if order != "grouped" else 0)


def _list_inputs(at: Place, shape: StateShape) -> Iterator[Source]:
    hidden, order = at.model.shape.hidden, at.model.tensors.state_order
    keys, values = shape.key_heads * shape.key_dim, shape.width
    pick: dict[str, Callable[[StateShape], Sequence[int]]] = {
        "grouped": ungroup,
        "mamba": _order_mamba,
    }
    rows = partial(pick[order], shape) if order in pick else None
    yield at.take("state_in", _count_input_rows(shape, order), hidden, rows=rows)
    if order == "single":
        yield at.take("state_key", keys, hidden)
        yield at.take("state_value", values, hidden)
    if order in ("single", "separate") and not shape.gate_rank:
        yield at.take("state_gate", values, hidden)


def _list_gates(at: Place, shape: StateShape) -> Iterator[Source]:
    hidden, order, heads = at.model.shape.hidden, at.model.tensors.state_order, shape.value_heads
    if order in ("single", "separate"):
        yield at.take("state_beta", heads, hidden)
        yield at.take("state_alpha", shape.decay_rank or shape.decays, hidden)
        if shape.gate_rank:
            yield at.take("state_gate", shape.gate_rank, hidden)
    elif order == "grouped":
        # For every key head the input gates of its value heads, then their decays.
        yield at.take("state_beta", 2 * heads, hidden, rows=partial(list_pairs, shape))
    else:
        rows = partial(range, shape.rows, shape.rows + shape.gates)
        yield at.take("state_in", _count_input_rows(shape, order), hidden, rows=rows)


def list_pairs(shape: StateShape) -> list[int]:
    """All input gates and decays, which checkpoints have by key head."""
    together = shape.value_heads // shape.key_heads
    groups = range(0, 2 * shape.value_heads, 2 * together)
    return [g + kind * together + n for kind in (0, 1) for g in groups for n in range(together)]


def ungroup(shape: StateShape) -> list[int]:
    """All queries, keys, values and gates, which checkpoints have by key head."""
    values = shape.value_heads // shape.key_heads * shape.value_dim
    whole, first, found = shape.rows // shape.key_heads, 0, list[int]()
    for size in (shape.key_dim, shape.key_dim, values, values):
        for head in range(shape.key_heads):
            found += range(head * whole + first, head * whole + first + size)
        first += size
    return found


def _order_mamba(shape: StateShape) -> list[int]:
    return [*(shape.width + place for place in _order_channels(shape)), *range(shape.width)]


def _order_channels(shape: StateShape) -> list[int]:
    """The store's order is queries, keys, values; checkpoints have values, keys, queries."""
    first, second = shape.width, shape.width + shape.key_heads * shape.key_dim
    return [*range(second, shape.channels), *range(first, second), *range(first)]
