"""Lays out Arrow IPC files before their contents exist, to let a writer stream into them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pi2.plan.weights.layout import round_up
from pi2.store.files import FilePlan, Piece
from pi2.store.manifest import ALIGNMENT, PAGE

if TYPE_CHECKING:
    from pi2.model.tensor import DenseTensor


class Scalar(NamedTuple):
    """A number; ``format`` is its letter in `struct`."""

    format: str
    value: int


class Structs(NamedTuple):
    """A vector of structs of 8-byte alignment; ``format`` describes one of them."""

    format: str
    rows: Sequence[tuple[int, ...]]


Table = Mapping[int, "Node"]
"""Nodes by the number of their field in the schema."""
Node = Scalar | Structs | Table | list[Table] | str
"""A part of a FlatBuffer."""


def serialize(root: Table) -> bytes:
    """Return the bytes of a FlatBuffer; valid where its first byte is 8-byte aligned."""
    out = bytearray(4)
    struct.pack_into("<I", out, 0, _put(out, root))
    return bytes(out)


def _put(out: bytearray, node: Node) -> int:
    """Append ``node`` and its references; return its position."""
    assert not isinstance(node, Scalar), "a scalar is stored inside its table"
    if isinstance(node, str):
        position = _pad(out, 4)
        encoded = node.encode()
        out += struct.pack("<I", len(encoded)) + encoded + b"\0"
    elif isinstance(node, Structs):
        # The count sits right before the first struct, which is aligned to 8.
        position = _pad(out, 8, ahead=4)
        out += struct.pack("<I", len(node.rows))
        for row in node.rows:
            out += struct.pack(f"<{node.format}", *row)
    elif isinstance(node, list):
        position = _pad(out, 4)
        out += struct.pack("<I", len(node))
        first = len(out)
        out += bytes(4 * len(node))
        for index, item in enumerate(node):
            _refer(out, first + 4 * index, _put(out, item))
    else:
        position = _put_table(out, node)
    return position


def _put_table(out: bytearray, table: Table) -> int:
    sizes = {
        slot: struct.calcsize(f"<{node.format}") if isinstance(node, Scalar) else 4
        for slot, node in table.items()
    }
    # The offset to the vtable comes first (4 bytes), then fields, wide ones at aligned places.
    places, end = {}, 4
    for slot in sorted(sizes, key=lambda slot: (-sizes[slot], slot)):
        places[slot] = -(-end // sizes[slot]) * sizes[slot]
        end = places[slot] + sizes[slot]
    slots = max(table, default=-1) + 1
    vtable = _pad(out, 2)
    out += struct.pack("<HH", 4 + 2 * slots, end)
    out += struct.pack(f"<{slots}H", *(places.get(slot, 0) for slot in range(slots)))
    position = _pad(out, 8)
    out += struct.pack("<i", position - vtable) + bytes(end - 4)
    for slot, node in table.items():
        if isinstance(node, Scalar):
            struct.pack_into(f"<{node.format}", out, position + places[slot], node.value)
        else:
            _refer(out, position + places[slot], _put(out, node))
    return position


def _refer(out: bytearray, place: int, target: int) -> None:
    struct.pack_into("<I", out, place, target - place)


def _pad(out: bytearray, alignment: int, ahead: int = 0) -> int:
    """Append zeros until ``ahead`` bytes further on is aligned; return the new end."""
    out += bytes(-(len(out) + ahead) % alignment)
    return len(out)


_MAGIC = b"ARROW1"
_VERSION = Scalar("h", 4)  # V5
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def lay_out_layer_file(neurons: int, stride: int) -> FilePlan:
    """Lay out the file of a layer: bundle fixed_size_binary(stride), neuron int32, check uint32."""
    schema = [
        _describe_field("bundle", 15, {0: Scalar("i", stride)}),
        _describe_field("neuron", 2, {0: Scalar("i", 32), 1: Scalar("?", True)}),
        _describe_field("check", 2, {0: Scalar("i", 32), 1: Scalar("?", False)}),
    ]
    batch = _Batch(
        rows=neurons, columns=((neurons * stride,), (4 * neurons,), (4 * neurons,)), alignment=PAGE
    )
    return _lay_out(schema, [batch])


def lay_out_scales_file(neurons: int, row_bytes: int) -> FilePlan:
    """Lay out a row for each of some neurons: ``scales`` fixed_size_binary(row_bytes)."""
    schema = [_describe_field("scales", 15, {0: Scalar("i", row_bytes)})]
    batch = _Batch(rows=neurons, columns=((neurons * row_bytes,),), alignment=ALIGNMENT)
    return _lay_out(schema, [batch])


def lay_out_dense_file(tensors: Sequence[DenseTensor]) -> FilePlan:
    """Lay out ``dense.arrow``: one record batch of one row per tensor, with weights and scales."""
    integer: Table = {0: Scalar("i", 64), 1: Scalar("?", True)}
    schema = [
        _describe_field("name", 5, {}),
        _describe_field("precision", 5, {}),
        _describe_field("rows", 2, integer),
        _describe_field("length", 2, integer),
        _describe_field("weights", 19, {}),
        _describe_field("scales", 19, {}),
    ]
    batches = [
        _Batch(
            rows=1,
            columns=(
                _hold_text(tensor.name),
                _hold_text(tensor.precision),
                (struct.pack("<q", tensor.rows),),
                (struct.pack("<q", tensor.length),),
                *((struct.pack("<qq", 0, size), size) for size in tensor.count_bytes()),
            ),
            alignment=ALIGNMENT,
        )
        for tensor in tensors
    ]
    return _lay_out(schema, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A record batch: buffers of columns as bytes, or sizes of later data; no validity."""

    rows: int
    columns: tuple[tuple[bytes | int, ...], ...]
    alignment: int


def _hold_text(text: str) -> tuple[bytes, bytes]:
    encoded = text.encode()
    return struct.pack("<ii", 0, len(encoded)), encoded


def _describe_field(name: str, kind: int, type_fields: Table) -> Table:
    """A `Field` table; ``kind`` is the number of its type in Arrow's union ``Type``."""
    return {0: name, 1: Scalar("?", False), 2: Scalar("B", kind), 3: type_fields, 5: []}


def _lay_out(fields: Sequence[Table], batches: Sequence[_Batch]) -> FilePlan:
    schema: Table = {0: Scalar("h", 0), 1: list(fields)}
    pieces = [Piece(0, _MAGIC + b"\0\0")]
    message = _wrap_message(1, schema, 0)
    pieces.append(Piece(8, _frame(message, len(message))))
    end = 8 + len(pieces[-1].data)
    blocks, holes = [], list[tuple[int, ...]]()
    for batch in batches:
        end, block, batch_pieces, batch_holes = _lay_out_batch(batch, end)
        blocks.append(block)
        pieces += batch_pieces
        holes.append(tuple(batch_holes))
    vectors = Structs("qiiq", []), Structs("qiiq", blocks)
    footer = serialize({0: _VERSION, 1: schema, 2: vectors[0], 3: vectors[1]})
    tail = _END_OF_STREAM + footer + struct.pack("<i", len(footer)) + _MAGIC
    pieces.append(Piece(end, tail))
    return FilePlan(pieces=tuple(pieces), size=end + len(tail), holes=tuple(holes))


def _lay_out_batch(
    batch: _Batch, start: int
) -> tuple[int, tuple[int, int, int, int], list[Piece], list[int]]:
    """Return the end of the batch, its block in the footer, known pieces and holes' offsets."""
    buffers: list[tuple[int, int]] = []
    contents: list[tuple[int, bytes | int]] = []
    body = 0
    for column in batch.columns:
        buffers.append((body, 0))  # validity: nothing is null
        for content in column:
            size = content if isinstance(content, int) else len(content)
            buffers.append((body, size))
            contents.append((body, content))
            body = round_up(body + size, ALIGNMENT)
    record_batch: Table = {
        0: Scalar("q", batch.rows),
        1: Structs("qq", [(batch.rows, 0)] * len(batch.columns)),
        2: Structs("qq", buffers),
    }
    message = _wrap_message(3, record_batch, body)
    # Zeros after the metadata, counted in its size, move the body to where it shall begin.
    body_start = round_up(start + 8 + len(message), batch.alignment)
    pieces = [Piece(start, _frame(message, body_start - start - 8))]
    holes = []
    for place, content in contents:
        if isinstance(content, int):
            holes.append(body_start + place)
        else:
            pieces.append(Piece(body_start + place, content))
    block = (start, body_start - start, 0, body)
    return body_start + body, block, pieces, holes


def _wrap_message(kind: int, header: Table, body_bytes: int) -> bytes:
    message: Table = {0: _VERSION, 1: Scalar("B", kind), 2: header, 3: Scalar("q", body_bytes)}
    encoded = serialize(message)
    return encoded + bytes(-len(encoded) % 8)


def _frame(message: bytes, size: int) -> bytes:
    return struct.pack("<Ii", 0xFFFFFFFF, size) + message + bytes(size - len(message))
