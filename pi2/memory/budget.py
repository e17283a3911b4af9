"""The memory budget: every large array of a run comes from a segment of the plan."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.machine.memory import read_sizes
from pi2.plan.documents.quantities import compare_bytes
from pi2.plan.weights.layout import round_up

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan

_ON_FAULT = 1
"""MLOCK_ONFAULT: pages are locked when they are touched, and take no memory before."""


def lock_regions(regions: Sequence[tuple[int, int]]) -> str | None:
    """Lock regions, address and bytes each; return why that cannot be, and lock none then."""
    for number, (address, size) in enumerate(regions):
        problem = _lock(address, size)
        if problem is not None:
            for locked in regions[:number]:
                unlock_region(*locked)
            return problem
    return None


def unlock_region(address: int, size: int) -> None:
    """Let the system take the pages of a region; nothing happens to one that is not locked."""
    library = _load_library()
    if library is not None:
        library.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size))


def _load_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.mlock, library.munlock  # noqa: B018 - not every system has them
    except (OSError, AttributeError):
        return None
    return library


def _lock(address: int, size: int) -> str | None:
    library = _load_library()
    if library is None:
        return "this system has no mlock"
    place, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    code = errno.ENOSYS
    if hasattr(library, "mlock2"):
        code = 0 if library.mlock2(place, length, _ON_FAULT) == 0 else ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        code = 0 if library.mlock(place, length) == 0 else ctypes.get_errno()
    if code == 0:
        return None
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return f"{os.strerror(code)}: the limit of locked memory (ulimit -l) is lower"
    return os.strerror(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The state at a moment."""

    major_faults: int | None
    """Pages so far that had to be read from a file, or from swap."""
    swapped_bytes: int | None
    """Memory of this process in swap now; on phones that is compressed memory (zram)."""
    locked_bytes: int | None
    """Memory that cannot be taken."""


def read_pressure(root: Path = Path("/")) -> Pressure:
    """Ask the system; ``root`` has ``proc``."""
    sizes = read_sizes(root / "proc/self/status")
    return Pressure(
        major_faults=_count_major_faults(),
        swapped_bytes=sizes.get("VmSwap"),
        locked_bytes=sizes.get("VmLck"),
    )


def _count_major_faults() -> int | None:
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    except (ImportError, OSError):
        return None


PAGE = 4096
HUGE_BYTES: Mapping[str, int] = {"cold": 64 << 20, "attention": 4 << 20, "predictor": 4 << 20}
"""Least size of regions in pages of 2 MiB: smaller arenas would waste memory."""
_FILLED_BYTES = 4 << 20
"""The same of regions that are filled to their end."""
_POOL_BYTES = 256 << 10
"""Regions that arrays of less than a page share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUse:
    """Memory of a segment."""

    stated_bytes: int
    allocated_bytes: int | None
    """Given out; None for the segment ``runtime``, of which nothing is given out."""
    taken_bytes: int | None
    """In memory now, in pages as the system counts them; None where it does not tell."""


@dataclass(frozen=True, slots=True)
class _Region:
    memory: mmap.mmap
    segments: tuple[tuple[str, int], ...]
    """Segments that are charged, and the bytes of each, one after the other."""

    @property
    def address(self) -> int:
        return int(np.frombuffer(self.memory, np.uint8, count=1).ctypes.data)

    def __len__(self) -> int:
        return len(self.memory)


class Budget:
    """Gives out zeroed memory by segment; pages cost nothing until written.

    Weights, slots and rings get pages of 2 MiB, which are quicker to find.  Everything else gets
    small ones, also where the system's setting is ``always``: a KV cache is filled here and there,
    and each touch of a large page would take 2 MiB."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._used = dict.fromkeys(self._limits, 0)
        self._regions: list[_Region] = []
        self._pools: dict[str, U8] = {}
        """The rest of the last pool of each segment."""
        self._adopted: list[tuple[str, U8]] = []
        self._is_locked = False

    @property
    def used_bytes(self) -> Mapping[str, int]:
        """Bytes given out so far, by segment."""
        return self._used

    def charge(self, segment: str, size: int) -> None:
        """Count ``size`` bytes.  Needs of a plan's segments are known before anything is given
        out: more is a programmer's fault.  UserError P610 where a unit's own memory is short."""
        assert size >= 0
        stated, taken = self._limits.get(segment, 0), self._used.get(segment, 0)
        if taken + size > stated and segment.startswith("units."):
            needs, allowed = compare_bytes(taken + size, stated)
            raise UserError.of(
                "P610",
                f"unit {segment.removeprefix('units.')!r} needs at least {needs} "
                f"({taken + size} bytes), the plan allows {allowed}",
                help=f"raise memory.{segment}.budget, and memory.budget if it is exceeded then",
            )
        assert taken + size <= stated, (
            f"segment {segment!r}: {stated} bytes are stated, {taken} taken, {size} more wanted"
        )
        self._used[segment] = taken + size

    def allocate(self, segment: str, size: int, *, is_filled: bool = False) -> U8:
        """Return ``size`` zeroed bytes that begin at a page, or at a cache line where they are less
        than one; ``is_filled``: all of them will be written."""
        if size >= PAGE:
            return self.allocate_spanning({segment: size}, is_filled=is_filled)
        self.charge(segment, size)
        if len(pool := self._pools.get(segment, _NOTHING)) < size:
            pool = self._map(((segment, _POOL_BYTES),), _POOL_BYTES, is_huge=False)
        self._pools[segment] = pool[round_up(size, 64) :]
        return pool[:size]

    def allocate_spanning(
        self, sizes: Mapping[str, int], *, reserved_bytes: int = 0, is_filled: bool = False
    ) -> U8:
        """One region charged to several segments, ``reserved_bytes`` longer than charged."""
        for segment, size in sizes.items():
            self.charge(segment, size)
        length = max(sum(sizes.values()) + reserved_bytes, 1)
        least = min((HUGE_BYTES[name] for name in sizes if name in HUGE_BYTES), default=length + 1)
        is_huge = length >= (_FILLED_BYTES if is_filled else least)
        return self._map(tuple(sizes.items()), length, is_huge=is_huge)[
            : sum(sizes.values()) + reserved_bytes
        ]

    def _map(self, segments: tuple[tuple[str, int], ...], length: int, *, is_huge: bool) -> U8:
        if sys.platform == "win32":
            region = mmap.mmap(-1, length)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            region = mmap.mmap(-1, length, flags=flags)
        if sys.platform == "linux":
            # With small pages, finding them takes the processor a fifth of the time that reading
            # neurons does, which lie all over the arena, and a twentieth with a matrix.
            with suppress(OSError):  # a system without large pages
                region.madvise(mmap.MADV_HUGEPAGE if is_huge else mmap.MADV_NOHUGEPAGE)
        self._regions.append(_Region(region, segments))
        return np.frombuffer(region, np.uint8)

    def adopt(self, segment: str, region: U8) -> U8:
        """Count ``region``, memory from elsewhere, and return it."""
        self.charge(segment, region.nbytes)
        self._adopted.append((segment, region))
        return region

    def measure(self) -> dict[str, SegmentUse]:
        """Return the memory that each segment has now; empty ones are left out."""
        taken: dict[str, int | None] = dict.fromkeys(self._limits, 0)

        def add(segment: str, address: int, size: int) -> None:
            found, before = _count_pages(address, size), taken[segment]
            taken[segment] = None if found is None or before is None else before + found

        for region in self._regions:
            place, end = region.address, region.address + len(region)
            for number, (segment, size) in enumerate(region.segments, 1):
                last = number == len(region.segments)
                add(segment, place, end - place if last else size)
                place += size
        for segment, array in self._adopted:
            add(segment, array.ctypes.data, array.nbytes)
        return {
            name: SegmentUse(
                stated_bytes=stated, allocated_bytes=self._used[name], taken_bytes=taken[name]
            )
            for name, stated in self._limits.items()
            if stated or self._used[name]
        }

    def lock(self) -> str | None:
        """Keep all regions in memory once they are touched; return why that cannot be."""
        regions = [(region.address, len(region)) for region in self._regions]
        problem = lock_regions(regions)
        self._is_locked = problem is None
        return problem

    def _drop(self, address: int, size: int) -> None:
        """Let the system have the whole pages of a range, whose contents are lost."""
        first, end = _find_pages(address, address + size)
        if self._is_locked and first < end:
            unlock_region(first, end - first)
        drop_pages(first, end)

    def release(self, segment: str) -> None:
        """Return the regions of ``segment`` to the system, unless other segments share them; they
        are zeros then."""
        for region in self._regions:
            if {name for name, _ in region.segments} == {segment}:
                self._drop(region.address, round_up(len(region), PAGE))

    def drop(self, *, but: str | None = None) -> None:
        """Return all memory to the system, except for segment ``but``: nothing reads or writes it
        any more."""
        for region in self._regions:
            if {name for name, _ in region.segments} != {but}:
                self._drop(region.address, round_up(len(region), PAGE))
        for segment, array in self._adopted:
            if segment != but:
                drop_pages(array.ctypes.data, array.ctypes.data + array.nbytes)

    def give_back(self, unused: U8) -> None:
        """Let the system have the memory of whole pages of ``unused``, a part of a region that
        this budget gave; its contents are lost."""
        self._drop(unused.ctypes.data, unused.nbytes)


def _find_pages(address: int, end: int) -> tuple[int, int]:
    """Return the whole pages of a range."""
    return -(-address // PAGE) * PAGE, end // PAGE * PAGE


def drop_pages(address: int, end: int) -> None:
    """Let the system have the whole pages of a range: pages of a file are read from it again."""
    first, end = _find_pages(address, end)
    if first >= end or not hasattr(mmap, "MADV_DONTNEED"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "madvise"):
        library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


_NOTHING: U8 = np.zeros(0, np.uint8)
_PRESENT = np.uint64(63)
"""Bit of an entry of the page map: a page is in memory."""


def _count_pages(address: int, size: int) -> int | None:
    """Bytes of the pages that begin in this range and that this process has in memory; None where
    the system does not tell."""
    first, end = (-(-place // mmap.PAGESIZE) for place in (address, address + size))
    found = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(8 * first)
            while first < end:
                entries = np.frombuffer(file.read(8 * min(end - first, 8192)), np.uint64)
                if not len(entries):
                    return None
                found += int(np.count_nonzero(entries >> _PRESENT))
                first += len(entries)
    except (OSError, ValueError):
        return None
    return found * mmap.PAGESIZE


def make_budget(resolved: ResolvedPlan) -> Budget:
    """Make the budget of the plan's segments and of the units other than the sparse one."""
    memory = resolved.plan.memory
    units = {f"units.{name}": unit.budget for name, unit in memory.units.items()}
    return Budget({**dict(memory.segments), **units})
