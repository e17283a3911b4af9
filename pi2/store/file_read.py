"""Ranges of a store's file on their way into memory, checked in pieces of a MiB; and dense
tensors as programs multiply them: rows of whole blocks, each with its scale."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pi2.arrays import I32, U8
from pi2.caches import find_cache_folder, open_regular
from pi2.diagnostics import UserError
from pi2.formats import Packing, find_packing
from pi2.model.tensor import EMBEDDING, takes_blocks
from pi2.plan.weights.layout import GROUP, Tensor, round_up
from pi2.reads import describe_failure, is_direct, read_at
from pi2.store.identity import report_size
from pi2.store.manifest import ALIGNMENT, CHECKED_BYTES, DENSE_FILE, PAGE, StoredFile, StoredTensor
from pi2.store.reader import NeuronStore, StoredLayer, name_blocks, view_tensor
from pi2.store.verification import report_file

Range = tuple[int, int]
"""First byte of the file, and how many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A read of at most `CHECKED_BYTES`."""

    run: Callable[[], None]
    """Reads, compares and copies it, in any thread."""
    bytes: int
    target: U8 | None
    """Its target, if it is read straight into place."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    first: int
    last: int
    """In the file; ``last`` is behind it."""
    place: int
    """In the region."""


class FileRead:
    """A file that is being read; to be closed when no piece is under way any more."""

    def __init__(
        self, folder: Path, entry: StoredFile, *, direct: bool = True, verify: bool = True
    ) -> None:
        """``verify``: compare pieces with checks. `UserError` P506 for another size, P508."""
        self._path = folder / entry.path
        self._size = entry.bytes
        self._checks = entry.checks if verify else None
        self._copies: dict[int, list[tuple[slice, U8]]] = defaultdict(list)
        """By piece: parts of it, and where they go."""
        self._straight: dict[int, U8] = {}
        """By piece: the target of the whole piece."""
        self._buffers = threading.local()
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self._fd = _open(self._path, flag)
        found = os.fstat(self._fd).st_size
        if found != entry.bytes:
            self.close()
            raise report_size(self._path, entry, found)

    def place(
        self, ranges: Sequence[Range], allocate: Callable[[int, int], U8], charged_bytes: int
    ) -> list[U8]:
        """Place ``ranges`` in a region that ``allocate(size, spare)`` gives; views uint8 [bytes],
        64-byte aligned."""
        stretches: list[_Stretch] = []
        end = 0
        for first, size in ranges:
            before = stretches[-1] if stretches else None
            if before is not None and 0 <= first - before.last <= PAGE:
                stretches[-1] = _Stretch(before.first, first + size, before.place)
            else:
                # Direct reads want the same place in a block of the file and of memory.
                place = end + (first - end) % PAGE
                stretches.append(_Stretch(first, first + size, place))
            last = stretches[-1]
            end = last.place + last.last - last.first
        end = round_up(max(end, charged_bytes), ALIGNMENT)
        region = allocate(charged_bytes, end - charged_bytes)
        for stretch in stretches:
            self._divide(stretch, region)
        return [_find(stretches, region, first, size) for first, size in ranges]

    def _divide(self, stretch: _Stretch, region: U8) -> None:
        shift = stretch.place - stretch.first
        for number in range(stretch.first // CHECKED_BYTES, -(-stretch.last // CHECKED_BYTES)):
            start = number * CHECKED_BYTES
            first, last = max(start, stretch.first), min(start + CHECKED_BYTES, stretch.last)
            target = region[first + shift : last + shift]
            if last - first == CHECKED_BYTES and number not in self._straight:
                self._straight[number] = target
            else:
                self._copies[number].append((slice(first - start, last - start), target))

    def list_pieces(self) -> Iterator[Piece]:
        """The reads that fill placed arrays; if the file has checks, reads of its other bytes as
        well, to compare all of them."""
        for number in range(-(-self._size // CHECKED_BYTES)):
            is_wanted = number in self._straight or number in self._copies
            if is_wanted or self._checks is not None:
                size = min(CHECKED_BYTES, self._size - number * CHECKED_BYTES)
                yield Piece(partial(self._read, number, size), size, self._straight.get(number))

    def _read(self, number: int, size: int) -> None:
        offset = number * CHECKED_BYTES
        target = self._straight.get(number)
        piece = self._take_buffer() if target is None else target
        read_bytes(self._fd, self._path, piece, offset, size)
        if self._checks is not None and zlib.crc32(piece[:size].data) != self._checks[number]:
            problem = "its contents have changed: a checksum differs"
            raise UserError((report_file("P507", self._path, problem),), exit_code=2)
        for part, place in self._copies.get(number, ()):
            place[:] = piece[part]
        if target is None and hasattr(mmap, "MADV_DONTNEED"):
            # Threads stay, and would keep a piece each for as long as the model runs.
            self._buffers.memory.madvise(mmap.MADV_DONTNEED)

    def _take_buffer(self) -> U8:
        if not hasattr(self._buffers, "piece"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._buffers.memory = mmap.mmap(-1, CHECKED_BYTES, flags=flags)
            self._buffers.piece = np.frombuffer(self._buffers.memory, np.uint8)
        buffer: U8 = self._buffers.piece
        return buffer

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: Path, flag: int = 0) -> int:
    """Open a file with a flag, unless its file system has none.  `UserError` P508."""
    try:
        try:
            return open_regular(path, flag)
        except OSError as error:
            if not flag or error.errno != errno.EINVAL:
                raise
            return open_regular(path)
    except OSError as error:
        raise UserError.of("P508", describe_failure(path, 0, error)) from None


def _find(stretches: Sequence[_Stretch], region: U8, first: int, size: int) -> U8:
    for stretch in stretches:
        if stretch.first <= first and first + size <= stretch.last:
            place = stretch.place + first - stretch.first
            return region[place : place + size]
    raise AssertionError("every range is inside a read")


_PIECE_BYTES = 4 << 20


def read_pieces(
    store: NeuronStore, names: Iterable[str], buffer: U8
) -> Iterator[tuple[Tensor, int, float]]:
    """Read tensors in pieces of whole rows into ``buffer``; yields each piece, its first row and
    the share read."""
    entries = {tensor.name: tensor for tensor in store.manifest.tensors}
    wanted = [entries[name] for name in names]
    total, done = sum(sum(tensor.dense.count_bytes()) for tensor in wanted), 0
    path = store.path / DENSE_FILE
    fd = _open(path)
    try:
        for tensor in wanted:
            weights_row, scales_row = (size // tensor.rows for size in tensor.dense.count_bytes())
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
    """Find a place for the scales of a layer's neurons, uint8 [neurons, scales stride], in a region
    of ``allocate(size, spare)`` (see `FileRead.place`); the file's pieces fill it."""
    entry, size = layer.scales_entry, layer.neurons * layer.layout.scales_stride
    assert entry is not None and entry.scales_offset is not None
    (place,) = file.place([(entry.scales_offset, size)], allocate, size)
    return place.reshape(layer.neurons, -1)


def read_bytes(
    fd: int, path: Path, target: U8, offset: int, size: int | None = None, *, forget: bool = True
) -> None:
    """Fill ``target``, or at least ``size`` bytes of it, from byte ``offset``; ``forget`` the
    pages, if the page cache has any.  `UserError` P506 or P508."""
    needed = len(target) if size is None else size
    for begin in range(0, needed, _PIECE_BYTES):
        piece = target[begin : begin + _PIECE_BYTES]
        least = min(len(piece), needed - begin)
        try:
            count = read_at(fd, piece.data, offset + begin, least)
        except OSError as error:
            raise UserError.of("P508", describe_failure(path, offset + begin, error)) from None
        if count < least:
            raise UserError.of(
                "P506",
                f"{path} ends too early: it was cut or replaced",
                help="make the store again, or copy it again as a whole",
            )
        if forget and hasattr(os, "posix_fadvise") and not is_direct(fd):
            # It is in our memory now: the page cache would be a second copy.
            os.posix_fadvise(fd, offset + begin, count, os.POSIX_FADV_DONTNEED)


class EmbeddingRows:
    """Stands for an embedding of a store: ``tensor`` has room for some of its rows."""

    def __init__(
        self, store: NeuronStore, allocate: Callable[[int], U8], *, rows: int, name: str = EMBEDDING
    ) -> None:
        """``allocate(size)`` gives uint8 [size]; ``rows``: most tokens of a ``load``, which are
        blocks if they have scales; ``name``: the tensor's.  UserError P508 if the store's file
        cannot be opened."""
        stored = next(tensor for tensor in store.manifest.tensors if tensor.name == name)
        self._stored_rows = stored.rows
        some = stored.model_copy(update={"rows": rows})
        weights_bytes, scales_bytes = some.dense.count_bytes()
        region = allocate(weights_bytes + scales_bytes)
        self._weights = region[:weights_bytes].reshape(rows, -1)
        self._scales = region[weights_bytes:].reshape(rows, -1)
        self._offsets = (stored.weights_offset, stored.scales_offset)
        self._path = store.path / DENSE_FILE
        self.tensor: Tensor = view_tensor(some, region[:weights_bytes], region[weights_bytes:])
        """The rows of the last ``load``, in the order of its tokens."""
        self._packing, self._blocks = some.dense.packing, np.zeros((0, 0), np.uint8)
        if scales_bytes:
            self.tensor = name_blocks(some, region)
            self._blocks = region.reshape(rows, -1)
            # Rows are read one by one before they become blocks.
            self._weights, self._scales = (
                np.empty((1, own.shape[1]), np.uint8) for own in (self._weights, self._scales)
            )
        self._numbers = np.arange(rows, dtype=np.int32)
        self._fd = _open(self._path)
        if hasattr(os, "posix_fadvise"):
            # What lies beside a row is that of some other token.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def load(self, tokens: I32) -> I32:
        """Read the rows of ``tokens`` [n]; their places in ``tensor``, the first row for unknown
        tokens.  UserError P506, P508."""
        known = np.where(tokens < self._stored_rows, tokens, 0)
        for place, token in enumerate(known.tolist()):
            for rows, offset in zip((self._weights, self._scales), self._offsets, strict=True):
                row = rows[place % len(rows)]
                read_bytes(self._fd, self._path, row, offset + token * len(row), forget=False)
            if len(self._blocks):
                scales = self._packing.view_scales(self._scales.reshape(-1), 1)
                length = self.tensor.length
                self._blocks[place] = self._packing.join_blocks(self._weights, scales, length)
        return self._numbers[: len(tokens)]

    def close(self) -> None:
        os.close(self._fd)


_BLOCK_BYTES = 1 << 20


def _arrange(entry: StoredTensor, raw: U8) -> None:
    """Put every scale of a tensor to its weights, in place: ``raw`` is what its file has, from the
    first weight to the last scale."""
    packing = entry.dense.packing
    weights_bytes, scales_bytes = entry.dense.count_bytes()
    row_weights, row_scales = weights_bytes // entry.rows, scales_bytes // entry.rows
    first = entry.scales_offset - entry.weights_offset
    scales = raw[first : first + scales_bytes].copy().reshape(entry.rows, -1)
    row = row_weights
    if packing.scaled == "groups":
        row += row_scales
    else:
        raw[weights_bytes : weights_bytes + scales_bytes] = scales.reshape(-1)
    step = max(1, _BLOCK_BYTES // row)
    # From the end on: a row is behind the weights of those before it.
    for start in reversed(range(0, entry.rows, step)):
        end = min(start + step, entry.rows)
        weights = raw[start * row_weights : end * row_weights].reshape(end - start, -1)
        own = packing.view_scales(scales[start:end], end - start)
        blocks = packing.join_blocks(weights, own, entry.length)
        raw[start * row : end * row] = blocks.reshape(-1)


class BlockTensors:
    """Tensors that become blocks when their bytes have been read."""

    def __init__(self) -> None:
        self._loaded: list[tuple[StoredTensor, U8]] = []

    def place(
        self,
        file: FileRead,
        store: NeuronStore,
        names: Iterable[str],
        allocate: Callable[[int, int], U8],
    ) -> dict[str, Tensor]:
        """Find a place for the tensors ``names`` in one region of ``allocate(size, spare)``
        (see `FileRead.place`); they are blocks after `arrange`."""
        wanted = set(names)
        found = [tensor for tensor in store.manifest.tensors if tensor.name in wanted]
        ranges, charged = [], 0
        for tensor in found:
            (first, size), (scales, scales_size) = tensor.ranges
            end = scales + scales_size if scales_size else first + size
            ranges.append((first, end - first))
            charged += round_up(size + scales_size, ALIGNMENT)
        places = file.place(ranges, allocate, charged)
        return {
            tensor.name: self._take(tensor, raw) for tensor, raw in zip(found, places, strict=True)
        }

    def _take(self, tensor: StoredTensor, raw: U8) -> Tensor:
        size, scales_size = tensor.dense.count_bytes()
        if not (scales_size and takes_blocks(tensor.name)):
            first = tensor.scales_offset - tensor.weights_offset
            return view_tensor(tensor, raw[:size], raw[first : first + scales_size])
        self._loaded.append((tensor, raw))
        return name_blocks(tensor, raw[: size + scales_size])

    def arrange(self) -> None:
        """Make blocks of all that was read."""
        while self._loaded:
            _arrange(*self._loaded.pop())


def map_blocks(store: NeuronStore) -> Mapping[str, Tensor]:
    """Return a store's tensors as blocks in a file without a name, which the system writes and
    reads again as it likes."""
    entries = {tensor.name: tensor for tensor in store.manifest.tensors}
    found = dict(store.tensors)
    chosen = [entries[name] for name, own in found.items() if own.scales is not None]
    chosen = [own for own in chosen if takes_blocks(own.name)]
    sizes = [round_up(sum(own.dense.count_bytes()), ALIGNMENT) for own in chosen]
    if not chosen:
        return found
    folder = find_cache_folder("kernels")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(sum(sizes))
        mapped = mmap.mmap(file.fileno(), sum(sizes))
    region, place = np.frombuffer(mapped, np.uint8), 0
    for own, size in zip(chosen, sizes, strict=True):
        raw = region[place : place + sum(own.dense.count_bytes())]
        found[own.name] = name_blocks(own, raw)
        _copy_blocks(own.dense.packing, store.tensors[own.name], found[own.name])
        place += size
    mapped.flush()
    return found


def _copy_blocks(packing: Packing, source: Tensor, made: Tensor) -> None:
    target: U8 = made.weights.view(np.uint8)
    assert source.scales is not None
    if made.scales is not None:
        made.scales[:] = source.scales
    step = max(1, _BLOCK_BYTES // target.shape[1])
    for start in range(0, source.rows, step):
        piece = slice(start, start + step)
        weights = np.ascontiguousarray(source.weights[piece]).view(np.uint8)
        target[piece] = packing.join_blocks(weights, source.scales[piece], source.length)


def split_blocks(tensor: Tensor) -> Tensor:
    """Return a tensor of blocks as packed weights and scales: a copy."""
    assert tensor.format is not None and tensor.precision is not None
    packing = find_packing(tensor.precision)
    weights, scales = packing.split_blocks(np.asarray(tensor.weights), tensor.length)
    kept = scales if tensor.scales is None else tensor.scales
    return replace(tensor, weights=weights, scales=kept, format=None)
