"""The budget: what of its memory lies in large pages."""

import sys
from pathlib import Path

import pytest

from pi2.arrays import U8
from pi2.memory.budget import HUGE_BYTES, Budget

SMAPS = Path("/proc/self/smaps")
SIZE = 64 << 20


def asks_for_huge_pages(array: U8) -> bool:
    """Whether the mapping that ``array`` begins in was advised to lie in pages of 2 MiB."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = begin <= array.ctypes.data < end
        elif inside and words[0] == "VmFlags:":
            return "hg" in words
    raise AssertionError("not mapped")


@pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="large pages are asked for where Linux has them",
)
@pytest.mark.parametrize("segment", ["attention", "predictor", "cold", "kv", "workspace"])
def test_weights_lie_in_large_pages_and_what_may_stay_empty_does_not(segment: str) -> None:
    budget = Budget({segment: 2 * SIZE})
    least = HUGE_BYTES.get(segment)
    large = budget.allocate(segment, SIZE if least is None else least)
    assert asks_for_huge_pages(large) == (segment in ("attention", "predictor", "cold"))
    if least is not None:
        assert not asks_for_huge_pages(budget.allocate(segment, least // 2))
