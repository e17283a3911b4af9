"""Which unit computes what: layers and their splits, projections, threads, graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints

from pi2.plan.documents.backends import list_backend_names
from pi2.plan.documents.common import Count, Identifier, Share, Table

Selector = Annotated[
    str,
    StringConstraints(pattern=r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$", max_length=500),
    Field(examples=["0-7,28-31"]),
]
"""Layers: numbers and ranges, both ends included, such as ``"0-7,28-31"``."""

Cores = Annotated[
    str,
    StringConstraints(pattern=r"^\s*\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*\s*$", max_length=500),
    Field(examples=["4-7", "0,2"]),
]
"""Cores by the system's numbers: numbers and ranges, both ends included, such as ``"4-7"``."""

Split = Annotated[
    dict[Identifier, Share], Field(min_length=1, examples=[{"cpu": 0.25, "npu": 0.75}])
]
"""Shares by unit."""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[list_backend_names()]
"""A folder of ``backends/`` that serves units."""


class BatchSplit(Table):
    """A split for steps of several sequences."""

    sequences: Annotated[int, Field(ge=2, le=64, examples=[4])]
    """Steps of so many sequences and more, up to the next entry's, are split so."""
    split: Split
    """Share of the layer's neurons that each unit computes; adds up to 1."""


class LayerSettings(Table):
    """Settings of a layer."""

    split: Split
    """Share of the layer's neurons that each unit computes; adds up to 1.  Of the neurons in stored
    order, hottest first, a dense unit (a GPU or an NPU beside a CPU) owns the first share, keeps it
    in memory and computes all of it; the rest belongs to the unit that computes sparsely."""
    hot: Share
    """Share of the layer's neurons that stay in memory, hottest first, those of a dense unit
    included."""
    batches: Annotated[tuple[BatchSplit, ...], Field(max_length=64)] = ()
    """Other splits for steps of several sequences, in ascending order.  A dense unit keeps the
    largest of its shares; the sparse unit keeps hot neurons from the smallest on."""


class LayerOverride(Table):
    """Settings for some layers only."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    id: Identifier | None = None
    """Name by which a plan that extends this one changes or removes the exception."""
    split: Split | None = None
    """Replaces ``layers.split``."""
    hot: Share | None = None
    """Replaces ``layers.hot``."""
    batches: (
        Annotated[
            tuple[BatchSplit, ...],
            Field(
                max_length=64, examples=[[{"sequences": 4, "split": {"cpu": 0.25, "npu": 0.75}}]]
            ),
        ]
        | None
    ) = None
    """Replaces ``layers.batches``."""


class Layers(LayerSettings):
    """Settings of all layers, and exceptions."""

    overrides: Annotated[tuple[LayerOverride, ...], Field(max_length=256)] = ()
    """Exceptions, in order: of two that set the same key of a layer, the later one counts."""


class Projections(Table):
    """Which unit computes which rows of the matrices beside the FFN.

    The unit beside the sparse one has the first rows of each, and computes them while the sparse
    unit computes the others.
    """

    attention: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of each layer's attention projections (query, key and value; output) that
    each unit computes; adds up to 1.  Absent leaves them to the sparse unit."""
    head: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of the head that each unit computes; adds up to 1.  Absent leaves them to
    the sparse unit."""


class Threads(Table):
    """Compute threads."""

    compute: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """Number of compute threads; default: one per core of the device."""
    cores: Cores | None = None
    """Cores that compute threads are pinned to, one each, in this order; absent leaves placement
    to the system. Threads that read from flash are never pinned."""


class Graphs(Table):
    """Shapes that an NPU's programs are compiled for, one for each number of tokens and share.

    A job runs the smallest graphs that hold it, several where none does, and computes zeros where
    they are larger than it.
    """

    tokens: Annotated[
        tuple[Count, ...], Field(min_length=1, max_length=32, examples=[[1, 4, 64, 128]])
    ] = (1, 2, 4, 32, 64, 128)
    """Numbers of tokens: 1, 2, 4 or multiples of 8."""
    shares: (
        Annotated[tuple[Share, ...], Field(min_length=1, max_length=32, examples=[[0.3, 0.5]])]
        | None
    ) = None
    """Shares of a layer's neurons; absent means those that the splits of layers give to the unit,
    or parts of these that fit into its own memory."""


class UnitSettings(Table):
    """How a unit of the device is used."""

    backend: Annotated[BackendName, Field(examples=["reference"])] | None = None
    """Backend of this unit; absent means that of its kind in ``backends``."""
    process: Literal["same", "own"] = "same"
    """Whether a unit that the processor plays (backend ``reference``) works in pi2's process or in
    one of its own, as the driver of an NPU does."""
    graphs: Annotated[Graphs, Field(examples=[{"tokens": [1, 4, 64]}])] | None = None
    """Shapes of an NPU's programs (backend ``hexagon``); absent means defaults."""
    on_failure: Literal["stop", "cpu"] = "stop"
    """What happens when the unit is lost while tokens are generated, or has no memory left:
    ``stop`` ends the run with an error; ``cpu`` goes on without it, its neurons being read from
    flash like any others, and says so."""
