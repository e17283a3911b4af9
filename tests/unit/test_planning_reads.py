"""How long a layer's missing neurons take to be read: `pi2.costs.reads`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pi2.costs.activity import MergedReads
from pi2.costs.constants import Flash, FlashPoint
from pi2.costs.reads import IoChoice, Reads, find_reads, list_io_choices

KIB = 1024
CALL_S, READ_S = 1e-3, 20e-6
"""Fixed part of a batch, and time of a read, of the device below."""


def rate(count: int, call_s: float = CALL_S, read_s: float = READ_S) -> float:
    """Bytes per second of ``count`` reads of 8 KiB."""
    return count * 8 * KIB / (call_s + count * read_s)


def make_flash() -> Flash:
    def point(value: float, **settings: Any) -> FlashPoint:
        return FlashPoint(pattern="random", block_bytes=8 * KIB, rate_bytes_s=value, **settings)

    return Flash(
        points=(
            point(rate(512), depth=128, threads=1, overlap=0.2),
            point(rate(128, 0.0, 160e-6), threads=1, overlap=0.9),
            point(rate(128, 0.0, 40e-6), threads=4, overlap=0.7),
            FlashPoint(pattern="sequential", block_bytes=1024 * KIB, rate_bytes_s=1e9),
        ),
        bursts=(
            point(rate(1, 0.0, 0.6e-3), depth=128, threads=1, burst=1),
            point(rate(16), depth=128, threads=1, burst=16),
        ),
        latency_s=70e-6,
        reader_penalty=0.0,
        block_bytes=512,
    )


def make_reads(
    engine: str, cluster: int = 64, flash: Flash | None = None, stride: int = 8 * KIB
) -> Reads:
    return find_reads(
        flash or make_flash(),
        stride,
        1 << 27,
        engine=engine,
        threads=4,
        depth=128,
        cluster=cluster,
        overlap=0.0,
    )


def choose_queue(flash: Flash, stride: int = 8 * KIB) -> IoChoice:
    return next(item for item in list_io_choices(flash, stride, 1 << 27) if item.depth == 128)


def test_many_reads_tell_the_time_of_each_and_few_the_fixed_part() -> None:
    queued = choose_queue(make_flash())
    assert queued.neuron_s == pytest.approx(READ_S + CALL_S / 512, rel=0.01)
    assert queued.time(16) == pytest.approx(CALL_S + 16 * READ_S, rel=0.01)


def test_fewer_reads_lie_between_those_and_a_single_one() -> None:
    queued = choose_queue(make_flash())
    assert queued.time(1) == pytest.approx(0.6e-3, rel=0.01), "as it was measured"
    times = [queued.time(count) for count in (1, 2, 8, 15, 16, 17)]
    assert times == sorted(times)


@pytest.mark.parametrize("stride", [7 * KIB, 8 * KIB, 12 * KIB])
@pytest.mark.parametrize("engine", ["io_uring", "pread"])
def test_a_better_figure_makes_no_batch_slower(engine: str, stride: int) -> None:
    usual = make_flash()
    for kind in ("points", "bursts"):
        for place, item in enumerate(getattr(usual, kind)):
            items = list(getattr(usual, kind))
            items[place] = replace(item, rate_bytes_s=2.0 * item.rate_bytes_s)
            changes: Any = {kind: tuple(items)}
            better = replace(usual, **changes)
            for missing in (1, 5, 30, 128, 1000):
                old, new = (
                    make_reads(engine, 64, x, stride).time(missing) for x in (usual, better)
                )
                assert new <= old * (1.0 + 1e-9), (item, missing)


def test_reads_of_other_blocks_follow_from_those_that_were_measured() -> None:
    usual = choose_queue(make_flash()).neuron_s
    smaller, larger = (choose_queue(make_flash(), size * KIB).neuron_s for size in (4, 64))
    assert smaller == pytest.approx(usual / 2), "the rate of the smallest block, but no more"
    assert larger == pytest.approx(usual + 56 * KIB / 1e9, rel=0.02), "the rest streams"


def test_small_reads_are_bound_by_latency_where_only_large_blocks_were_stated() -> None:
    """4 KiB at the rate of 128 KiB would be 2 us; a read takes 70, of which threads wait for some
    at a time."""
    points = tuple(
        FlashPoint(
            pattern="random", block_bytes=128 * KIB, rate_bytes_s=2e9, threads=threads, depth=depth
        )
        for threads, depth in ((1, None), (4, None), (1, 64))
    )
    flash = replace(make_flash(), points=points, bursts=())
    found = {
        (item.engine, item.threads): item.neuron_s
        for item in list_io_choices(flash, 4 * KIB, 1 << 27)
    }
    assert found["pread", 1] == pytest.approx(65.5e-6, rel=0.01), "no longer than the large block"
    assert found["pread", 4] == pytest.approx(70e-6 / 4)
    assert found["io_uring", 1] == pytest.approx(70e-6 / 32), "a storage does so many at a time"


def test_an_expert_is_read_in_requests_of_many_neurons() -> None:
    def point(block: int, rate_bytes_s: float) -> FlashPoint:
        return FlashPoint(
            pattern="random", block_bytes=block * KIB, rate_bytes_s=rate_bytes_s, threads=4
        )

    flash = replace(make_flash(), points=(point(4, 0.3e9), point(512, 2e9)), bursts=())
    reads = find_reads(
        flash,
        4 * KIB,
        1 << 27,
        engine="pread",
        threads=4,
        depth=1,
        cluster=64,
        overlap=1.0,
        run=128,
    )
    neurons = 8 * 768
    expected = neurons * 4 * KIB / 2e9
    assert reads.time(neurons) == pytest.approx(expected, rel=0.05)
    assert reads.merge_dense(neurons, 128 * 768) is None, "nothing else is read with them"


def test_a_batch_takes_its_fixed_part_and_its_reads() -> None:
    found = make_reads("io_uring")
    assert found.time(300) == pytest.approx(CALL_S + 300 * READ_S, rel=0.1)
    assert found.time(0) == 0.0


def test_neighbours_share_what_a_read_takes_once() -> None:
    reads = replace(make_reads("io_uring"), request_share=0.75)
    # A request for two neurons that are wanted, and one between them.
    merged = MergedReads(requests=0.5, unwanted=0.5)
    expected = CALL_S + 300 * READ_S * (0.5 * 0.75 + 1.5 * 0.25)
    assert reads.time(300, merged) == pytest.approx(expected, rel=0.1)


def test_longer_reads_tell_what_each_takes_once() -> None:
    def point(block: int, read_s: float) -> FlashPoint:
        rate_bytes_s = block * KIB / read_s
        return FlashPoint(pattern="random", block_bytes=block * KIB, rate_bytes_s=rate_bytes_s)

    # 12 us for a read and 1 us for a KiB.
    points = (point(8, 20e-6), point(32, 44e-6))
    flash = replace(make_flash(), points=points, bursts=())
    found = find_reads(
        flash, 8 * KIB, 1 << 27, engine="io_uring", threads=1, depth=128, cluster=64, overlap=0.0
    )
    assert found.request_share == pytest.approx(12 / 20, rel=0.01)


def test_threads_rest_where_there_are_fewer_parts_than_threads() -> None:
    times = [make_reads("pread", cluster).time(64) for cluster in (16, 32, 64)]
    assert times[0] == pytest.approx(64 * 40e-6, rel=0.05), "four parts for four threads"
    assert times[2] == pytest.approx(64 * 160e-6, rel=0.05), "one part"
    assert times[0] < times[1] < times[2]


def test_every_thread_that_is_woken_costs() -> None:
    one, many = (
        IoChoice(engine="pread", threads=threads, depth=128, neuron_s=40e-6, call_s=call_s)
        for threads, call_s in ((1, 0.4e-3), (16, 1.6e-3))
    )
    reads = Reads(engine="pread", threads=16, cluster=16, choices=(one, many), overlap=0.0)
    assert reads.time(8) == pytest.approx(0.4e-3 + 8 * 40e-6), "one part for one thread"
    assert 0.4e-3 < reads.time(64) - 64 * 40e-6 < 1.6e-3, "four parts"
    assert reads.time(512) == pytest.approx(1.6e-3 + 512 * 40e-6)


def test_every_engine_has_its_own_overlap() -> None:
    assert make_reads("io_uring").overlap == 0.2
    assert make_reads("pread").overlap == 0.7
