"""A run whose memory the system takes away gives the same text, as `memory.lock` says."""

import ctypes
from pathlib import Path

import pytest

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.memory import budget as locking
from pi2.memory.budget import Budget, read_pressure

PLAN = Path(__file__).resolve().parents[2] / "plans/demo.plan.toml"
PAGEOUT = 21
"""Advice with which the system takes pages away at once (MADV_PAGEOUT, Linux 5.4)."""


def take_memory(model: LoadedModel) -> None:
    """Take from the process what it has mapped and what its budget gave out."""
    library = ctypes.CDLL(None, use_errno=True)
    places = [(region.address, len(region)) for region in model._parts.budget._regions]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".arrow"):
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            places.append((first, last - first))
    for address, size in places:
        pages = -(-size // 4096) * 4096
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(pages), PAGEOUT)


@pytest.fixture(scope="module")
def expected() -> str:
    with pi2.load(PLAN) as model:
        return model.generate("def ", max_tokens=12).result.text


@pytest.mark.parametrize("lock", ["none", "locked", "re-read"])
def test_the_text_is_the_same_under_pressure(lock: str, expected: str) -> None:
    with pi2.load(PLAN, set={"memory.lock": lock}) as model:
        generation = model.generate("def ", max_tokens=12)
        pieces = []
        for piece in generation:
            take_memory(model)
            pieces.append(piece)
        assert "".join(pieces) == expected
        pressure = model.pressure
        assert pressure.major_faults is not None and pressure.major_faults >= 0
        if lock == "locked" and model.lock_fallback is None:
            assert pressure.locked_bytes is not None and pressure.locked_bytes >= 1 << 20


def test_weights_that_are_read_again_count_in_their_segments() -> None:
    used = []
    for lock in ("none", "re-read"):
        with pi2.load(PLAN, set={"memory.lock": lock}) as model:
            used.append(dict(model._parts.budget.used_bytes))
    # Copies begin at multiples of 64 bytes each.
    for name, size in used[0].items():
        assert abs(size - used[1][name]) <= 64 * 200, name


def test_memory_that_is_locked_can_be_given_back() -> None:
    budget = Budget({"hot": 1 << 20, "kv": 1 << 20})
    region = budget.allocate("hot", 1 << 20)
    region[:] = 1
    budget.allocate("kv", 1 << 20)[:] = 1
    if budget.lock() is not None:
        pytest.skip("this process may lock no memory")
    budget.give_back(region[1 << 19 :])
    assert region[0] == 1 and region[-1] == 0
    budget.release("kv")


def test_what_cannot_be_locked_is_left_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    answers = iter([None, "Cannot allocate memory: the limit"])
    monkeypatch.setattr(locking, "_lock", lambda address, size: next(answers))
    monkeypatch.setattr(locking, "unlock_region", lambda address, size: freed.append(address))
    assert locking.lock_regions([(4096, 1), (8192, 1), (12288, 1)]) is not None
    assert freed == [4096]


def test_a_system_that_does_not_tell_has_no_numbers(tmp_path: Path) -> None:
    pressure = read_pressure(tmp_path)
    assert (pressure.swapped_bytes, pressure.locked_bytes) == (None, None)
    assert pressure.major_faults is not None
