"""What a backend is asked about a unit of a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from pi2.formats import name_packings
from pi2.model.blocks import count_indexes, list_attention
from pi2.model.options import find_unknown, list_options, read_options
from pi2.model.states import describe_state
from pi2.model.tensor import (
    EMBEDDING,
    HEAD,
    LAYER_PROJECTION,
    STREAM_IN,
    STREAM_OUT,
    DenseTensor,
    split_name,
)
from pi2.plan.weights.layout import Precision, align_bytes

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.device import Unit
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.plan import KvType
    from pi2.plan.documents.plan_units import Graphs
    from pi2.plan.weights.layout import BundleLayout


Verdict = Literal["runs", "dry run"]
"""What a plan does with a backend."""
ROW_STEP = 32
"""Rows are divided at a multiple of it: every part begins at a multiple of 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRows:
    """The first rows of some matrices, which belong to a unit other than the sparse one."""

    unit: str
    """The unit's name."""
    qkv: int = 0
    """Rows of the QKV projection, in every layer."""
    output: int = 0
    """Rows of the projection of what attention has mixed, in every layer."""
    head: int = 0


def count_rows(share: float, rows: int) -> int:
    """Rows of a unit that has ``share`` of them: a multiple of `ROW_STEP`, and not the last one,
    which the sparse unit keeps."""
    return min(round(share * rows / ROW_STEP), (rows - 1) // ROW_STEP) * ROW_STEP


def count_qkv_rows(model: Model) -> int:
    """Rows of a layer's QKV projection."""
    return list_attention(model)[0][0].projected


def name_head(model: Model) -> str:
    return EMBEDDING if model.tied_head else HEAD


def list_matrices(model: Model, rows: DividedRows) -> Mapping[str, tuple[int, int, Precision]]:
    """Rows, length and precision of what the unit has of each tensor, by the tensor's name."""
    counts = {"qkv": rows.qkv, "output": rows.output, name_head(model): rows.head}
    return {
        tensor.name: (count, tensor.length, tensor.precision)
        for tensor in model.dense_tensors
        if (count := counts.get(split_name(tensor.name)[1])) and not tensor.packing.is_float32
    }


def list_step_matrices(model: Model) -> list[DenseTensor]:
    """Matrices next to neurons that all layers together read for a token."""
    ends = (LAYER_PROJECTION, STREAM_IN, STREAM_OUT)
    return [
        tensor
        for tensor in model.dense_tensors
        if not tensor.packing.is_float32 and (tensor.layer is not None or tensor.name in ends)
    ]


def count_mixer_bytes(model: Model) -> int:
    """Bytes of `list_step_matrices`; the mean of all layers."""
    return sum(tensor.size_bytes for tensor in list_step_matrices(model)) // model.shape.layers


def count_mixer_weights(model: Model) -> int:
    """Number of their weights; the mean of all layers."""
    weights = (tensor.rows * tensor.length for tensor in list_step_matrices(model))
    return sum(weights) // model.shape.layers


def count_state_bytes(model: Model) -> int:
    """Bytes of the state of one sequence in a layer that has one: elements of the tokens that its
    convolution reads, and its recurrent state, float32."""
    state = describe_state(model)
    return 0 if state is None else align_bytes(4 * state.kept) + align_bytes(4 * state.memory)


def count_sequence_bytes(model: Model) -> int:
    """Bytes of all states of a sequence; n-grams have theirs behind the layers'."""
    own, streams, total = model.ngrams, model.gated_streams, 0
    if own is not None and streams is not None:
        channels = streams.streams * model.shape.hidden
        total = align_bytes(4 * ((own.window - 1) * channels + own.length - 1))
    return total + count_state_bytes(model) * len(model.states)


def count_state_traffic(model: Model) -> int:
    """Bytes of states that a layer reads and writes for a token; the mean of all layers."""
    return 2 * count_state_bytes(model) * len(model.states) // model.shape.layers


@dataclass(frozen=True)
class Need:
    """Bytes that a segment needs, and why."""

    bytes: int
    explanation: str


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes needed per segment; ``cold`` is the smallest cache that works."""

    attention: Need
    kv: Need
    state: Need
    predictor: Need
    hot: Need
    cold: Need
    workspace: Need

    def items(self) -> list[tuple[str, Need]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self)]


KV_ELEMENT_BYTES: Mapping[KvType, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Bytes of an element of the KV cache."""
KV_SCALE_BYTES = 2
"""Bytes of the scale that every vector of an int8 cache has."""


def find_index_type(kind: KvType) -> KvType:
    """Type of an index's keys next to a KV cache of a ``kind``: 8 bits would choose others."""
    return "fp16" if kind == "int8" else kind


def count_index_bytes(kind: KvType) -> int:
    """Bytes of an element of an index's keys."""
    return KV_ELEMENT_BYTES[find_index_type(kind)]


def count_kv_token_bytes(model: Model, kind: KvType) -> int:
    """Bytes that a layer keeps of one token; the mean of all layers."""
    scale, total = KV_SCALE_BYTES if kind == "int8" else 0, 0
    for attention, layers in list_attention(model):
        kinds, count, size = attention.kept
        total += layers * kinds * count * (size * KV_ELEMENT_BYTES[kind] + scale)
    index = model.attention.index
    if index is not None:
        total += count_indexes(model) * index.width * count_index_bytes(kind)
    return total // model.shape.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitShare:
    """A unit's part of a model next to an executor, and the jobs that it is given."""

    unit: Unit
    """What the device document says of it."""
    model: Model
    bundle: BundleLayout
    """Layout of neurons in the store."""
    neurons: Sequence[int]
    """Neurons that it owns of each layer."""
    wanted: Sequence[int] = ()
    """Numbers of neurons that steps compute of some layer, if these are fewer than it keeps."""
    graphs: Graphs | None = None
    """Shapes that the plan wants programs for; None leaves them to the unit."""
    matrices: Mapping[str, tuple[int, int, Precision]] = field(default_factory=dict)
    """Rows, length and precision of its part of projections and of the head, by the tensors'
    names."""
    chunk: int
    """Most tokens of a job."""
    jobs: int = 1
    """Most jobs under way at the same time."""
    stretch: int
    """Most neurons that are added to a job at once."""

    @property
    def layout(self) -> BundleLayout:
        """Layout of bundles that have their scales in them."""
        return self.bundle.inline if self.bundle.scales == "resident" else self.bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """What a backend is asked about: a plan's model, and what a unit has of it."""

    resolved: ResolvedPlan
    unit: str
    """The unit's name."""
    share: UnitShare | None
    """None where it is the executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """A program of fixed shape that a unit runs for a part of a layer."""

    tokens: int
    neurons: int
    own_bytes: int
    """Bytes that it keeps while it runs."""


def list_wanted(resolved: ResolvedPlan, name: str) -> tuple[int, ...]:
    """Numbers of neurons that a unit computes of some layer in steps, ascending."""
    shares = [layer.dense for layer in resolved.layers]
    own = [share for share in shares if share is not None and share.unit == name]
    return tuple(sorted({count for share in own for count in share.by_sequences}))


def pad_tokens(count: int, graphs: Sequence[int]) -> int:
    """Tokens that graphs of ascending numbers of tokens compute for a job of ``count``: as many of
    the largest as fit, then the smallest that holds the rest."""
    if not graphs:
        return count
    whole, rest = divmod(count, graphs[-1])
    return whole * graphs[-1] + next(tokens for tokens in (0, *graphs) if tokens >= rest)


NEURONS = read_options("""
    ffn: activation=relu activation=drelu activation=fatrelu activation=relu2 activation=silu
    ffn: activation=gelu activation=gelu_tanh threshold gated bias absent_layers slope limit
    ffn: up_offset
""")
"""What of an FFN the neurons of a unit compute."""
_UNDIVIDED = {"other_heads", "attention.kv_shared_layers", "altup", "hyper", "gated_streams"}


def list_unknown_formats(model: Model) -> list[str]:
    """Precisions unknown to such a unit, each as the end of a sentence about it."""
    precisions, limits = model.quantization, []
    tables = name_packings("tables")
    if precisions.ffn not in tables:
        limits.append(f"computes no neurons of {precisions.ffn}")
    if precisions.gate_up is not None:
        limits.append(f"computes no gates of {precisions.gate_up} (convert with --quantization)")
    if precisions.attention not in tables:
        limits.append(f"computes no projections of {precisions.attention} weights")
    return limits


def list_unknown_weights(model: Model) -> list[str]:
    unknown = [key for key in find_unknown(model, NEURONS) if key.startswith("ffn.")]
    return list_unknown_formats(model) + [f"computes no neurons with {key}" for key in unknown]


def list_undivided(facts: UnitFacts, more: Collection[str] = ()) -> list[str]:
    """Options of a model whose rows another unit cannot share, and ``more``, likewise."""
    if facts.resolved.divided_rows is None:
        return []
    options = list_options(facts.resolved.model)
    found = [key for key in options if key.startswith("layers.") or key in _UNDIVIDED | {*more}]
    return [f"cannot divide projections and the head of a model with {key}" for key in found]
