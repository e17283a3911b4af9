"""The host loops as functions of a compiled library: see `pi2.backends.host.contract`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pi2.arrays import F32, I32, I64, U8, U32, Bits, Raw
from pi2.backends.compiler.runtime import ALIGNMENT, Library
from pi2.backends.host.spec import CHECKED_BYTES, FOUND


class CompiledLoops:
    """One call of a kernel per method; none where there is nothing to do, since kernels refuse
    the strides that numpy gives some empty arrays."""

    def __init__(self, library: Library) -> None:
        self._found: I32 = _align(np.zeros(FOUND, np.int32))
        found = {"found": library.wrap(self._found)}
        runs = "vectors firsts counts offsets"
        self._read = library.bind("read_runs", f"fd start step requests {runs} results")
        self._plan = library.bind(
            "plan_reads",
            f"count most base stride address pending indices slots {runs} sizes requests results",
            found,
        )
        self._fill = library.bind(
            "fill_entries", "count head address first_name firsts counts offsets entries"
        )
        self._note = library.bind(
            "note_results", "count head size number first_name events results", found
        )
        uses = "counts scores used_at"
        self._find = library.bind(
            "find_neurons",
            f"count first_key first_cold clock weight row indices {uses} cold missing",
            found,
        )
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
        self,
        fd: int,
        vectors: I64,
        firsts: I32,
        counts: I32,
        offsets: I64,
        results: I64,
        start: int,
        step: int,
    ) -> None:
        """Read requests with preadv."""
        flat = vectors.reshape(-1)
        self._read(fd, start, step, len(firsts), flat, firsts, counts, offsets, results)

    def find_neurons(
        self,
        row: I32,
        indices: I32,
        *,
        first_key: int,
        first_cold: int,
        clock: int,
        weight: float,
        counts: F32,
        scores: F32,
        used_at: I64,
    ) -> tuple[I32, I32]:
        """Divide ``indices`` into cold slots and what is missing."""
        count, found = len(indices), self._found
        if count == 0 or len(scores) == 0:
            return indices[:0], indices
        cold, missing = np.empty(count, np.int32), np.empty(count, np.int32)
        numbers = (count, first_key, first_cold, clock, weight)
        self._find(*numbers, row, indices, counts, scores, used_at, cold, missing)
        present = int(found[0])
        return cold[:present], missing[: count - present]

    def place_neurons(
        self,
        missing: I32,
        candidates: I32,
        held: Bits,
        given: I32,
        *,
        first_key: int,
        first_cold: int,
        clock: int,
        listed_at: int,
        weight: float,
        slot_of: I32,
        owner: I64,
        counts: F32,
        scores: F32,
        used_at: I64,
    ) -> tuple[int, int, int]:
        """Give candidates to what is missing."""
        sizes = (len(missing), len(candidates))
        if 0 in sizes:
            return 0, 0, 0
        numbers = (*sizes, first_key, first_cold, clock, listed_at, weight)
        arrays = (missing, candidates, held.view(np.uint8), slot_of, owner, counts, scores, used_at)
        self._place(*numbers, *arrays, given)
        placed, seen, left = self._found.tolist()
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
        """Plan reads of bundles into slots."""
        count = len(indices)
        vectors, requests = np.empty((count, 2), np.int64), np.empty(count, np.int32)
        firsts, counts = np.empty(count, np.int32), np.empty(count, np.int32)
        offsets, sizes, results = (np.empty(count, np.int64) for _ in range(3))
        if count == 0:
            return vectors, firsts, counts, offsets, sizes, requests, results
        numbers = (count, most, base, stride, address, pending)
        arrays = (vectors.reshape(-1), firsts, counts, offsets, sizes, requests, results)
        self._plan(*numbers, indices, slots, *arrays)
        n = int(self._found[0])
        return vectors, firsts[:n], counts[:n], offsets[:n], sizes[:n], requests, results[:n]

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
        """Write entries of io_uring."""
        if len(entries) == 0:
            return
        numbers = (len(entries), head, vectors.ctypes.data, first_name)
        self._fill(*numbers, firsts, counts, offsets, entries.reshape(-1))

    def note_results(
        self, events: I64, results: I64, *, head: int, count: int, first_name: int
    ) -> int:
        """Write results of completions of io_uring."""
        if count == 0 or len(results) == 0:
            return 0
        numbers = (count, head, len(events), len(results), first_name)
        self._note(*numbers, events.reshape(-1), results)
        return int(self._found[0])

    def compute_checks(self, arena: U8, slots: I32) -> U32 | None:
        """CRC-32 of bundles."""
        stride = arena.shape[1]
        if self._check is None or stride % CHECKED_BYTES:
            return None
        checks = np.empty(len(slots), np.uint32)
        if len(slots):
            self._check(len(slots), stride, arena.reshape(-1), slots, checks)
        return checks


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
