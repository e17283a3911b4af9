"""Brings dense tensors and resident scales of a store into memory of the caller's.

Unlike mapped ones they stay there whatever becomes of the file: one that is cut while a run goes on
does not end the process, and the system cannot take pages away that every token needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from pi2.arrays import U8, Raw
from pi2.backends.protocol import Tensor
from pi2.diagnostics import UserError
from pi2.plan.weights.bundles import view_scales
from pi2.plan.weights.layout import GROUP, round_up
from pi2.regular_file import open_regular
from pi2.store.file_read import FileRead
from pi2.store.manifest import DENSE_FILE, StoredTensor
from pi2.store.reader import NeuronStore, StoredLayer

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple of it."""
_PIECE_BYTES = 4 << 20


def place_tensors(
    file: FileRead, store: NeuronStore, names: Iterable[str], allocate: Callable[[int, int], U8]
) -> dict[str, Tensor]:
    """Find a place for the tensors ``names`` in one region of ``allocate(size, spare)`` (see
    `FileRead.place`); the file's pieces fill it."""
    wanted = set(names)
    found = [tensor for tensor in store.manifest.tensors if tensor.name in wanted]
    ranges = []
    for tensor in found:
        weights_bytes, scales_bytes = count_bytes(tensor)
        ranges += [(tensor.weights_offset, weights_bytes), (tensor.scales_offset, scales_bytes)]
    charged = sum(round_up(sum(count_bytes(tensor)), ALIGNMENT) for tensor in found)
    places = iter(file.place(ranges, allocate, charged))
    return {tensor.name: view_tensor(tensor, next(places), next(places)) for tensor in found}


def read_pieces(
    store: NeuronStore, names: Iterable[str], buffer: U8
) -> Iterator[tuple[Tensor, int, float]]:
    """Read the tensors ``names`` in pieces of whole rows into ``buffer``, uint8 [size], aligned.

    Yields each piece, a multiple of 32 rows or with the tensor's last one, the number of its first
    row, and the share of all bytes that has been read; a piece is there until the next one.  Raises
    as `FileRead` does.
    """
    entries = {tensor.name: tensor for tensor in store.manifest.tensors}
    wanted = [entries[name] for name in names]
    total, done = sum(sum(count_bytes(tensor)) for tensor in wanted), 0
    path = store.path / DENSE_FILE
    try:
        fd = open_regular(path)
    except OSError as error:
        raise UserError.of("P508", f"cannot read {path}: {error.strerror}") from None
    try:
        for tensor in wanted:
            weights_row, scales_row = (size // tensor.rows for size in count_bytes(tensor))
            row_bytes = weights_row + scales_row
            rows = tensor.rows
            if rows * row_bytes + ALIGNMENT > len(buffer):
                rows = (len(buffer) - ALIGNMENT) // row_bytes // GROUP * GROUP
            assert rows > 0, f"a piece of {tensor.name} takes more than {len(buffer)} bytes"
            for first in range(0, tensor.rows, rows):
                count = min(rows, tensor.rows - first)
                weights = buffer[: count * weights_row]
                begin = round_up(len(weights), ALIGNMENT)
                scales = buffer[begin : begin + count * scales_row]
                read_bytes(fd, path, weights, tensor.weights_offset + first * weights_row)
                read_bytes(fd, path, scales, tensor.scales_offset + first * scales_row)
                done += count * row_bytes
                piece = tensor.model_copy(update={"rows": count})
                yield view_tensor(piece, weights, scales), first, done / total
    finally:
        os.close(fd)


def place_scales(file: FileRead, layer: StoredLayer, allocate: Callable[[int, int], U8]) -> U8:
    """Find a place for the scales of a layer's neurons, uint8 [neurons, scales stride], as
    `place_tensors` does."""
    entry, size = layer.scales_entry, layer.neurons * layer.layout.scales_stride
    assert entry is not None and entry.scales_offset is not None
    (place,) = file.place([(entry.scales_offset, size)], allocate, size)
    return place.reshape(layer.neurons, -1)


def count_bytes(tensor: StoredTensor) -> tuple[int, int]:
    """Bytes of a tensor's weights, and of its scales."""
    if tensor.precision == "fp32":
        return 4 * tensor.rows * tensor.length, 0
    return tensor.rows * tensor.dense.row_weight_bytes, tensor.rows * tensor.dense.row_scale_bytes


def view_tensor(tensor: StoredTensor, weights: U8, scales: U8) -> Tensor:
    """The tensor whose bytes are ``weights`` and ``scales``, uint8."""
    rows, length = tensor.rows, tensor.length
    if tensor.precision == "fp32":
        values: Raw = weights.view(np.float32).reshape(rows, length)
        return Tensor(name=tensor.name, rows=rows, length=length, precision=None, weights=values)
    return Tensor(
        name=tensor.name,
        rows=rows,
        length=length,
        precision=tensor.precision,
        weights=weights.reshape(rows, -1),
        scales=view_scales(scales, rows, tensor.precision) if len(scales) else None,
    )


def read_bytes(fd: int, path: Path, target: U8, offset: int, *, forget: bool = True) -> None:
    """Fill ``target`` from byte ``offset`` of a file; ``forget``: the page cache need not keep it.

    Raises `UserError` P506 if the file is too short, P508 if it cannot be read.
    """
    done = 0
    while done < len(target):
        piece = target[done : done + _PIECE_BYTES]
        try:
            count = os.preadv(fd, [piece.data], offset + done)
        except OSError as error:
            raise UserError.of("P508", f"cannot read {path}: {error.strerror}") from None
        if count == 0:
            raise UserError.of(
                "P506",
                f"{path} ends too early: it was cut or replaced",
                help="make the store again, or copy it again as a whole",
            )
        if forget and hasattr(os, "posix_fadvise"):
            # The tensor is in our memory now: the page cache would be a second copy.
            os.posix_fadvise(fd, offset + done, count, os.POSIX_FADV_DONTNEED)
        done += count
