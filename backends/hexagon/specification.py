"""What a library of graphs is compiled from, and its files; plain Python, without TVM.

A library is ``graphs.elf`` for the emulator, ``graphs.o`` for the vendor's linker, and
``graphs.json``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pi2.backends.compiler.cache import load_or_compile
from pi2.caches import replace_file
from pi2.formats import find_packing
from pi2.plan.documents.common import Table
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.layout import GROUP, Precision, round_up
from pi2.progress import Progress, ignore_progress

if TYPE_CHECKING:
    from pi2.plan.documents.device import Unit
    from pi2.plan.documents.model import Model
    from pi2.plan.weights.layout import BundleLayout

ELF, OBJECT = ".elf", ".o"
"""Suffixes of what the emulator runs, and of what the vendor's linker takes."""
PROGRAM = f"graphs{ELF}"
ALIGNMENT = 128
"""Bytes: every array begins at a multiple of it, a vector."""
LANES = 32
"""Rows that a vector of 128 bytes computes together: a *tile*."""
LENGTH_STEP = 64
"""Vectors are filled up with zeros to a multiple of it: multipliers come in pairs of groups."""
TOKENS_TOGETHER = 8
"""Tokens that a pass over weights computes, at most."""

Version = Literal["v66", "v68", "v69", "v73", "v75"]
"""Versions of the instruction set that kernels can be compiled for."""
VERSIONS: tuple[Version, ...] = get_args(Version)
_DEFAULT_VERSION: Version = "v66"
"""The oldest; newer NPUs run it as well."""

Weights = Literal["int4", "int8"]
"""How the NPU keeps weights."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Vectors of unsigned codes."""

    bits: int
    zero: int
    """The code of 0."""
    has_groups: bool
    """Whether groups of 32 weights have multipliers, or a vector one scale."""

    def count_groups(self, length: int) -> int:
        return length // GROUP if self.has_groups else 1


LAYOUTS: Mapping[Weights, Layout] = {"int4": Layout(4, 8, True), "int8": Layout(8, 128, False)}


def choose_weights(precision: Precision) -> Weights:
    """How the NPU keeps what the store has in ``precision``."""
    bits = find_packing(precision).bits
    return next((name for name, own in LAYOUTS.items() if own.bits == bits), "int8")


def choose_version(unit: Unit) -> Version:
    """The newest version that programs can be compiled for and that the unit runs."""
    stated = None if unit.hexagon is None else unit.hexagon.version
    return max((item for item in VERSIONS if item <= (stated or "")), default=_DEFAULT_VERSION)


def can_compute(tokens: int) -> bool:
    """Whether there can be a graph of so many tokens."""
    return tokens in (1, 2, 4) or tokens % TOKENS_TOGETHER == 0


def count_together(tokens: int) -> int:
    """Tokens that a pass over weights computes in a graph of ``tokens``: 1, 2, 4 or 8."""
    assert can_compute(tokens), tokens
    return min(tokens, TOKENS_TOGETHER)


@dataclass(frozen=True, slots=True)
class Room:
    """Arrays side by side, each at a multiple of 128 bytes."""

    places: Mapping[str, int]
    """First byte of each array."""
    bytes: int

    @classmethod
    def of(cls, **sizes: int) -> Room:
        """Lay out arrays of these sizes in bytes."""
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = end
            end = round_up(end + size, ALIGNMENT)
        return cls(places, end)

    def move(self, first: int) -> Room:
        """Return the room at byte ``first``."""
        return Room({name: first + place for name, place in self.places.items()}, self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnShape:
    """The neurons of a model."""

    hidden: int
    """A multiple of 32."""
    weights: Weights
    options: Ffn
    experts: int = 0
    """Of an MoE model, else 0."""
    weighs_input: bool = False
    """Whether experts' weights multiply gates and ups, not what neurons compute of them."""

    @classmethod
    def of(cls, layout: BundleLayout, model: Model) -> FfnShape:
        """Return the shape of a model's neurons, whose bundles have their scales in them."""
        return cls(
            hidden=layout.hidden,
            weights=choose_weights(layout.precision),
            options=model.ffn.model_copy(update={"absent_layers": (), "gate_sparsity": ()}),
            experts=0 if layout.expert_offset is None else model.expert_count,
            weighs_input=model.moe is not None and model.moe.weighs == "input",
        )

    @property
    def inputs(self) -> int:
        """Vectors of a neuron that are multiplied with the layer's input."""
        return 2 if self.options.gated else 1

    @property
    def length(self) -> int:
        """Elements of a neuron's vectors as the NPU has them."""
        return round_up(self.hidden, LENGTH_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnGraph:
    """The FFN of some neurons for some tokens."""

    tokens: int
    neurons: int
    """A multiple of 32."""

    @property
    def name(self) -> str:
        return f"ffn_{self.tokens}x{self.neurons}"

    @property
    def scratch(self) -> Room:
        """Arrays that live while it runs, in the NPU's own memory (VTCM) where it has some: values
        of neurons, the same rounded, and integer sums of a tile."""
        each = self.tokens * self.neurons
        return Room.of(
            values=4 * each,
            rounded=each,
            rounded_offsets=4 * self.tokens,
            rounded_scales=4 * self.tokens,
            sums=2 * ALIGNMENT * count_together(self.tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductGraph:
    """Rows of a matrix times the inputs of some tokens."""

    tokens: int
    rows: int
    """A multiple of 32."""
    length: int
    """A multiple of 64."""
    weights: Weights

    @property
    def name(self) -> str:
        return f"product_{self.weights}_{self.tokens}x{self.rows}x{self.length}"

    @property
    def scratch(self) -> Room:
        """See `FfnGraph.scratch`."""
        return Room.of(sums=ALIGNMENT * count_together(self.tokens))


Graph = FfnGraph | ProductGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class HexagonSpec:
    """Everything but its sources that the code of a library depends on."""

    program: ClassVar[str] = "pi2.backends.hexagon.kernels.program"
    version: Version
    ffn: FfnShape
    graphs: tuple[FfnGraph, ...] = ()
    products: tuple[ProductGraph, ...] = ()

    @property
    def index(self) -> tuple[Graph, ...]:
        """All graphs; a graph's place is its number in messages."""
        return (*self.graphs, *self.products)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=Table.model_dump)

    @classmethod
    def from_json(cls, text: str) -> HexagonSpec:
        """Read what `to_json` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)

    def write_index(self) -> str:
        """Return the document: every graph's number in messages, name, shape and scratch bytes."""
        graphs = [
            {
                "number": number,
                "name": graph.name,
                "scratch_bytes": graph.scratch.bytes,
                **dataclasses.asdict(graph),
            }
            for number, graph in enumerate(self.index)
        ]
        return json.dumps({"version": self.version, "graphs": graphs}, indent=1)


def write_library(spec: HexagonSpec, folder: Path, progress: Progress = ignore_progress) -> None:
    """Write a library to ``folder``; raises P651 as compiling does."""
    for suffix in (ELF, OBJECT):
        made = load_or_compile(spec, progress, suffix)
        replace_file(folder / f"graphs{suffix}", made.read_bytes())
    (folder / PROGRAM).chmod(0o755)  # the emulator asks for it
    replace_file(folder / "graphs.json", spec.write_index().encode())
