"""Compiled loops of the engine for its machine, for any backend."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from pi2.arrays import F32, F64, I32, I64, U8, U32, Raw
from pi2.formats.packing import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pi2.backends.compiler.runtime import Library
    from pi2.memory.io_engine import BundlePlaces
    from pi2.memory.read_sieve import ReadLimits


CheckInstruction = Literal["pclmulqdq", "crc32x"]
"""Instruction that CRC-32 is computed with (`pi2.backends.host.program`)."""
CHECKED_BYTES = 64
"""Bytes that it is computed of at a time."""

_NO_LIMITS = (0.0, 0.0, 0.0, 0.0)
FOUND = 8
"""Most numbers that a loop returns."""
MASSES = 3
"""Sums of scores that a look-up returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The loops are scalar code, except the checks: any machine of this architecture and system
    that has its instruction runs them."""

    program: ClassVar[str] = "pi2.backends.host.program"
    architecture: str = field(default_factory=platform.machine)
    system: str = field(default_factory=platform.system)
    checks: CheckInstruction | None = None
    """None where the processor has none: zlib is as fast then."""

    @property
    def mcpu(self) -> str | None:
        return None

    @property
    def mattr(self) -> tuple[str, ...]:
        """What LLVM calls the instruction for checks."""
        if self.checks is None:
            return ()
        return ("+pclmul",) if self.checks == "pclmulqdq" else ("+crc",)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> HostSpec:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def choose_checks(features: Set[str]) -> CheckInstruction | None:
    """The check instruction that ``features`` imply: AVX2 ``pclmulqdq``, ``dotprod`` ``crc32x``."""
    if "avx2" in features:
        return "pclmulqdq"
    return "crc32x" if "dotprod" in features else None


_RUNS = "vectors firsts counts offsets"
_PLAN = f"count base stride address gap scratch most pending indices slots {_RUNS} sizes requests"
_RING = "control words ring_slots pool results"
_TABLES = "candidates held slot_of owner use_counts scores used_at"
LOOPS: Mapping[str, tuple[str, str]] = {
    "unite_named": ("number neurons ends flat named united", "found"),
    "find_neurons": (
        "count room first_hot end_hot hot_slot size first_key first_cold clock listed_at weight "
        f"growth sieves least near zero allowance marks row indices {_TABLES} lists",
        "found masses",
    ),
    "place_neurons": (
        f"count size first_key first_cold clock listed_at weight missing {_TABLES} given",
        "found",
    ),
    "plan_reads": (f"{_PLAN} results", "found"),
    "read_runs": (f"fd start step requests_end {_RUNS} results", ""),
    "submit_reads": (f"{_PLAN} head first_name vectors_address {_RING}", "found"),
    "fill_entries": ("count head address first_name firsts counts offsets entries", ""),
    "drive_ring": (f"begin end pending {_RING}", "found"),
    "compute_checks": ("count stride arena slots checks", "table"),
}
"""What every call of a loop gives, in its order; and its arrays that stay the same."""


def _list_types(**names: str) -> dict[str, str]:
    return {name: kind for kind, own in names.items() for name in own.split()}


NUMBERS: Mapping[str, str] = _list_types(
    int64="base stride address scratch pending head first_name vectors_address clock listed_at",
    float64="weight growth allowance",
    float32="least near zero",
)
"""Types of numbers among them that are no int32."""
ARRAYS: Mapping[str, str] = _list_types(
    int32="ends flat united row indices candidates slot_of lists missing given slots firsts counts "
    "requests",
    int64="named owner used_at vectors offsets sizes results entries control ring_slots pool",
    float32="marks use_counts scores",
    uint8="held arena",
    uint32="words checks",
)
"""Types of arrays among them; the others are numbers."""
KEPT = {"found": ("int32", FOUND), "masses": ("float64", MASSES), "table": ("uint32", 256)}
"""Types and sizes of arrays that stay the same."""


class RingControl(IntEnum):
    """Index of each number that `HostLoops.drive_ring` uses.

    HEAD to DONE_TAIL are places of 32-bit words of the rings."""

    NAMED = 0
    """Name of the next request: those before have entries in the pool."""
    HANDED_OVER = 1
    """Name of the first one that has not been handed over."""
    DESCRIPTOR = 2
    DEPTH = 3
    """Most requests in flight."""
    LEAST_ROOM = 4
    """Room for so many is worth a system call that does not wait."""
    DEFERRED = 5
    """1 where completions are noted when the ring is asked for them only."""
    POOL_MASK = 6
    """Requests that the pool has room for, a power of two, less 1."""
    SLOT_MASK = 7
    DONE_MASK = 8
    """Entries of the rings, less 1."""
    EVENTS = 9
    """Word at which completions begin."""
    HEAD = 10
    TAIL = 11
    FLAGS = 12
    DONE_HEAD = 13
    DONE_TAIL = 14


class RingArrays(NamedTuple):
    """A ring and the pool of its requests: that named i is at place i mod p."""

    control: I64
    """By `RingControl`."""
    words: U32
    """[w], the memory of both rings."""
    slots: I64
    """[s, 8], the memory of submitted entries."""
    pool: I64
    """[p, 8] entries; one whose first word is 0 is left out."""
    results: I64
    """[p]."""


class LayerPlace(NamedTuple):
    row: I32
    """[neurons]: slots, or -1."""
    hot: slice
    """Neurons that are always in memory, from slot ``hot_slot`` on."""
    hot_slot: int
    first_key: int
    first_cold: int
    """Slot of the first cold neuron of all layers."""


@dataclass(slots=True)
class CacheTables:
    """What a cache knows of its keys and its cold slots."""

    counts: F32
    """[keys]: uses, of which later ones count more."""
    scores: F32
    """[cold]: use counts of the cached neurons."""
    used_at: I64
    """[cold]: the clock at the last use."""
    growth: float
    """What the weight of uses grows by, with each."""
    slot_of: I32
    """[keys]: slots, or -1."""
    owner: I64
    """[cold]: keys, or -1."""
    held: U8
    """[cold]: how many hold it: others are given away."""
    candidates: I32
    """Slots that are given away next, as they were listed at ``listed_at``."""
    listed_at: int = 0
    clock: int = 1
    weight: float = 1.0
    """What a use counts."""


class FoundNeurons(NamedTuple):
    """Places of the neurons that a layer needs, by four lists of the same room."""

    lists: I32
    """[4, n], flat: slots of those in memory, hot ones first; indices of missing ones; slots that
    these were given; the cold ones of all these slots, counted from the first cold one."""
    taken: int
    """Neurons that were looked for."""
    present: int
    """Those in memory."""
    hot: int
    """Hot ones among them."""
    missing: int
    placed: int
    """Missing ones that have a slot now."""
    seen: int
    """Candidates that were looked at."""
    left: int
    """Neurons that left their slots."""
    skipped: int
    """Neurons that were missing and not worth a read."""
    mass: float = 0.0
    """Mass of the neurons that were looked for, if scores were given."""
    left_out_mass: float = 0.0
    """Mass of skipped neurons."""
    tried_mass: float = 0.0
    """Mass of neurons that an unlimited allowance would have skipped."""


class HostLoops:
    """Compiled loops over the arrays of `pi2.memory`: the neuron cache, reads, io_uring's rings.
    They belong to no compute unit.

    Order of calls for the neurons that a layer needs, as `NeuronCache` and `FlashReader` make
    them::

        unite_named         neurons of each token of a step -> neurons of any token
        find_neurons        wanted neurons -> resident ones, missing ones, their slots
        place_neurons       more cold slots, once the candidates are used up
        plan_reads          places of their bytes -> requests
        read_runs           reads the requests, in threads of the reader;  or, with io_uring,
        submit_reads        places of bytes -> requests, their entries, and these to the kernel
        fill_entries        requests that were planned otherwise -> entries
        drive_ring          entries -> the kernel, completions -> results of the requests
        compute_checks      bundles read for the first time -> CRC-32

    Arrays are C-contiguous and have exactly the stated types. Numbers of neurons, keys and slots
    fit an int32; offsets, addresses and sizes are bytes. The caller owns every array that it
    passes, and loops keep none. A *key* is layer x neurons per layer + stored index; cold slots are
    counted from the first.

    `read_runs` and `compute_checks` may be called from any thread at any time, and release Python's
    lock. All other methods share a small array for their results: one thread at a time."""

    def __init__(self, library: Library) -> None:
        self._found: I32 = _align(np.zeros(FOUND, np.int32))
        self._masses: F64 = _align(np.zeros(MASSES, np.float64))
        self._table: U32 = _align(_list_remainders())
        own = {"found": self._found, "masses": self._masses, "table": self._table}
        bound = {name: library.wrap(array) for name, array in own.items()}
        calls = {
            name: library.bind(name, given, bound)
            for name, (given, _) in LOOPS.items()
            if name in library.signatures
        }
        self._unite, self._find = calls["unite_named"], calls["find_neurons"]
        self._place, self._plan = calls["place_neurons"], calls["plan_reads"]
        self._read, self._submit = calls["read_runs"], calls["submit_reads"]
        self._fill, self._drive = calls["fill_entries"], calls["drive_ring"]
        self._check = calls.get("compute_checks")

    def read_runs(
        self, fd: int, vectors: I64, firsts: I32, counts: I32, offsets: I64, results: I64
    ) -> None:
        """Read requests, one after the other: number i from byte ``offsets[i]`` on into the
        ``counts[i]`` vectors from ``firsts[i]`` on, each an address and a length of ``vectors``
        [v, 2]; ``results[i]`` becomes the bytes read, or -1 if the system reports an error."""
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
        """Find ``indices`` [n] (ascending) of a layer; end before the first cold one beyond
        ``room``. Give the missing ones slots as `place_neurons` does, as far as candidates go.
        Missing cold ones that are not worth a read by ``marks`` [neurons], if given, and ``limits``
        are left out, as `pi2.memory.read_sieve.ReadSieve.choose` does.

        Of cold ones in memory ``tables.weight`` is added to the counts, scores become these counts,
        and ``used_at`` the clock; of missing ones ``weight`` (1 + ``growth`` h) for h such."""
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
            *(row, indices, candidates if size else self._found, tables.held),
            *(tables.slot_of, tables.owner, tables.counts, scores, tables.used_at, lists),
        )
        return FoundNeurons(lists, *self._found.tolist(), *self._masses.tolist())

    def unite_named(self, lists: Sequence[I32], neurons: int) -> tuple[I32, I64]:
        """Return the neurons of at most 64 ``lists``, each once and ascending, and a number for
        each of all ``neurons``: its bit k is set if list k has the neuron."""
        united, named = np.empty(neurons, np.int32), np.zeros(neurons, np.int64)
        flat = np.concatenate(lists)
        if len(flat) == 0:
            return united[:0], named
        ends = np.cumsum([len(own) for own in lists], dtype=np.int32)
        self._unite(len(lists), neurons, ends, flat, named, united)
        return united[: self._found[0]], named

    def place_neurons(
        self, tables: CacheTables, place: LayerPlace, missing: I32, given: I32
    ) -> tuple[int, int, int]:
        """Give ``missing`` [m] those candidates, in their order, that have not been used since
        these were listed and are not held; write them to ``given`` [m].

        Brings ``slot_of`` and ``owner`` up to date, and counts uses as `find_neurons` does. Returns
        how many have a slot now, how many candidates were looked at, and how many neurons left."""
        sizes = (len(missing), len(tables.candidates))
        if 0 in sizes:
            return 0, 0, 0
        self._place(
            *(*sizes, place.first_key, place.first_cold),
            *(tables.clock, tables.listed_at, tables.weight),
            *(missing, tables.candidates, tables.held, tables.slot_of),
            *(tables.owner, tables.counts, tables.scores, tables.used_at, given),
        )
        placed, seen, left = self._found.tolist()[:3]
        return placed, seen, left

    def plan_reads(
        self, indices: I32, slots: I32, places: BundlePlaces
    ) -> tuple[I64, I32, I32, I64, I64, I32, I64]:
        """Plan reads of bundles ``indices`` [b] (ascending) into ``slots`` [b]: neighbours, and
        those with few others between them, are one request.

        Returns vectors [v, 2], firsts [n], counts [n] and offsets [n] as `read_runs` takes them;
        then bytes [n], the request of each bundle [b], and results [n], all pending."""
        arrays, results = _make_plan(len(indices), places), np.empty(len(indices), np.int64)
        if len(indices):
            flat = arrays[0].reshape(-1), *arrays[1:]
            self._plan(len(indices), *places, indices, slots, *flat, results)
        planned = _cut_plan(arrays, int(self._found[0]) if len(indices) else 0)
        return *planned, results[: len(planned[1])]

    def submit_reads(
        self,
        indices: I32,
        slots: I32,
        ring: RingArrays,
        places: BundlePlaces,
        *,
        head: int,
        first_name: int,
    ) -> tuple[ReadPlan, bool, bool]:
        """Plan reads of b bundles as `plan_reads` does, and write their entries into the pool from
        the request ``first_name`` on. Submit entries as `drive_ring` does, as far as there is room.

        Names are taken for b requests in neighbouring places of the pool. Requests that were joined
        to a neighbour's have entries whose first word is 0, and results that are 0. Returns
        vectors, firsts, counts, offsets, sizes and requests, whether a system call has failed, and
        whether entries wait."""
        arrays = _make_plan(len(indices), places)
        plan = (*places, indices, slots, arrays[0].reshape(-1), *arrays[1:])
        names = (head, first_name, arrays[0].ctypes.data)
        self._submit(len(indices), *plan, *names, *_flatten(ring))
        failed, _, waits, count = self._found.tolist()[:4]
        return _cut_plan(arrays, count), bool(failed), bool(waits)

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
        """Write entries of io_uring's ring, [n, 8], for n requests as `read_runs` takes
        them: ``head`` is the first word of each, names are ``first_name``, and so on."""
        if len(entries) == 0:
            return
        numbers = (len(entries), head, vectors.ctypes.data, first_name)
        self._fill(*numbers, firsts, counts, offsets, entries.reshape(-1))

    def drive_ring(
        self, ring: RingArrays, *, begin: int, end: int, pending: int
    ) -> tuple[bool, int, bool]:
        """Submit waiting entries to io_uring, as far as there is room; write results of finished
        ones; wait until none of ``results`` [begin, end) is ``pending``.

        Returns whether a system call has failed, which the caller has to explain; how many of these
        results are still pending, and whether entries wait."""
        self._drive(begin, end, pending, *_flatten(ring))
        failed, left, waits = self._found.tolist()[:3]
        return bool(failed), left, bool(waits)

    def compute_checks(self, arena: U8, slots: I32) -> U32 | None:
        """CRC-32 [n] (as `zlib.crc32`) of bundles ``slots`` [n] of ``arena`` [slots, stride]; None
        where the processor has no instruction for it."""
        stride = arena.shape[1]
        if self._check is None or stride % CHECKED_BYTES:
            return None
        checks = np.empty(len(slots), np.uint32)
        if len(slots):
            self._check(len(slots), stride, arena.reshape(-1), slots, checks)
        return checks


ReadPlan = tuple[I64, I32, I32, I64, I64, I32]
"""Vectors, firsts, counts, offsets, sizes and requests of `HostLoops.plan_reads`."""


def _make_plan(count: int, places: BundlePlaces) -> ReadPlan:
    """Room for a plan of ``count`` bundles."""
    vectors, requests = np.empty((count * (places.gap + 1), 2), np.int64), np.empty(count, np.int32)
    firsts, counts = np.empty(count, np.int32), np.empty(count, np.int32)
    return vectors, firsts, counts, np.empty(count, np.int64), np.empty(count, np.int64), requests


def _cut_plan(plan: ReadPlan, count: int) -> ReadPlan:
    """The part of a plan that its ``count`` requests have written."""
    vectors, firsts, counts, offsets, sizes, requests = plan
    return vectors, firsts[:count], counts[:count], offsets[:count], sizes[:count], requests


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
