"""What a library of graphs is compiled from; plain Python, without TVM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pi2.formats import find_packing
from pi2.plan.documents.common import Table
from pi2.plan.documents.model_parts import Ffn
from pi2.plan.weights.layout import GROUP, Precision, round_up

PROGRAM = "pi2.backends.hexagon.kernels.program"
"""The module that makes the functions of a library."""
LANES = 32
"""Rows that a vector of 128 bytes computes together: a *tile*."""
LENGTH_STEP = 64
"""Vectors are filled up with zeros to a multiple of it: multipliers come in pairs of groups."""
TOKENS_TOGETHER = 8
"""Tokens that a pass over weights computes, at most."""

Version = Literal["v66", "v68", "v69", "v73", "v75"]
"""Versions of the instruction set that kernels can be compiled for."""
VERSIONS: tuple[Version, ...] = get_args(Version)

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


def can_compute(tokens: int) -> bool:
    """Whether there can be a graph of so many tokens."""
    return tokens in (1, 2, 4) or tokens % TOKENS_TOGETHER == 0


def count_together(tokens: int) -> int:
    """Tokens that a pass over weights computes in a graph of ``tokens``: 1, 2, 4 or 8."""
    assert can_compute(tokens), tokens
    return min(tokens, TOKENS_TOGETHER)


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


Graph = FfnGraph | ProductGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class HexagonSpec:
    """Everything but its sources that the code of a library depends on."""

    version: Version
    ffn: FfnShape | None
    graphs: tuple[FfnGraph, ...] = ()
    products: tuple[ProductGraph, ...] = ()

    @property
    def program(self) -> str:
        return PROGRAM

    @property
    def index(self) -> tuple[Graph, ...]:
        """All graphs; a graph's place is its number in messages."""
        return (*self.graphs, *self.products)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=Table.model_dump)

    @classmethod
    def from_json(cls, text: str) -> HexagonSpec:
        """Read what `to_json` wrote."""
        document: dict[str, Any] = json.loads(text)
        ffn = document["ffn"]
        options = None if ffn is None else Ffn.model_validate_json(json.dumps(ffn["options"]))
        return cls(
            version=document["version"],
            ffn=None if options is None else FfnShape(**(ffn | {"options": options})),
            graphs=tuple(FfnGraph(**item) for item in document["graphs"]),
            products=tuple(ProductGraph(**item) for item in document["products"]),
        )
