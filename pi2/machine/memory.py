"""Main memory: how much there is and how much this process may have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pi2.machine.cgroups import find_memory_limits, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Sizes in bytes; 0 where the system does not say."""

    installed_bytes: int
    """Memory of the machine."""
    limit_bytes: int
    """Most that this process can ever have: installed memory, or less in a container."""
    available_bytes: int
    """What is free for it now without swapping."""


def detect_memory(root: Path = Path("/")) -> Memory:
    """Read ``/proc/meminfo`` and the control groups, or ask ``sysconf`` where there are none."""
    sizes = _read_meminfo(root)
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
    """Memory that this process takes and no file gives back: it counts as used, and is part of what
    the process may have."""
    pages = (read_text(root / "proc/self/statm") or "").split()[1:3]
    if len(pages) < 2 or not all(page.isdigit() for page in pages):
        return 0
    return max(0, int(pages[0]) - int(pages[1])) * os.sysconf("SC_PAGE_SIZE")


def _read_meminfo(root: Path) -> dict[str, int]:
    """Entries of ``/proc/meminfo`` in bytes."""
    sizes = {}
    for line in (read_text(root / "proc/meminfo") or "").splitlines():
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
