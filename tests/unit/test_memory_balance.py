"""Hot regions that grow and shrink by what is used, without reading what stays."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest

import pi2
from pi2.memory.balance import HotBalance
from pi2.memory.budget import PAGE, Budget
from pi2.memory.cache import NeuronCache
from pi2.memory.context import ContextMemory
from pi2.memory.flash import FlashReader
from pi2.memory.frequency import expect_uses
from pi2.memory.lending import ContextLoan
from pi2.memory.policy import ABSENT, PolicyName
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.unit.test_engine_forward import FP16, KV_ROUNDING, TOKENS, compute_error, run_plain

LAYERS, NEURONS, BAND, WINDOW = 4, 1024, 16, 32
USES = ((np.arange(NEURONS) + 0.5) / NEURONS) ** -0.6
USES = np.minimum(USES * 0.14 / USES.mean(), 1.0)
"""How likely a token uses each neuron, in an order by hotness."""
POLICIES = get_args(PolicyName)


class Runs:
    """A reader of long reads alone: what is read says whose it is."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []
        self.failing = False

    def start_run(self, layer: int, first: int, buffer: np.ndarray) -> Future[None]:
        done: Future[None] = Future()
        if self.failing:
            done.set_exception(OSError(5, "Input/output error"))
            return done
        indices = np.arange(first, first + len(buffer))
        buffer.view(np.int32)[:, 0], buffer.view(np.int32)[:, 1] = layer, indices
        self.read += [(layer, int(index)) for index in indices]
        done.set_result(None)
        return done


class Run:
    """Tokens that use neurons by chance, and a cache with a balance."""

    def __init__(self, hot: int, cold: int, policy: PolicyName = "lfu") -> None:
        arena = np.zeros((LAYERS * (NEURONS + hot) + cold, 8), np.uint8)
        self.cache = NeuronCache(
            arena,
            [hot] * LAYERS,
            NEURONS,
            policy=policy,
            expected=expect_uses(LAYERS, NEURONS),
            most_hot=[NEURONS] * LAYERS,
            cold=cold,
        )
        self.runs = Runs()
        for filling in self.cache.fill():
            self.write(filling.layer, filling.slots.start, filling.first, len(filling.slots))
        for layer, slots in enumerate(self.cache.hot_slots):
            self.write(layer, slots.start, 0, len(slots))
        self.balance = HotBalance(
            self.cache,
            cast(FlashReader, self.runs),
            tokens=WINDOW,
            band=BAND,
            least_cold=64,
        )
        self.chance = np.random.default_rng(0)

    def write(self, layer: int, slot: int, first: int, count: int) -> None:
        words = self.cache.arena.view(np.int32)
        words[slot : slot + count, 0] = layer
        words[slot : slot + count, 1] = np.arange(first, first + count)

    def use(self, tokens: int, uses: np.ndarray = USES) -> float:
        """Generate; every token sees what it should.  Returns the share of hits."""
        cache, found, named = self.cache, 0, 0
        words = cache.arena.view(np.int32)
        for _ in range(tokens):
            for layer in range(LAYERS):
                indices = np.flatnonzero(self.chance.random(NEURONS) < uses).astype(np.int32)
                lookup = cache.look_up(layer, indices)
                words[lookup.missing_slots, 0] = layer
                words[lookup.missing_slots, 1] = lookup.missing
                slots = cache._slot_of[layer, indices]
                assert (words[slots, 0] == layer).all() and (words[slots, 1] == indices).all()
                self.balance.note(layer, indices, len(lookup.resident_slots))
                found += len(lookup.resident_slots)
                named += len(indices)
            self.balance.end_token()
        return found / named

    def list_hot(self) -> list[int]:
        return [len(slots) for slots in self.cache.hot_slots]

    def count_slots(self) -> int:
        return sum(self.list_hot()) + self.cache.cold_capacity


@pytest.mark.parametrize("policy", POLICIES)
def test_hot_neurons_that_other_text_does_not_use_become_cold(policy: PolicyName) -> None:
    run = Run(hot=256, cold=1024, policy=policy)
    total = run.count_slots()
    before = run.use(WINDOW // 2, USES[::-1].copy())
    run.use(560, USES[::-1].copy())
    assert run.list_hot() == [0] * LAYERS
    assert run.use(50, USES[::-1].copy()) > before + 0.05
    assert run.count_slots() == total
    assert run.runs.read == [], "what became cold was in memory"
    assert (run.balance.shrunk, run.balance.grown) == (256 * LAYERS, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_neurons_that_are_used_often_and_are_there_become_hot(policy: PolicyName) -> None:
    run = Run(hot=0, cold=2048, policy=policy)
    total, resize = run.count_slots(), run.cache.resize_hot

    def resize_and_look(layer: int, end: int, **options: bool) -> Any:
        there = run.cache.find_slots(layer, 0, end) != ABSENT
        found = resize(layer, end, **options)
        assert found.missing.tolist() == np.flatnonzero(~there).tolist(), "and nothing else"
        return found

    run.cache.resize_hot = resize_and_look
    run.use(300)
    grown = sum(run.list_hot())
    assert grown == run.balance.grown - run.balance.shrunk > 4 * BAND
    assert run.count_slots() == total
    assert len(run.runs.read) < 0.1 * grown


def test_a_plan_whose_hot_neurons_are_well_chosen_is_left_alone() -> None:
    run = Run(hot=256, cold=1024)
    run.use(200)
    assert run.list_hot() == [256] * LAYERS


def test_what_could_not_be_read_is_not_there() -> None:
    run = Run(hot=0, cold=2048)
    for layer in range(LAYERS):
        run.cache.forget(layer, np.arange(3, 64, 20, dtype=np.int32))
    run.runs.failing = True
    with pytest.raises(OSError, match="Input/output"):
        # Neuron 3 is used by nobody, so that nothing has brought it back.
        run.use(300, np.where(np.arange(NEURONS) % 20 == 3, 0, USES))
    assert 0 <= max(run.list_hot()) <= BAND
    run.runs.failing = False
    run.use(100)


def test_hot_neurons_make_room_when_the_context_takes_its_memory_back() -> None:
    run = Run(hot=0, cold=2048)
    own, stride = 256, run.cache.arena.shape[1]
    memory = ContextMemory(total_bytes=(2048 - own) * stride + PAGE, context=640, runs=1)
    loan = ContextLoan(run.cache, memory, cold_slots=own, release=lambda: None, balance=run.balance)
    assert loan.count_slots(0) == 2048
    run.use(300)
    before, reads = sum(run.list_hot()), len(run.runs.read)
    assert before > 256, "more than the cold cache has for itself"
    for tokens in range(32, 641, 32):
        loan.claim(tokens)
        assert run.count_slots() <= own + memory.count_unused(tokens) // stride
        assert run.cache.cold_capacity >= 64
    assert sum(run.list_hot()) <= own - 64
    assert len(run.runs.read) == reads, "what stays is not read again"
    loan.begin()
    run.use(300)
    assert sum(run.list_hot()) > own, "and it grows again"
    assert run.count_slots() == 2048


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_memory_stays_below_what_was_charged_although_regions_move() -> None:
    layers, neurons, stride = 8, 2048, 7168
    hot, cold, band = 512, 6000, 32
    budget = Budget({"hot": layers * hot * stride, "cold": cold * stride})
    sizes = {"hot": layers * hot * stride, "cold": cold * stride}
    spare = band + 2 * layers * PAGE // stride + 1
    arena = budget.allocate_spanning(sizes, reserved_bytes=layers * neurons * stride)
    cache = NeuronCache(
        arena.reshape(-1, stride),
        [hot] * layers,
        neurons,
        most_hot=[neurons] * layers,
        cold=cold - spare,
        give_back=lambda part: budget.give_back(part, small_pages=True),
    )
    for layer in range(layers):
        cache.hot_bundles(layer)[:] = 1
        found = cache.look_up(layer, np.arange(hot, hot + cold // layers - 8, dtype=np.int32))
        cache.arena[found.missing_slots] = 2
    chance = np.random.default_rng(3)
    for step in range(60):
        layer = int(chance.integers(layers))
        now = len(cache.hot_slots[layer])
        count = min(max(0, now + int(chance.choice([-band, band]))), neurons)
        found = cache.resize_hot(layer, count)
        cache.arena[found.missing_slots] = 3
        if step % 20 == 19:
            resident = measure_resident(arena.ctypes.data, arena.nbytes)
            # At the end of the cold slots a page of 2 MiB may be used in part.
            assert 0.8 * sum(sizes.values()) < resident <= sum(sizes.values()) + (2 << 20)


def measure_resident(address: int, size: int) -> int:
    """Bytes of a region that are in memory: page by page, since the system counts neighbouring
    regions of a process as one."""
    pages = (ctypes.c_ubyte * -(-size // PAGE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0, ctypes.get_errno()
    return PAGE * sum(page & 1 for page in pages)


@pytest.mark.parametrize("look_ahead", ["none", "layer"])
def test_tokens_are_the_same_while_neurons_change_sides(tmp_path: Path, look_ahead: str) -> None:
    tiny = make_tiny(tmp_path, {**FP16, "shape": {"ffn": 256}})
    decode = {"predictor": "low-rank", "threshold": -1e9, "look_ahead": look_ahead}
    plan = write_plan(tmp_path, tiny, {"decode": decode, "layers": {"hot": 0.25}})
    cold = {"memory.segments.cold": f"{300 * 512} B"}
    with pi2.load(plan, set={"cache.rebalance": 3, **cold}) as model:
        cache, total = model._parts.cache, 3 * 64 + 300
        got = model.logits(TOKENS, mode="decode")
        assert compute_error(got, run_plain(tiny, TOKENS)) < KV_ROUNDING
        stats = model.stats
        # All neurons are named, so that hot ones are used more than cold slots, of which half miss.
        assert stats.hot_grown + stats.hot_shrunk > 0
        assert sum(len(slots) for slots in cache.hot_slots) + cache.cold_capacity < total
        # A prompt sees the same neurons.
        assert compute_error(model.logits(TOKENS), run_plain(tiny, TOKENS)) < KV_ROUNDING
