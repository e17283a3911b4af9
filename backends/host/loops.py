"""The host loops as functions of a compiled library: see `pi2.memory.host_loops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.arrays import F32, F64, I32, I64, U8, U32, Raw
from pi2.backends.compiler.runtime import ALIGNMENT, Library
from pi2.memory.host_loops import CHECKED_BYTES, FOUND, MASSES, FoundNeurons

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pi2.memory.host_loops import BundlePlaces, CacheTables, LayerPlace, RingArrays
    from pi2.memory.read_sieve import ReadLimits

_NO_LIMITS = (0.0, 0.0, 0.0, 0.0)


class CompiledLoops:
    """One kernel call per method; skipped for empty arrays, whose strides kernels refuse."""

    def __init__(self, library: Library) -> None:
        self._found: I32 = _align(np.zeros(FOUND, np.int32))
        self._masses: F64 = _align(np.zeros(MASSES, np.float64))
        found = {"found": library.wrap(self._found)}
        runs = "vectors firsts counts offsets"
        plan = f"count most base stride address indices slots {runs} sizes requests"
        self._read = library.bind("read_runs", f"fd start step requests {runs} results")
        self._plan = library.bind("plan_reads", f"{plan} pending results", found)
        self._submit = library.bind(
            "submit_reads",
            f"{plan} pending head first_name vectors_address control words ring_slots pool results",
            found,
        )
        self._fill = library.bind(
            "fill_entries", "count head address first_name firsts counts offsets entries"
        )
        self._drive = library.bind(
            "drive_ring", "begin end pending control words slots pool results", found
        )
        uses = "counts scores used_at"
        self._find = library.bind(
            "find_neurons",
            "count room first_hot end_hot hot_slot size first_key first_cold clock listed_at "
            "weight growth sieves least beside zero allowance "
            f"marks row indices candidates held slot_of owner {uses} lists",
            {**found, "masses": library.wrap(self._masses)},
        )
        self._unite = library.bind("unite_named", "lists neurons ends flat named united", found)
        self._place = library.bind(
            "place_neurons",
            "count size first_key first_cold clock listed_at weight "
            f"missing candidates held slot_of owner {uses} given",
            found,
        )
        self._check = None
        self._table: U32 = _align(_list_remainders())
        if "compute_checks" in library.signatures:
            table = {"table": library.wrap(self._table)}
            self._check = library.bind("compute_checks", "count stride arena slots checks", table)

    def read_runs(
        self, fd: int, vectors: I64, firsts: I32, counts: I32, offsets: I64, results: I64
    ) -> None:
        flat = vectors.reshape(-1)
        self._read(fd, 0, 1, len(firsts), flat, firsts, counts, offsets, results)

    def find_neurons(
        self,
        tables: CacheTables,
        place: LayerPlace,
        indices: I32,
        room: int,
        marks: F32 | None = None,
        limits: ReadLimits | None = None,
    ) -> FoundNeurons:
        count = len(indices)
        lists = np.empty(4 * count, np.int32)
        row, hot, hot_slot, first_key, first_cold = place
        scores, candidates = tables.scores, tables.candidates
        if count == 0 or len(scores) == 0:
            # No cold slots: what is not hot finds no room.
            first, end = np.searchsorted(indices, (hot.start, hot.stop)).tolist()
            taken = 0 if first else end
            np.add(indices[:taken], np.int32(hot_slot - hot.start), out=lists[:taken])
            return FoundNeurons(lists, taken, taken, taken, 0, 0, 0, 0, 0)
        size = len(candidates)
        if marks is None or limits is None:
            sieve: tuple[Any, ...] = (0, *_NO_LIMITS, tables.counts)
        else:
            sieve = (1, *limits, marks)
        self._find(
            *(count, room, hot.start, hot.stop, hot_slot, size, first_key, first_cold),
            *(tables.clock, tables.listed_at, tables.weight, tables.growth),
            *sieve,
            *(row, indices, candidates if size else self._found, tables.held.view(np.uint8)),
            *(tables.slot_of, tables.owner, tables.counts, scores, tables.used_at, lists),
        )
        return FoundNeurons(lists, *self._found.tolist(), *self._masses.tolist())

    def unite_named(self, lists: Sequence[I32], named: I64) -> I32:
        united = np.empty(len(named), np.int32)
        flat = np.concatenate(lists)
        if len(flat) == 0:
            named[:] = 0
            return united[:0]
        ends = np.cumsum([len(own) for own in lists], dtype=np.int32)
        self._unite(len(lists), len(named), ends, flat, named, united)
        return united[: self._found[0]]

    def place_neurons(
        self, tables: CacheTables, place: LayerPlace, missing: I32, given: I32
    ) -> tuple[int, int, int]:
        sizes = (len(missing), len(tables.candidates))
        if 0 in sizes:
            return 0, 0, 0
        self._place(
            *(*sizes, place.first_key, place.first_cold),
            *(tables.clock, tables.listed_at, tables.weight),
            *(missing, tables.candidates, tables.held.view(np.uint8), tables.slot_of),
            *(tables.owner, tables.counts, tables.scores, tables.used_at, given),
        )
        placed, seen, left = self._found.tolist()[:3]
        return placed, seen, left

    def plan_reads(
        self,
        indices: I32,
        slots: I32,
        *,
        most: int,
        base: int,
        stride: int,
        address: int,
        pending: int,
    ) -> tuple[I64, I32, I32, I64, I64, I32, I64]:
        count = len(indices)
        vectors, requests = np.empty((count, 2), np.int64), np.empty(count, np.int32)
        firsts, counts = np.empty(count, np.int32), np.empty(count, np.int32)
        offsets, sizes, results = (np.empty(count, np.int64) for _ in range(3))
        if count == 0:
            return vectors, firsts, counts, offsets, sizes, requests, results
        numbers = (count, most, base, stride, address)
        arrays = (vectors.reshape(-1), firsts, counts, offsets, sizes, requests)
        self._plan(*numbers, indices, slots, *arrays, pending, results)
        n = int(self._found[0])
        return vectors, firsts[:n], counts[:n], offsets[:n], sizes[:n], requests, results[:n]

    def submit_reads(
        self,
        indices: I32,
        slots: I32,
        ring: RingArrays,
        bundles: BundlePlaces,
        *,
        head: int,
        first_name: int,
    ) -> tuple[tuple[I64, I32, I32, I64, I64, I32], bool, bool]:
        count = len(indices)
        vectors, requests = np.empty((count, 2), np.int64), np.empty(count, np.int32)
        firsts, counts = np.empty(count, np.int32), np.empty(count, np.int32)
        offsets, sizes = np.empty(count, np.int64), np.empty(count, np.int64)
        plan = (indices, slots, vectors.reshape(-1), firsts, counts, offsets, sizes, requests)
        names = (bundles.pending, head, first_name, vectors.ctypes.data)
        self._submit(count, *bundles[:4], *plan, *names, *_flatten(ring))
        failed, _, waits, n = self._found.tolist()[:4]
        arrays = (vectors, firsts[:n], counts[:n], offsets[:n], sizes[:n], requests)
        return arrays, bool(failed), bool(waits)

    def fill_entries(
        self,
        entries: I64,
        *,
        head: int,
        first_name: int,
        vectors: I64,
        firsts: I32,
        counts: I32,
        offsets: I64,
    ) -> None:
        if len(entries) == 0:
            return
        numbers = (len(entries), head, vectors.ctypes.data, first_name)
        self._fill(*numbers, firsts, counts, offsets, entries.reshape(-1))

    def drive_ring(
        self, ring: RingArrays, *, begin: int, end: int, pending: int
    ) -> tuple[bool, int, bool]:
        self._drive(begin, end, pending, *_flatten(ring))
        failed, left, waits = self._found.tolist()[:3]
        return bool(failed), left, bool(waits)

    def compute_checks(self, arena: U8, slots: I32) -> U32 | None:
        stride = arena.shape[1]
        if self._check is None or stride % CHECKED_BYTES:
            return None
        checks = np.empty(len(slots), np.uint32)
        if len(slots):
            self._check(len(slots), stride, arena.reshape(-1), slots, checks)
        return checks


def _flatten(ring: RingArrays) -> tuple[Raw, ...]:
    control, words, slots, pool, results = ring
    return control, words, slots.reshape(-1), pool.reshape(-1), results


def _align(array: Raw) -> Any:
    """Return a copy [n] that begins where functions assume bound arrays to begin."""
    room = np.zeros(array.nbytes + ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    copy = room[first : first + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def _list_remainders() -> U32:
    """What each byte leaves of CRC-32's polynomial, uint32 [256], bits reversed."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0xEDB88320), values >> 1)
    return values
