"""Main memory and limits of control groups, versions 1 and 2 (Linux admin-guide). The smallest
limit from this process's group to the root counts; missing groups set none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.arrays import U8

_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A group's limit on memory and what the group uses of it."""

    limit_bytes: int
    used_bytes: int
    """Used and not reclaimable at once: the page cache counts only where it is not written yet."""


def read_text(path: Path) -> str | None:
    """Text of a file of ``/proc`` or ``/sys``; None where it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """The whole number that is all of a file; None where there is none."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def find_cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that this process may use; None where nothing limits it."""
    quotas = []
    for group in list_groups(root, "cpu"):
        maximum = (read_text(group / "cpu.max") or "").split()
        if len(maximum) == 2 and maximum[0].isdigit() and int(maximum[1]) > 0:
            quotas.append(int(maximum[0]) / int(maximum[1]))
        quota_us = read_int(group / "cpu.cfs_quota_us")
        period_us = read_int(group / "cpu.cfs_period_us")
        if quota_us is not None and quota_us > 0 and period_us:
            quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def find_memory_limits(root: Path) -> list[MemoryLimit]:
    """All limits on this process's memory, its own group first."""
    limits = []
    for group in list_groups(root, "memory"):
        for limit_name, usage_name, prefix, unwritten in (
            ("memory.max", "memory.current", "", ("file_dirty", "file_writeback")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", ("dirty", "writeback")),
        ):
            limit_bytes = read_int(group / limit_name)
            if limit_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
                continue
            used_bytes = read_int(group / usage_name) or 0
            found = read_statistics(group / "memory.stat")
            # Locked pages are on neither list; files in memory (tmpfs) are not either.
            cached = [f"{prefix}{kind}_file" for kind in ("inactive", "active")]
            clean = sum(found.get(key, 0) for key in cached)
            clean -= sum(found.get(f"{prefix}{key}", 0) for key in unwritten)
            used_bytes = max(0, used_bytes - max(0, clean))
            limits.append(MemoryLimit(limit_bytes=limit_bytes, used_bytes=used_bytes))
    return limits


def list_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's groups for ``controller``, its own first, then their parents."""
    base = root / "sys/fs/cgroup"
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            mounts = [base, base / "unified"]
        elif controller in controllers.split(","):
            mounts = [base / controller, base / controllers]
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", ".", "..")]
        for mount in dict.fromkeys(mounts):
            for count in range(len(parts), -1, -1):
                group = mount.joinpath(*parts[:count])
                if group.is_dir():
                    yield group


def read_statistics(path: Path) -> dict[str, int]:
    """The numbers of a file of ``key value`` lines, as ``memory.stat`` is."""
    pairs = (line.split() for line in (read_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Sizes in bytes; 0 where the system does not say."""

    installed_bytes: int
    """Memory of the machine."""
    limit_bytes: int
    """Most that this process can ever have: installed memory, or less in a container."""
    available_bytes: int
    """Memory that is free now without swapping."""


def detect_memory(root: Path = Path("/")) -> Memory:
    """Read ``/proc/meminfo`` and the control groups, or ask ``sysconf`` where there are none."""
    sizes = read_sizes(root / "proc/meminfo")
    installed = sizes.get("MemTotal", 0) or _ask_sysconf("SC_PHYS_PAGES")
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0)) or _ask_sysconf(
        "SC_AVPHYS_PAGES"
    )
    limit = installed
    for group in find_memory_limits(root):
        limit = min(limit, group.limit_bytes)
        available = min(available, max(0, group.limit_bytes - group.used_bytes))
    return Memory(installed_bytes=installed, limit_bytes=limit, available_bytes=available)


def count_own_bytes(root: Path = Path("/")) -> int:
    """Memory of this process that no file backs."""
    pages = (read_text(root / "proc/self/statm") or "").split()[1:3]
    if len(pages) < 2 or not all(page.isdigit() for page in pages):
        return 0
    return max(0, int(pages[0]) - int(pages[1])) * os.sysconf("SC_PAGE_SIZE")


def read_sizes(path: Path) -> dict[str, int]:
    """Entries of ``/proc/meminfo``, or of ``/proc/self/status``, in bytes."""
    sizes = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return sizes


def _ask_sysconf(name: str) -> int:
    """Bytes of the pages that ``sysconf`` counts; 0 where it does not know them."""
    try:
        return max(0, os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


MEASURED_BYTES = 128 << 20
"""More than most caches; small weights, which caches hold, are read again and again."""


def measure_reads(arrays: Sequence[U8], threads: int) -> float | None:
    """Bytes per second at which so many threads read ``arrays``, the largest first: the best of
    three times; None if there are none."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    left, split = MEASURED_BYTES, []
    for array in sorted(arrays, key=len, reverse=True):
        split.append(np.array_split(array[:left].view(np.int8), threads))
        left -= min(left, len(array))
    if left == MEASURED_BYTES:
        return None
    again, taken_s = range(MEASURED_BYTES // (MEASURED_BYTES - left)), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(lambda *own: [x.max(initial=0) for _ in again for x in own], *split))
            taken_s.append(time.perf_counter() - start)
    return len(again) * (MEASURED_BYTES - left) / min(taken_s)
