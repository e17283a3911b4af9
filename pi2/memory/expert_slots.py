"""Experts of a file in slots of a cache: whole matrices, read past the page cache when they are
missing, several at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, I64, U8, Bits
from pi2.memory.bulk_load import touch_memory
from pi2.memory.cache import Lookup, NeuronCache
from pi2.memory.direct_files import BLOCK, BatchReads, DirectFiles, count_slot_bytes
from pi2.memory.io_engine import EngineName, ReadBatch, make_readers, make_reads
from pi2.memory.policy import ABSENT, PolicyName

if TYPE_CHECKING:
    from pi2.memory.host_loops import HostLoops

_MOST_PLACES = (1 << 31) - 1
"""Units behind an address that places can count."""
TOUCHED_BYTES, TOUCHED_AHEAD_BYTES = 32 << 20, 256 << 20
"""Memory of slots that is touched at a time, and so far ahead of its use: the first touch may take
as long as the read."""
FIRST_TOKENS = 32
"""Before that many the cache is not yet as it will be."""
TRIAL_TOKENS = 8
"""Tokens with, and as many without, whose times are compared."""
AGAIN_TOKENS = 256
"""After so many it is tried again."""
GAIN = 0.02
"""Share of a token's time that not looking ahead must save."""


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """The same matrix of all experts of a layer, one after the other in a file."""

    file: int
    offset: int
    """Byte of the file at which expert 0 begins."""
    size: int
    """Bytes of one."""

    @property
    def unit(self) -> int:
        """Bytes that divide where each begins behind a block of the disk."""
        return math.gcd(BLOCK, self.offset, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReads:
    """How experts are read and kept."""

    engine: EngineName
    depth: int
    threads: int
    policy: PolicyName
    active: int
    """Experts of a token."""


@dataclass(slots=True, eq=False)
class Held:
    """Experts that are computed together: their slots are not given away until `release`."""

    layer: int
    found: list[Lookup]
    """Lookups: of a prefetch first, if there was one."""
    reads: list[_Reads]

    @property
    def waits(self) -> bool:
        return bool(self.reads)


@dataclass(frozen=True, slots=True)
class _Reads:
    batch: ReadBatch
    inputs: int
    """Requests for matrices but a layer's last, which come first."""


class ReadAhead:
    """Decides token by token whether reading ahead pays."""

    def __init__(self, *, is_measured: bool = True) -> None:
        """``is_measured``: whether times decide; else every token looks ahead."""
        self.is_on = True
        self._is_measured = is_measured
        self._until = FIRST_TOKENS
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._is_trial = False
        self.idle_tokens = 0
        """Tokens that have not looked ahead because it did not pay."""

    def end_token(self, seconds: float) -> None:
        if not self._is_measured:
            return
        if self._is_trial:
            self._times[self.is_on].append(seconds)
        elif not self.is_on:
            self.idle_tokens += 1
        self._until -= 1
        if self._until:
            return
        if not self._is_trial:
            self._is_trial, self.is_on, self._until = True, True, TRIAL_TOKENS
        elif self.is_on:
            self.is_on, self._until = False, TRIAL_TOKENS
        else:
            on, off = (statistics.median(self._times[state]) for state in (True, False))
            self.is_on = off > (1 - GAIN) * on
            self._is_trial, self._until = False, AGAIN_TOKENS
            self._times = {True: [], False: []}


def count_least_bytes(layers: Mapping[int, Sequence[ExpertMatrix]], active: int) -> int:
    """Bytes of slots that are enough, of one size for all layers: for the experts of a token, and
    for one that is read meanwhile."""
    return max(active, 2) * sum(map(count_slot_bytes, _find_largest(layers)))


def _find_largest(layers: Mapping[int, Sequence[ExpertMatrix]]) -> list[int]:
    sizes = ([matrix.size for matrix in matrices] for matrices in layers.values())
    return [max(own) for own in zip(*sizes, strict=True)]


class _Group:
    """Layers whose slots are alike, and their cache."""

    def __init__(
        self,
        layers: Sequence[int],
        sizes: Sequence[int],
        region: U8,
        experts: int,
        reads: SlotReads,
        loops: HostLoops,
    ) -> None:
        self.rooms = [count_slot_bytes(size) for size in sizes]
        self.stride = sum(self.rooms)
        self.row_of = {layer: row for row, layer in enumerate(layers)}
        capacity = min(len(region) // self.stride, len(layers) * experts)
        self.region = region[: capacity * self.stride]
        self._toucher = make_readers(1, "pi2-touch")
        self._touched = 0
        self.cache = NeuronCache(
            self.region.reshape(capacity, self.stride),
            [range(0)] * len(layers),
            experts,
            loops,
            policy=reads.policy,
            expected=np.full((len(layers), experts), reads.active / experts, np.float32),
        )
        self.touch_ahead(0)

    def touch_ahead(self, slots: int) -> None:
        """Touch the memory behind the first ``slots`` in another thread: slots are first given away
        in their order."""
        end = min(slots * self.stride + TOUCHED_AHEAD_BYTES, len(self.region))
        while self._touched < end:
            size = min(TOUCHED_BYTES, len(self.region) - self._touched)
            address = self.region.ctypes.data + self._touched
            self._toucher.submit(touch_memory, address, size)
            self._touched += size

    def close(self) -> None:
        self._toucher.shutdown(cancel_futures=True)


class _Layer:
    """Places of a layer's experts in the file and in memory."""

    def __init__(self, matrices: Sequence[ExpertMatrix], group: _Group, experts: int) -> None:
        self.group = group
        number = np.arange(experts, dtype=np.int64)
        last = len(matrices) - 1
        files = [matrix.file for matrix in matrices]
        self.by_file = [
            (file, own, len(own) - int(last in own))
            for file in dict.fromkeys(files)
            if (own := [n for n, other in enumerate(files) if other == file])
        ]
        """Files, the matrices that each has, and how many of them are not the last."""
        begins: I64 = np.stack([m.offset + number * m.size for m in matrices])
        sizes = np.array([[matrix.size] for matrix in matrices])
        self.firsts = begins // BLOCK * BLOCK
        self.lengths = -(-(begins + sizes) // BLOCK) * BLOCK - self.firsts
        self.needed = begins + sizes - self.firsts
        """Bytes [matrices, experts] of the aligned ranges up to the last one that is wanted."""
        rooms = np.cumsum([0, *group.rooms[:-1]])
        self.starts = rooms[:, None]
        self.units = [matrix.unit for matrix in matrices]
        within = self.starts + begins - self.firsts
        self.within = [own // unit for own, unit in zip(within, self.units, strict=True)]
        self.places: list[I32] = [np.zeros(experts, np.int32) for _ in matrices]

    def put(self, experts: I32, slots: I32) -> None:
        """Note that ``experts`` [n] are in ``slots`` [n]."""
        for places, within, unit in zip(self.places, self.within, self.units, strict=True):
            places[experts] = within[experts] + slots * np.int64(self.group.stride // unit)


class ExpertSlots:
    """Slots for experts of all layers, of one size or of several; one calling thread."""

    def __init__(
        self,
        files: DirectFiles,
        layers: Mapping[int, Sequence[ExpertMatrix]],
        experts: int,
        region: U8,
        reads: SlotReads,
        loops: HostLoops,
    ) -> None:
        """``region`` begins at a block; ``loops`` look up and read."""
        assert region.ctypes.data % BLOCK == 0
        unit = min(matrix.unit for matrices in layers.values() for matrix in matrices)
        region = region[: _MOST_PLACES * unit]
        self._groups = _divide(layers, experts, region, reads, loops)
        by_layer = {layer: group for group in self._groups for layer in group.row_of}
        self._layers = {
            layer: _Layer(matrices, by_layer[layer], experts) for layer, matrices in layers.items()
        }
        self.reads = BatchReads(files, files.open_engine(reads, loops))
        self._active = reads.active
        self._ahead: dict[int, Held] = {}
        """Prefetches of layers that have not chosen yet."""
        self.prefetched = 0
        """Prefetched experts that were needed."""
        self._unused = 0

    def locate(self, layer: int) -> list[tuple[int, I32, int]]:
        """Of each matrix of a layer: an address, and where its experts are, counted from there in
        so many bytes; places change with `find`."""
        own = self._layers[layer]
        address: int = own.group.region.ctypes.data
        return [(address, places, unit) for places, unit in zip(own.places, own.units, strict=True)]

    def count_slots(self, layer: int) -> int:
        """Slots for experts of a layer that are wanted together."""
        return self._layers[layer].group.cache.free_capacity

    def find_there(self, layer: int) -> Bits:
        """Which experts [experts] are in memory, or on their way."""
        group = self._layers[layer].group
        there: Bits = group.cache.find_slots(group.row_of[layer], 0, group.cache.neurons) != ABSENT
        return there

    def count_begun(self, layer: int) -> int:
        """Experts that `prefetch` has begun to read."""
        ahead = self._ahead.get(layer)
        return 0 if ahead is None else len(ahead.found[0].missing)

    def prefetch(self, layer: int, experts: I32) -> None:
        """Begin to read missing ``experts`` (ascending), if slots are left for a token's; `find`
        takes the reads over."""
        own = self._layers.get(layer)
        if own is None or layer in self._ahead:
            return
        cache, row = own.group.cache, own.group.row_of[layer]
        slots = cache.locate(row, experts)
        if slots.min() >= 0:
            return
        missing, there = experts.compress(slots < 0), slots.compress(slots >= 0)
        if len(missing) + len(there) + self._active > cache.free_capacity:
            return
        none = experts[:0]
        kept = Lookup(resident_slots=there, missing=none, missing_slots=none, cold=there, rest=none)
        cache.hold(kept)
        try:
            self._ahead[layer] = self._begin(layer, missing)
        finally:
            cache.release(kept)

    def find(self, layer: int, experts: I32) -> Held:
        """Hold ``experts`` (ascending), which fit the slots, and begin to read missing ones."""
        held = self._begin(layer, experts)
        ahead = self._ahead.pop(layer, None)
        if ahead is not None:
            missing = ahead.found[0].missing
            used = int(np.equal(missing[:, None], experts).sum())
            self.prefetched += used
            self._unused += len(missing) - used
            held.found[:0], held.reads[:0] = ahead.found, ahead.reads
        return held

    def _begin(self, layer: int, experts: I32) -> Held:
        own = self._layers[layer]
        cache = own.group.cache
        found = cache.look_up(own.group.row_of[layer], experts)
        assert not len(found.rest), "more experts than slots are wanted"
        cache.hold(found)
        held = Held(layer, [found], [])
        if len(found.missing):
            try:
                own.group.touch_ahead(int(found.missing_slots.max()) + 1)
                own.put(found.missing, found.missing_slots)
                for file, numbers, inputs in own.by_file:
                    self._read(held.reads, own, found, file, numbers, inputs)
            except BaseException:
                self.abandon(held)
                raise
        return held

    def _read(
        self,
        reads: list[_Reads],
        own: _Layer,
        found: Lookup,
        file: int,
        numbers: list[int],
        inputs: int,
    ) -> None:
        """Begin to read matrices ``numbers``, which one file has, of the missing experts."""
        experts = found.missing
        places = found.missing_slots * np.int64(own.group.stride) + own.group.region.ctypes.data
        addresses = (own.starts[numbers] + places).reshape(-1)
        offsets, lengths, sizes = (
            table.take(experts, axis=1)[numbers].reshape(-1)
            for table in (own.firsts, own.lengths, own.needed)
        )
        batch = make_reads(file, offsets, addresses, lengths, sizes)
        batch.parts = tuple(slice(number, number + 1) for number in range(len(offsets)))
        reads.append(_Reads(batch, inputs * len(experts)))
        self.reads.submit(batch)

    def wait_inputs(self, held: Held) -> None:
        """Wait for all matrices of missing experts but the last; P532 for a cut file."""
        for own in held.reads:
            self._finish(own.batch, 0, own.inputs)

    def wait_outputs(self, held: Held) -> None:
        """Wait for the rest; P532 for a cut file."""
        for own in held.reads:
            self._finish(own.batch, own.inputs, len(own.batch.parts))

    def _finish(self, batch: ReadBatch, begin: int, end: int) -> None:
        if begin < end:
            self.reads.finish(batch, begin, end - begin)

    def list_missing(self, held: Held, experts: I32) -> Bits:
        """Which of ``experts`` [n] are on their way."""
        missing = np.concatenate([own.missing for own in held.found])
        found: Bits = np.equal(experts[:, None], missing).any(axis=1)
        return found

    def release(self, held: Held) -> None:
        for found in held.found:
            self._layers[held.layer].group.cache.release(found)

    def abandon(self, held: Held) -> None:
        own = self._layers[held.layer]
        for reads in held.reads:
            self.reads.engine.abandon(reads.batch)
        self.release(held)
        row = own.group.row_of[held.layer]
        for found in held.found:
            own.group.cache.forget(row, found.missing)

    @property
    def counters(self) -> tuple[int, int, int]:
        """Experts that were in memory when they were needed, that were not, and that made room."""
        own = [counters for group in self._groups for counters in group.cache.counters]
        return (
            sum(item.hits for item in own) - self.prefetched,
            sum(item.misses for item in own) - self._unused,
            sum(item.evictions for item in own),
        )

    def close(self) -> None:
        while self._ahead:
            self.abandon(self._ahead.popitem()[1])
        self.reads.close()
        for group in self._groups:
            group.close()


def _divide(
    layers: Mapping[int, Sequence[ExpertMatrix]],
    experts: int,
    region: U8,
    reads: SlotReads,
    loops: HostLoops,
) -> list[_Group]:
    """Layers by the sizes of their slots, each with its share of the region; all layers with the
    largest size where a group had too few slots."""
    by_sizes: dict[tuple[int, ...], list[int]] = {}
    for layer, matrices in layers.items():
        by_sizes.setdefault(tuple(matrix.size for matrix in matrices), []).append(layer)
    strides = {sizes: sum(map(count_slot_bytes, sizes)) for sizes in by_sizes}
    total = sum(strides[sizes] * len(own) for sizes, own in by_sizes.items())
    shares = [len(region) * strides[sizes] * len(own) // total for sizes, own in by_sizes.items()]
    least = 2 * max(reads.active, 2)
    enough = [
        share // strides[sizes] >= least for sizes, share in zip(by_sizes, shares, strict=True)
    ]
    if not all(enough):
        return [_Group(list(layers), _find_largest(layers), region, experts, reads, loops)]
    groups, begin = [], 0
    for (sizes, own), share in zip(by_sizes.items(), shares, strict=True):
        share = share // BLOCK * BLOCK
        groups.append(_Group(own, sizes, region[begin : begin + share], experts, reads, loops))
        begin += share
    return groups
