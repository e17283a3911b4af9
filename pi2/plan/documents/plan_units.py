"""Which unit computes what: layers and their splits, projections, threads, graphs."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints

from pi2.plan.documents.common import Count, Identifier, Reference, Share, Table, list_backend_names


def parse_selector(text: str) -> list[tuple[int, int]]:
    """Return the ranges (first, last) of a well-formed selector; a reversed range stays as it is.

    Numbers of absurd length are cut: no model has 10^9 layers."""
    ranges = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        low = _parse_number(first)
        ranges.append((low, _parse_number(last) if last else low))
    return ranges


def write_selector(numbers: Iterable[int], between: str = ",") -> str:
    """The selector of ``numbers``, which ascend: ``"0-3,7"``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _parse_number(text: str) -> int:
    return int(text) if len(text) <= 9 else 10**9


def list_layers(text: str, layers: int) -> Iterator[int]:
    """Yield the layers below ``layers`` that a selector names, as often as it names them."""
    for first, last in parse_selector(text):
        yield from range(first, min(last, layers - 1) + 1)


def list_cores(text: str) -> list[int]:
    """Return the cores that a selector names, in its order; none for no text."""
    if not text:
        return []
    return [core for first, last in parse_selector(text) for core in range(first, last + 1)]


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
    """Share of the layer's neurons that each unit computes; adds up to 1.  Neurons are stored
    hottest first. A dense unit (GPU or NPU) owns the first share, keeps it in memory and computes
    all of it; the sparse unit owns the rest."""
    hot: Share
    """Share of the layer's neurons that stay in memory, hottest first, including a dense unit's."""
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
    """Which unit computes which rows of the matrices outside of the FFN.

    The other unit has the first rows of each matrix and computes them while the sparse unit
    computes the rest."""

    attention: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of each layer's attention projections (query, key and value; output) that
    each unit computes; adds up to 1.  Absent leaves them to the sparse unit."""
    head: Annotated[Split, Field(examples=[{"npu": 0.5, "cpu": 0.5}])] | None = None
    """Share of the rows of the head that each unit computes; adds up to 1.  Absent leaves them to
    the sparse unit."""


class Threads(Table):
    """Compute threads."""

    compute: Annotated[int, Field(ge=1, le=1024, examples=[4])] | None = None
    """Number of compute threads; default: one per core of the device, or of an unknown machine, as
    far as the workspace has room for them."""
    cores: Cores | None = None
    """Cores that compute threads are pinned to, one each, in this order; absent leaves placement
    to the system. Threads that read from flash are never pinned."""


class Graphs(Table):
    """Shapes that an NPU's programs are compiled for, one for each number of tokens and share.

    A job runs the smallest graphs that hold it, several where none does, and computes zeros where
    they are larger than it."""

    tokens: Annotated[
        tuple[Count, ...], Field(min_length=1, max_length=32, examples=[[1, 4, 64, 128]])
    ] = (1, 2, 4, 32, 64, 128)
    """Numbers of tokens: 1, 2, 4 or multiples of 8."""
    shares: (
        Annotated[tuple[Share, ...], Field(min_length=1, max_length=32, examples=[[0.3, 0.5]])]
        | None
    ) = None
    """Shares of a layer's neurons; default: the unit's shares in the layers' splits, as far as they
    fit into its memory."""


class UnitSettings(Table):
    """How a unit of the device is used."""

    backend: Annotated[BackendName, Field(examples=["reference"])] | None = None
    """Backend of this unit; default: its kind's in ``backends``."""
    graphs: Annotated[Graphs, Field(examples=[{"tokens": [1, 4, 64]}])] | None = None
    """Shapes of an NPU's programs (backend ``hexagon``); absent means defaults."""
    on_failure: Literal["stop", "cpu"] = "stop"
    """What happens when the unit is lost while tokens are generated, or has no memory left:
    ``stop`` ends the run with an error; ``cpu`` reads its neurons from the SSD like any others, and
    reports it."""


class ExpertLayers(Table):
    """Other numbers of experts for some layers."""

    select: Selector
    """Which layers, such as ``"0-7,28-31"``."""
    read_best: Annotated[int, Field(ge=0, examples=[2])]
    """Replaces ``experts.read_best``."""


class Experts(Table):
    """How far generated tokens may deviate from an MoE model's routing to read less.

    Default: no deviation. Every expert that the router chose computes, and the cache changes no
    bit.  For GGUF files of MoE models; a run's summary says how much of the routing weight was
    replaced or left out, and `pi2 evaluate` what that costs."""

    prefer_cached: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.1])] = 0.0
    """Bonus for experts in memory, as a fraction of the spread of a token's router scores. 0
    follows the router exactly; 0.2 saves most reads."""
    keep_best: Count = 1
    """Number of a token's best experts that are never replaced by ``prefer_cached``."""
    least_weight: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.05])] = 0.0
    """Share of a token's routing weight below which an expert that is not in memory is left out."""
    most_reads: Annotated[int, Field(ge=0, examples=[2])] | None = None
    """Maximum number of experts that a layer reads for a token; those with the smallest weights
    are left out. Absent reads all of them."""
    read_best: Annotated[int, Field(ge=0, examples=[4])] | None = None
    """Number of a token's best experts that are read if they are not in memory. Others compute only
    if they are in memory. Absent reads all of them."""
    renormalise: bool = True
    """Whether the weights of the experts that compute are scaled to make up for those left out."""
    layers: Annotated[
        tuple[ExpertLayers, ...],
        Field(max_length=256, examples=[[{"select": "0-3", "read_best": 2}]]),
    ] = ()
    """Exceptions, in order, such as fewer reads in layers whose experts are often missing; of two
    that name a layer, the later one counts."""

    def list_read_best(self, layers: int) -> list[int | None]:
        """Return ``read_best`` of each of a model's layers."""
        found = [self.read_best] * layers
        for item in self.layers:
            for layer in list_layers(item.select, layers):
                found[layer] = item.read_best
        return found

    @property
    def is_lossy(self) -> bool:
        """Whether anything but the router's choice is computed."""
        return bool(self.prefer_cached) or self.leaves_out

    @property
    def leaves_out(self) -> bool:
        limited = (self.most_reads, self.read_best) != (None, None) or bool(self.layers)
        return bool(self.least_weight) or limited


SparsityMethod = Literal["cats", "cats-teal"]


class Sparsity(Table):
    """Which neurons of a SiLU or GELU model count as zero while tokens are generated.

    With ``decode.predictor = "gate"``, which keeps all gates in memory.  One of ``target``
    and ``max_perplexity_increase`` says how much; `pi2 sparsity calibrate` turns it into
    thresholds.  Prompts are computed whole."""

    method: SparsityMethod
    """``cats``: up and down of neurons with a small act(gate) are not read; ``cats-teal``: in
    addition, down of neurons with a small act(gate) * up is not read; the split costs least."""
    target: Annotated[float, Field(gt=0.0, lt=1.0, examples=[0.5])] | None = None
    """Share of up and down projections that is skipped."""
    max_perplexity_increase: Annotated[float, Field(gt=0.0, examples=[0.02])] | None = None
    """Maximum relative increase in perplexity."""
    thresholds: Annotated[Reference, Field(examples=["llama.thresholds.toml"])] | None = None
    """File of the calibrated thresholds, relative to the plan file.  Without it a plan whose
    backends are all ``null`` can be simulated and counted, with ``target`` as the share that is
    skipped; any other plan needs it."""
