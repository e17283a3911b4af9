"""Weights and instructions of a program while it is made: plain Python."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pi2.backends.blocks.sizes import SINGLE
from pi2.formats import Format, find_format

if TYPE_CHECKING:
    from pi2.arrays import F32, I64, U8


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor as a file has it: ``rows`` of ``length`` elements, one after another."""

    format: str
    """A name of `pi2.formats`."""
    rows: int
    length: int
    data: U8 | None = None
    """Its bytes, mapped or read; None where `BlockModel.set_tensor` says where they are before
    the instructions run that read them."""
    experts: int = 1
    """Matrices of so many rows that follow each other."""
    added: float = 0.0
    """Constant that elements of a vector are stored without."""
    scales: tuple[float, ...] = ()
    """What the products of each expert's matrix are multiplied with; empty for 1."""
    row_scales: F32 | None = field(default=None, compare=False)
    """What the products of each row are multiplied with; None for 1."""
    neighbours: bool = False
    """Whether neighbouring elements of a head rotate together, whatever the model document states
    about the checkpoint."""
    name: str = ""
    """What its file calls it: the same for several keys whose rows are in one matrix."""
    order: I64 | None = field(default=None, compare=False)
    """The row at every row of the model's tensor, and the column at every column; None if they are
    in the same order."""
    columns: I64 | None = field(default=None, compare=False)

    @property
    def kind(self) -> Format:
        return find_format(self.format)

    @property
    def row_bytes(self) -> int:
        return self.kind.count_bytes(self.length)

    @property
    def size_bytes(self) -> int:
        return self.row_bytes * self.rows * self.experts

    def read(self) -> F32:
        import numpy as np

        assert self.data is not None, "vectors are in memory"
        raw = np.asarray(self.data).reshape(-1)[: self.size_bytes]
        return self.kind.decode(raw).reshape(-1) + np.float32(self.added)


class FindWeight(Protocol):
    """Finds a tensor by the key that `pi2.plan.documents.model_parts.Tensors` has for its name.

    In an MoE model, tensors of experts have all of them (`Weight.experts`)."""

    def __call__(self, key: str, layer: int, mixer: int = 0, /) -> Weight | None:
        """Return the tensor ``key`` of a mixer of a layer (0 for the model's own); None if there is
        none."""


MANY = SINGLE + 1
"""Tokens from which on rows are unpacked into panels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an instruction is computed."""

    address: int
    """The kernel's."""
    items: int = 0
    each: int = 0
    """Items of ``tokens`` tokens, for instructions whose items are of tokens."""
    tokens: int = 1
    rows: int = 1
    """Rows of a matrix that an item is."""
    grain: int = 1
    """Items that a thread takes at a time, at least."""


@dataclass(slots=True, kw_only=True)
class Instruction:
    """A kernel with its arguments, while a program is made."""

    kernel: str
    values: dict[str, int]
    ways: tuple[Way, Way, Way]
    """For a token, for several, and for `MANY`."""
    apart: Way | None = None
    """For `MANY` tokens of different sequences, if the last way takes only tokens of a chunk."""
    orders: tuple[int, int] | None = None
    """Argument ``order``, ``together`` or ``parts`` below `MANY` tokens, and from there on."""
    plane: int = 0
    """Plane of activations that it makes; it does nothing in calls that have no such plane."""
    pairs: int = 1
    """Parts of a token that argument ``tokens`` counts: experts, if it counts pairs with them."""
    layer: int | None = None
    waits: bool = True
    """Whether all threads wait until it is over."""
    is_little: bool = False
    """Whether a token is so little work that one thread does it while all others wait."""
    label: str = ""


def put_float(value: float) -> int:
    """Return the number whose low half is a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class Planes(NamedTuple):
    """Planes of 8 bits that inputs of quantised matrices have."""

    one: int
    """In steps of one token."""
    several: int
    """In steps of several tokens."""
    chunk: int
