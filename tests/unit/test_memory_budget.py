"""The budget: what of its memory lies in large pages; matrices that models share."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.memory.budget import HUGE_BYTES, Budget
from pi2.memory.matrix_pool import MatrixPlace, MatrixPool

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


def test_matrices_stay_until_their_last_user_leaves_and_a_shortage_spares_shared_ones() -> None:
    pool, size = MatrixPool(), 1 << 16
    region = Budget({"hot": 2 * size}).allocate("hot", 2 * size)
    region[:] = 7
    found = {MatrixPlace(0, 0, 0, at, size, False): region[at : at + size] for at in (0, size)}
    protected, lost = list[int](), list[UserError]()

    def protect() -> UserError | None:
        protected.append(len(pool.list_unshared(list(found.values()))))
        return lost[0] if lost else None

    first, second = ExitStack(), ExitStack()
    pool.add(found, first)
    pool.watch(protect, first)
    (place, other) = found
    assert pool.share([place, place._replace(changed_ns=1)], second)[place] is found[place]
    lost.append(UserError.of("P696", "memory is short"))
    with pytest.raises(UserError, match="P696"):
        pool.share([other], second)
    assert protected == [2, 1, 0]
    first.close()
    second.close()
    assert not region.any() and not pool.share(found, first)
    with ExitStack() as late:
        pool.add(found, late)
        region[:] = 7
        assert pool.share([place], second)
    assert region[:size].all() and not region[size:].any()
    second.close()
