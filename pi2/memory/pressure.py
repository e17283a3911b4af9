"""What the system has taken from this process: pages that were read again, memory that is swapped.

Numbers are None where the system does not tell, as some Android kernels do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What is known at a moment."""

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
