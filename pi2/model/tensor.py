"""A tensor of a store: its name, its sizes, and the tensors of a checkpoint it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

from pi2.formats import Packing, find_packing, name_packings
from pi2.formats.packing import align_bytes, fill_groups

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_parts import Tensors


EMBEDDING = "embedding"
HEAD = "head"
HEAD_BIAS = "head_bias"
EMBEDDING_NORM = "embedding_norm"
FINAL_NORM = "final_norm"
FINAL_NORM_BIAS = "final_norm_bias"
POSITIONS = "positions"
LAYER_EMBEDDING = "layer_embedding"
LAYER_PROJECTION = "layer_projection"
LAYER_PROJECTION_NORM = "layer_projection_norm"
STREAM_IN = "stream_in"
STREAM_OUT = "stream_out"
GATE_CUTOFF = "gate_cutoff"

if TYPE_CHECKING:
    StoredPrecision = str
else:
    StoredPrecision = Literal[(*name_packings("projections"), *name_packings("vectors"))]
Transform = Literal["rows", "stack", "cutoff", "turned keys", "state"]
"""How sources become a tensor: rows one after the other (``rows``), vectors as rows (``stack``),
or as `pi2.importing` describes for cutoffs of gates, latent keys and vectors of states."""
Order = Callable[[], Sequence[int]]
"""Numbers of rows, made when they are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What of a checkpoint's tensor goes into a store's."""

    key: str
    """Key of ``model.tensors`` that names it, or its name with ``{layer}``; empty for a constant,
    which no checkpoint has."""
    shape: tuple[int, ...]
    """Its shape in the checkpoint."""
    rows: Order | None = None
    """Rows that are taken, in their order in the store; None means all as they are.  Of a down
    projection, columns; of vectors of states, elements."""
    missing: int = 0
    """Rows of zeros that follow them."""
    value: float = 0.0
    """All elements of a constant."""
    layer: int = 0
    expert: int = 0
    stream: int = 0
    mixer: int = 0
    is_stacked: bool = False
    """Whether the tensor has all experts, of which ``expert`` is taken."""
    is_turned: bool = False
    """Whether the checkpoint has the transpose."""
    heads: tuple[int, int, bool] | None = None
    """Heads that zeros fill up: how many, to what size, and whether they are columns."""

    def name(self, names: Tensors) -> str:
        # Operators that are added say themselves what checkpoints call their tensors.
        pattern = getattr(names, self.key, self.key)
        return fill_name(pattern, self.layer, self.expert, self.stream, self.mixer)


def fill_name(pattern: str, layer: int, expert: int = 0, stream: int = 0, mixer: int = 0) -> str:
    """Put the numbers of layer, expert, residual stream and mixer into a name of
    ``model.tensors``."""
    numbers = {"layer": layer, "expert": expert, "stream": stream, "mixer": mixer}
    for what, number in numbers.items():
        pattern = pattern.replace(f"{{{what}}}", str(number))
    return pattern


@cache
def match_name(pattern: str) -> re.Pattern[str]:
    """An expression for the names that `fill_name` makes, with a group for each number."""
    known = set[str]()

    def write(place: re.Match[str]) -> str:
        is_first = place[1] not in known
        known.add(place[1])
        return rf"(?P<{place[1]}>\d+)" if is_first else f"(?P={place[1]})"

    return re.compile(re.sub(r"\\\{(\w+)\\\}", write, re.escape(pattern)))


@dataclass(frozen=True, kw_only=True)
class DenseTensor:
    """A dense tensor of ``rows`` vectors of ``length`` elements."""

    name: str
    precision: StoredPrecision
    rows: int
    length: int
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    """Empty for predictors, which checkpoints need not have."""
    transform: Transform = field(default="rows", compare=False, repr=False)

    @property
    def packing(self) -> Packing:
        return find_packing(self.precision)

    @property
    def row_weight_bytes(self) -> int:
        return self.packing.count_weight_bytes(self.length)

    @property
    def row_scale_bytes(self) -> int:
        return self.packing.count_scale_bytes(self.length)

    def count_bytes(self) -> tuple[int, int]:
        """Return the bytes of all weights, and of all scales."""
        return self.rows * self.row_weight_bytes, self.rows * self.row_scale_bytes

    @cached_property
    def size_bytes(self) -> int:
        """Bytes in memory, whole cache lines."""
        return align_bytes(sum(self.count_bytes()))

    @property
    def layer(self) -> int | None:
        """The layer that it belongs to; None for one of the whole model."""
        return split_name(self.name)[0]


@dataclass(frozen=True, slots=True)
class Place:
    """The model, layer and mixer that an operator's tensors belong to."""

    model: Model
    layer: int | None = None
    mixer: int = 0

    def take(
        self,
        key: str,
        *shape: int,
        rows: Order | None = None,
        stream: int = 0,
        missing: int = 0,
        heads: tuple[int, int, bool] | None = None,
    ) -> Source:
        """The tensor ``key`` of a checkpoint, of ``shape`` there."""
        return Source(
            key=key,
            shape=shape,
            rows=rows,
            stream=stream,
            missing=missing,
            heads=heads,
            layer=self.layer or 0,
            mixer=self.mixer,
        )

    def matrix(
        self,
        kind: str,
        rows: int,
        length: int,
        *sources: Source,
        precision: StoredPrecision | None = None,
        transform: Transform = "rows",
    ) -> DenseTensor:
        if self.mixer and kind.startswith("state_"):
            kind = _name_inner(self.mixer) + kind
        return DenseTensor(
            name=kind if self.layer is None else name_layer_tensor(self.layer, kind),
            precision=precision or self.model.quantization.attention,
            rows=rows,
            length=length,
            sources=sources,
            transform=transform,
        )

    def vector(
        self, kind: str, length: int, *sources: Source, rows: int = 1, transform: Transform = "rows"
    ) -> DenseTensor:
        """A float32 tensor, of one row if no number is given."""
        return self.matrix(kind, rows, length, *sources, precision="fp32", transform=transform)

    def copy(
        self, key: str, rows: int, length: int, *, precision: StoredPrecision | None = None
    ) -> DenseTensor:
        """The checkpoint's matrix of that key; zeros fill its rows up to whole groups."""
        source = self.take(key, rows, length)
        return self.matrix(key, rows, fill_groups(length), source, precision=precision)

    def copy_vector(self, key: str, length: int, rows: int | None = None) -> DenseTensor:
        """The checkpoint's vector of that key, or its matrix of ``rows``, float32."""
        shape = (length,) if rows is None else (rows, length)
        return self.vector(key, length, self.take(key, *shape), rows=rows or 1)

    def norm(self, kind: str, *, is_there: bool = True) -> DenseTensor:
        """A vector as wide as the residual stream: the checkpoint's tensor of that key, or ones if
        it ``is_there`` not."""
        hidden = self.model.shape.hidden
        key = "inner_norm" if self.mixer else kind
        source = self.take(key, hidden) if is_there else fill(hidden, value=1.0)
        return self.vector(kind, self.model.shape.stored_hidden, source)


def fill(*shape: int, value: float = 0.0) -> Source:
    return Source(key="", shape=shape, value=value)


def list_head_rows(
    heads: int, size: int, inside: Sequence[int], first: int = 0, step: int = 1
) -> list[int]:
    """Rows ``inside`` of every head; heads of ``size`` rows are ``step`` apart."""
    places = (head * step * size + first for head in range(heads))
    return [place + row for place in places for row in inside]


def name_layer_tensor(layer: int, kind: str) -> str:
    """Name of a layer's tensor, such as ``layers.3.qkv``; operators of this room name kinds."""
    return f"layers.{layer}.{kind}"


def split_name(name: str) -> tuple[int | None, str]:
    """Layer and kind of a tensor, from what `name_layer_tensor` gave; no layer otherwise."""
    parts = name.split(".")
    return (int(parts[1]), parts[2]) if len(parts) == 3 else (None, name)


def takes_blocks(name: str) -> bool:
    """Whether a tensor is multiplied by a program; predictors of neurons stay as they are."""
    kind = split_name(name)[1]
    return not kind.startswith("predictor") and kind != GATE_CUTOFF


def name_mixer_norm(mixer: int) -> str:
    """Kind of the norm before mixer number ``mixer`` of a layer."""
    return "attention_norm" if mixer == 0 else f"{_name_inner(mixer)}norm"


def name_state_tensor(layer: int, mixer: int, kind: str) -> str:
    """Name of the tensor ``kind`` of the state of a layer's mixer number ``mixer``."""
    return name_layer_tensor(layer, kind if mixer == 0 else _name_inner(mixer) + kind)


def _name_inner(mixer: int) -> str:
    return "inner_" if mixer == 1 else f"inner_{mixer}_"


_INNER = re.compile(r"inner_(?:([0-9]+)_)?(norm|state_.+)")


def split_mixer_kind(kind: str) -> tuple[str, int]:
    """Kind and number of the mixer, from what `name_state_tensor` or `name_mixer_norm` made
    (``inner_norm`` for any norm but the first); other kinds as they are, with 0."""
    found = _INNER.fullmatch(kind)
    if found is None:
        return kind, 0
    return "inner_norm" if found[2] == "norm" else found[2], int(found[1] or 1)
