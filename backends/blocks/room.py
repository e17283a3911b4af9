"""Tables of formats, KV cache and states of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.backends.blocks.contract import KV_TYPES, Ring, describe_heads
from pi2.backends.blocks.sizes import count_pool_positions, count_pooled_rows, count_positions
from pi2.formats import find_format
from pi2.formats.packing import align_bytes
from pi2.model.states import describe_state
from pi2.plan.arithmetic.units import count_sequence_bytes, count_state_bytes, find_index_type
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType

if TYPE_CHECKING:
    from pi2.arrays import F16, F32, I32, I64, U8, Raw
    from pi2.model.blocks import Attention

GRIDS: Mapping[str, int] = {
    "iq1_s": 2048 * 8,
    "iq1_m": 2048 * 8,
    "iq2_xxs": 256 * 8,
    "iq2_xs": 512 * 8,
    "iq2_s": 1024 * 8,
    "iq3_xxs": 256 * 4,
    "iq3_s": 512 * 4,
}
"""Bytes of each format's grid."""


def count_table_bytes(name: str) -> int:
    """Return the bytes of the tables of a format; 0 where it has none."""
    return GRIDS[name] + 128 if name in GRIDS else 0


def place_tables(name: str) -> Path:
    """Return where a phone's bundle, which lacks the package `gguf`, has the tables of a format."""
    return Path(__file__).with_name(f"{name}.tables")


def make_tables(name: str) -> U8:
    """Return the tables of a format; zeros where it has none."""
    import numpy as np

    if name not in GRIDS:
        return np.zeros(64, np.uint8)
    if place_tables(name).exists():
        return np.fromfile(place_tables(name), np.uint8)
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    values = np.asarray(kind.grid).reshape(-1)
    if name.startswith("iq1"):
        # -1, 0 and 1 in eighths, to which an eighth is added or not.
        values = values * 8
    grid: U8 = values.astype(np.int8).view(np.uint8)
    assert grid.size == GRIDS[name]
    signs: U8 = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    return np.ascontiguousarray(np.concatenate([grid, signs]))


CHUNK = 16
"""Elements that always have the same scale."""


@dataclass(frozen=True, slots=True)
class Order:
    """Fields of 16 bytes each: ``place`` says which 16 elements field f of load b has."""

    loads: int
    fields: int
    place: Callable[[int, int], int]

    def list_parts(self, width: int) -> list[tuple[int, ...]]:
        """Return the content of registers of ``width`` bytes, in the kernels' order."""
        each = width // CHUNK
        return [
            tuple(self.place(load, field) for load in range(first, first + each))
            for first in range(0, self.loads, each)
            for field in range(self.fields)
        ]


NATURAL = Order(16, 1, lambda b, f: b)
NIBBLES = Order(8, 2, lambda b, f: 4 * (b // 2) + b % 2 + 2 * f)
PAIRS = Order(4, 4, lambda b, f: 8 * (b // 2) + b % 2 + 2 * f)
SIXES = Order(8, 2, lambda b, f: 8 * (b // 4) + b % 4 + 4 * f)
HALVES = Order(8, 2, lambda b, f: 2 * b + f)

_ORDERS: Mapping[str, Order] = {
    "q2_k": PAIRS,
    "q3_k": PAIRS,
    "q4_k": NIBBLES,
    "q5_k": NIBBLES,
    "q6_k": SIXES,
    "tq2_0": PAIRS,
    "iq4_xs": HALVES,
}


def find_order(name: str) -> Order:
    return _ORDERS.get(name, NATURAL)


def list_offsets(name: str, width: int) -> tuple[int, ...]:
    """Return where each 16 elements of a block are put, in bytes from its beginning."""
    flat = [chunk for part in find_order(name).list_parts(width) for chunk in part]
    return tuple(CHUNK * flat.index(chunk) for chunk in range(256 // CHUNK))


FIELDS = {"q1_0": 8, "q2_0": 4, "pq2_0": 4}
"""Weights of a byte, in their order: first of a register's bytes the lowest of each, and so on."""


def count_bundle(name: str, width: int) -> int:
    """Return the groups of 32 of a format that are computed at once; 1: each in its order.  Of
    blocks of 32 parts of bytes, the first halves of all groups come first, then the second ones."""
    own = find_format(name)
    if name in FIELDS:
        return width * FIELDS[name] // 32 if own.block <= width * FIELDS[name] else 1
    is_bundled = own.block == 32 > own.block_bytes
    return width // CHUNK if is_bundled and width >= 2 * CHUNK else 1


def describe_order(name: str, width: int) -> int:
    """Return the argument ``together`` of activations for rows of a format: the groups of a bundle,
    and the weights of a byte in its second byte."""
    count = count_bundle(name, width)
    return count if count == 1 else count + 256 * FIELDS.get(name, 0)


Allocate = Callable[[str, int], "U8"]
"""Gives zeroed bytes of a segment, which begin at a cache line; pages come when written."""
_ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "int32": 4, "float32": 4, "int64": 8}


class Declared:
    """An array that is only counted: it and its parts are nowhere."""

    data = 64
    """An address."""

    @property
    def ctypes(self) -> Declared:
        return self

    def __getitem__(self, place: object) -> Declared:
        return self


class Memory:
    """Arrays of a program, which are counted, and allocated too if there is something to give."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self._kept: list[Any] = []
        """Everything that instructions know by its address."""
        self.sizes: dict[str, int] = {}
        """Bytes of each segment so far."""

    @property
    def is_real(self) -> bool:
        return self._allocate is not None

    def take(self, kind: str, *shape: int, segment: str = "workspace") -> Any:
        """Return an array of zeros."""
        size = _ITEM_BYTES[kind] * prod(shape)
        self.sizes[segment] = self.sizes.get(segment, 0) + size
        if self._allocate is None:
            return Declared()
        self._kept.append(self._allocate(segment, size).view(kind).reshape(shape))
        return self._kept[-1]

    def keep(
        self, count: int, read: Callable[[], Any], kind: str = "float32", segment: str = "workspace"
    ) -> Any:
        """Return an array of the ``count`` values that ``read`` gives if they are wanted."""
        array = self.take(kind, count, segment=segment)
        if self.is_real:
            array[:] = read()
        return array


class StateMemory:
    """States of layers that have one: float32 [sequences, n], of every sequence what convolutions
    read of earlier tokens and the recurrent states."""

    def __init__(self, model: Model, sequences: int, memory: Memory) -> None:
        shape, places = describe_state(model), model.states
        each = 0 if shape is None else count_state_bytes(model) // 4
        self.stride = count_sequence_bytes(model) // 4
        """Elements of a sequence."""
        self._values = memory.take("float32", sequences, self.stride, segment="state")
        first: int = self._values.ctypes.data
        kept = 0 if shape is None else align_bytes(4 * shape.kept)
        self._places = {
            place: (begin, begin + kept)
            for number, place in enumerate(places)
            for begin in (first + 4 * each * number,)
        }
        self.ngram_tails = first + 4 * each * len(places)
        """Address of what the first sequence has added of earlier n-grams."""

    def find(self, layer: int, mixer: int) -> tuple[int, int]:
        """Return the addresses of the first sequence's earlier tokens and recurrent state."""
        return self._places[layer, mixer]

    def view_last_tokens(self, sequence: int, count: int) -> I32:
        """Return the last tokens of a sequence, which n-grams of the next one have."""
        tokens: I32 = self._values[sequence, self.stride - count :].view("int32")
        return tokens

    def read(self, sequence: int) -> F32:
        state: F32 = self._values[sequence].copy()
        return state

    def put(self, sequence: int, state: F32) -> None:
        """Put back what `read` gave."""
        self._values[sequence] = state


@dataclass(frozen=True, slots=True)
class Cached:
    """Vectors of a kind in the KV cache of a layer."""

    elements: Raw
    """[sequences, heads, context, width]."""
    scales: F16 | None
    """[sequences, heads, context] of int8 elements."""


class KvCache:
    """Vectors of the positions of a context, or of its last ones where layers have a window."""

    def __init__(
        self,
        model: Model,
        context: int,
        sequences: int,
        memory: Memory,
        kind: KvType,
        tokens: int | None = None,
    ) -> None:
        """``tokens``: the most of a call, if windows keep no more; see `count_positions`."""
        self.kind: KvType = kind
        self.ring: Ring | None = None
        self._context = context
        self._layers: dict[int, list[Cached]] = {}
        self.pools: dict[int, tuple[Attention, F32]] = {}
        """Values and gates for a layer's pooled vectors [sequences, 1, positions, .]."""
        self.indexes: dict[int, Raw] = {}
        """Keys of a layer's index [sequences, 1, context, width]."""
        index, pooled = model.attention.index, None
        for layer, block in enumerate(model.blocks):
            own = block.attention
            if own is not None and own.has_keys:
                self._add_keys(layer, own, sequences, memory, tokens)
            if own is not None and own.block:
                ring = count_pool_positions(own, context, tokens)
                pooled = ring if ring.positions < context else pooled
                shape = sequences, 1, ring.positions, 2 * own.pool_width
                self.pools[layer] = own, memory.take("float32", *shape, segment="kv")
            if own is not None and own.chooses == "index" and index is not None:
                keys, own_kind = (sequences, 1, context, index.width), find_index_type(kind)
                self.indexes[layer] = memory.take(KV_TYPES[own_kind], *keys, segment="kv")
        self.ring = pooled or self.ring

    def _add_keys(
        self, layer: int, own: Attention, sequences: int, memory: Memory, tokens: int | None
    ) -> None:
        heads, kept = describe_heads(own), count_positions(own, self._context, tokens)
        if own.window is not None and kept < self._context:
            self.ring = Ring(own.window, kept)
        shape = sequences, heads.key_heads, kept + count_pooled_rows(own, self._context)
        for width in heads.widths:
            elements = memory.take(KV_TYPES[self.kind], *shape, width, segment="kv")
            scales = None
            if self.kind == "int8":
                scales = memory.take("float16", *shape, segment="kv")
            self._layers.setdefault(layer, []).append(Cached(elements, scales))

    def find(self, layer: int) -> Sequence[Cached]:
        """Return the vectors of a layer: its keys, and its values unless vectors are latent."""
        return self._layers[layer]

    def _list_rows(self, first: int, end: int) -> Iterator[tuple[Raw, I64]]:
        """Yield every array, and its rows of the tokens from ``first`` to ``end``.  Pooled vectors
        have rows of the blocks that end there."""
        import numpy as np

        positions = np.arange(first, end)
        for array in [*self.indexes.values(), *(pool for _, pool in self.pools.values())]:
            yield array, positions % array.shape[2]
        for layer, vectors in self._layers.items():
            rows, own = positions, self.pools.get(layer)
            if own is not None:
                ends = np.arange(first // own[0].block, end // own[0].block)
                rows = np.concatenate([positions, ends + self._context])
            for kept in (kept for kind in vectors for kept in (kind.elements, kind.scales)):
                if kept is not None:
                    yield kept, rows % kept.shape[2]

    def read(self, sequence: int, first: int, end: int) -> U8:
        """Return a copy [n] of the KV cache of a sequence's tokens from ``first`` to ``end``; rings
        give what they have in the places of those."""
        import numpy as np

        parts = [
            np.ascontiguousarray(array[sequence][:, rows]).view(np.uint8).reshape(-1)
            for array, rows in self._list_rows(first, end)
        ]
        return np.concatenate([np.zeros(0, np.uint8), *parts])

    def put(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read` gave for these tokens."""
        done = 0
        for array, rows in self._list_rows(first, end):
            shape = array.shape[1], len(rows), *array.shape[3:]
            size = prod(shape) * array.itemsize
            part: Raw = kept[done : done + size].view(array.dtype).reshape(shape)
            array[sequence][:, rows] = part
            done += size
