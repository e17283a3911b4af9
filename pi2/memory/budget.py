"""The memory budget: every large array of a run comes from a segment of the plan."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import compare_bytes

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


KIB = 1024


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
    sizes = _read_sizes(root / "proc/self/status")
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


def _read_sizes(path: Path) -> dict[str, int]:
    """Sizes of ``/proc/self/status``, in bytes."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[0].isdigit() and words[1] == "kB":
            sizes[name] = int(words[0]) * KIB
    return sizes


PAGE = 4096
HUGE_BYTES: Mapping[str, int] = {"cold": 64 << 20, "attention": 4 << 20, "predictor": 4 << 20}
"""Least size of regions in pages of 2 MiB: smaller arenas would waste memory."""


class Budget:
    """Gives out zeroed, page-aligned memory by segment; pages cost nothing until written."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._used = dict.fromkeys(self._limits, 0)
        self._maps: list[mmap.mmap] = []
        self._is_locked = False
        self._segments: list[frozenset[str]] = []
        """Segments that each of them is charged to."""

    @property
    def used_bytes(self) -> Mapping[str, int]:
        """Bytes given out so far, by segment."""
        return self._used

    def remaining(self, segment: str) -> int:
        """Bytes that ``segment`` can still give."""
        return self._limits[segment] - self._used[segment]

    def charge(self, segment: str, size: int) -> None:
        """Count ``size`` bytes; UserError P610 if the segment cannot hold them."""
        if size > self.remaining(segment):
            need = self._used[segment] + size
            unit = segment.removeprefix("units.")
            is_unit = unit != segment
            key = f"memory.{segment}.budget" if is_unit else f"memory.segments.{segment}"
            needs, allowed = compare_bytes(need, self._limits[segment])
            raise UserError.of(
                "P610",
                f"{'unit' if is_unit else 'segment'} {unit!r} needs at least {needs} "
                f"({need} bytes), the plan allows {allowed}",
                help=f"raise {key}, and memory.budget if it is exceeded then",
            )
        self._used[segment] += size

    def allocate(self, segment: str, size: int) -> U8:
        """Return ``size`` zeroed bytes, page-aligned; UserError P610 as for ``charge``."""
        return self.allocate_spanning({segment: size})

    def allocate_spanning(self, sizes: Mapping[str, int], *, reserved_bytes: int = 0) -> U8:
        """One region charged to several segments, ``reserved_bytes`` longer than charged."""
        for segment, size in sizes.items():
            assert size >= 0
            self.charge(segment, size)
        size = sum(sizes.values()) + reserved_bytes
        length = max(size, 1)
        if sys.platform == "win32":
            region = mmap.mmap(-1, length)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            region = mmap.mmap(-1, length, flags=flags)
        least = min((HUGE_BYTES[name] for name in sizes if name in HUGE_BYTES), default=None)
        if sys.platform == "linux" and least is not None and length >= least:
            # With small pages, finding them takes the processor a fifth of the time that reading
            # neurons does, which lie all over the arena, and a twentieth with a matrix.
            region.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(region)
        self._segments.append(frozenset(sizes))
        return np.frombuffer(region, np.uint8, count=size)

    def adopt(self, segment: str, region: U8) -> U8:
        """Count ``region``, memory from elsewhere, and return it; UserError P610."""
        self.charge(segment, region.nbytes)
        return region

    def lock(self) -> str | None:
        """Keep all regions in memory once they are touched; return why that cannot be."""
        regions = [(_find_address(region), len(region)) for region in self._maps]
        problem = lock_regions(regions)
        self._is_locked = problem is None
        return problem

    def _unlock(self, region: mmap.mmap, first: int, size: int) -> None:
        if self._is_locked:
            unlock_region(_find_address(region) + first, size)

    def release(self, segment: str) -> None:
        """Return the regions of ``segment`` to the system, unless other segments share them; they
        are zeros then."""
        self._advise(segment, "MADV_DONTNEED")

    def use_small_pages(self, segment: str) -> None:
        """Let memory of ``segment`` come page by page, as it is touched, even if the system gives
        every process 2 MiB at once."""
        self._advise(segment, "MADV_NOHUGEPAGE")

    def _advise(self, segment: str, name: str) -> None:
        advice: int | None = getattr(mmap, name, None)
        if advice is not None:
            for region, segments in zip(self._maps, self._segments, strict=True):
                if segments == {segment}:
                    self._unlock(region, 0, len(region))
                    region.madvise(advice)

    def give_back(self, unused: U8) -> None:
        """Let the system have the memory of whole pages of ``unused``, a part of a region that
        this budget gave; its contents are lost."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        address, length = unused.ctypes.data, unused.nbytes
        for region in self._maps:
            start = address - _find_address(region)
            if 0 <= start < len(region):
                first = -(-start // PAGE) * PAGE
                last = (start + length) // PAGE * PAGE
                if last > first:
                    self._unlock(region, first, last - first)
                    region.madvise(mmap.MADV_DONTNEED, first, last - first)
                return
        raise AssertionError("not a region of this budget")


def _find_address(region: mmap.mmap) -> int:
    return int(np.frombuffer(region, np.uint8, count=1).ctypes.data)


def make_budget(resolved: ResolvedPlan) -> Budget:
    """Make the budget of the plan's segments and of the units other than the sparse one."""
    memory = resolved.plan.memory
    units = {f"units.{name}": unit.budget for name, unit in memory.units.items()}
    return Budget({**dict(memory.segments), **units})
