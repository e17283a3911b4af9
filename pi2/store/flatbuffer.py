"""Writes FlatBuffers, the format of Arrow's metadata, from a small tree of nodes.

Arrow's own writer aligns buffers to 8 bytes and needs a whole record batch in memory.  The store
needs 64 and 4096 bytes and streams, so it writes the metadata itself; every other Arrow
implementation reads it.  Format: https://flatbuffers.dev/internals/ .
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number; ``format`` is its letter in `struct`."""

    format: str
    value: int


@dataclass(frozen=True, slots=True)
class Text:
    """A string."""

    value: str


@dataclass(frozen=True, slots=True)
class Structs:
    """A vector of structs of 8-byte alignment; ``format`` describes one of them."""

    format: str
    rows: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tables:
    """A vector of tables."""

    items: Sequence[Table]


@dataclass(frozen=True, slots=True)
class Table:
    """A table: nodes by the number of their field in the schema."""

    fields: Mapping[int, Node]


Node = Scalar | Text | Structs | Tables | Table


def serialize(root: Table) -> bytes:
    """Return the bytes of a FlatBuffer; valid where its first byte is 8-byte aligned."""
    out = bytearray(4)
    struct.pack_into("<I", out, 0, _put(out, root))
    return bytes(out)


def _put(out: bytearray, node: Node) -> int:
    """Append ``node`` and what it refers to; return its position."""
    match node:
        case Table():
            return _put_table(out, node)
        case Tables():
            position = _pad(out, 4)
            out += struct.pack("<I", len(node.items))
            first = len(out)
            out += bytes(4 * len(node.items))
            for index, item in enumerate(node.items):
                _refer(out, first + 4 * index, _put(out, item))
            return position
        case Structs():
            # The count sits right before the first struct, which is aligned to 8.
            position = _pad(out, 8, ahead=4)
            out += struct.pack("<I", len(node.rows))
            for row in node.rows:
                out += struct.pack(f"<{node.format}", *row)
            return position
        case Text():
            position = _pad(out, 4)
            encoded = node.value.encode()
            out += struct.pack("<I", len(encoded)) + encoded + b"\0"
            return position
        case Scalar():
            raise AssertionError("a scalar is stored inside its table")


def _put_table(out: bytearray, table: Table) -> int:
    sizes = {
        slot: struct.calcsize(f"<{node.format}") if isinstance(node, Scalar) else 4
        for slot, node in table.fields.items()
    }
    # The offset to the vtable comes first (4 bytes), then fields, wide ones at aligned places.
    places, end = {}, 4
    for slot in sorted(sizes, key=lambda slot: (-sizes[slot], slot)):
        places[slot] = -(-end // sizes[slot]) * sizes[slot]
        end = places[slot] + sizes[slot]
    slots = max(table.fields, default=-1) + 1
    vtable = _pad(out, 2)
    out += struct.pack("<HH", 4 + 2 * slots, end)
    out += struct.pack(f"<{slots}H", *(places.get(slot, 0) for slot in range(slots)))
    position = _pad(out, 8)
    out += struct.pack("<i", position - vtable) + bytes(end - 4)
    for slot, node in table.fields.items():
        if isinstance(node, Scalar):
            struct.pack_into(f"<{node.format}", out, position + places[slot], node.value)
    for slot, node in table.fields.items():
        if not isinstance(node, Scalar):
            _refer(out, position + places[slot], _put(out, node))
    return position


def _refer(out: bytearray, place: int, target: int) -> None:
    struct.pack_into("<I", out, place, target - place)


def _pad(out: bytearray, alignment: int, ahead: int = 0) -> int:
    """Append zeros until ``ahead`` bytes further on is aligned; return the new end."""
    out += bytes(-(len(out) + ahead) % alignment)
    return len(out)
