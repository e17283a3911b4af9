"""Memory bandwidth shared between units."""

from __future__ import annotations

import pytest
import simpy

from pi2.simulate.bus import Bus, UnitName


def run_transfers(transfers: list[tuple[UnitName, float, float]]) -> tuple[Bus, list[float]]:
    """Start transfers (unit, bytes, start) on a bus of 40 + 50, 60 together; return their ends."""
    env = simpy.Environment()
    bus = Bus(env, shared_bytes_s=60.0)
    rates = {"cpu": 40.0, "dense": 50.0}
    ends = [0.0] * len(transfers)

    def transfer(index: int, unit: UnitName, size: float, start: float):  # type: ignore[no-untyped-def]
        yield env.timeout(start)
        yield bus.work(unit, size / rates[unit], bytes_s=rates[unit])
        ends[index] = env.now

    for index, (unit, size, start) in enumerate(transfers):
        env.process(transfer(index, unit, size, start))
    env.run()
    return bus, ends


def test_one_unit_alone_has_its_own_rate() -> None:
    assert run_transfers([("cpu", 80.0, 0.0)])[1] == pytest.approx([2.0])
    assert run_transfers([("dense", 80.0, 0.0)])[1] == pytest.approx([1.6])


def test_two_units_share_what_both_together_reach() -> None:
    # 40 and 50 wished, 60 had: 26.67 and 33.33; both end after 3 s
    ends = run_transfers([("cpu", 80.0, 0.0), ("dense", 100.0, 0.0)])[1]
    assert ends == pytest.approx([3.0, 3.0])


def test_two_transfers_of_a_unit_share_its_rate() -> None:
    assert run_transfers([("cpu", 40.0, 0.0), ("cpu", 40.0, 0.0)])[1] == pytest.approx([2.0, 2.0])


def test_what_is_left_goes_on_faster_when_the_other_has_ended() -> None:
    # together 26.67 and 33.33 B/s until the CPU has moved its 26.67 at 1 s
    ends = run_transfers([("cpu", 26.0 + 2.0 / 3.0, 0.0), ("dense", 83.0 + 1.0 / 3.0, 0.0)])[1]
    assert ends == pytest.approx([1.0, 2.0])


def test_a_transfer_that_begins_later_slows_the_first_one() -> None:
    ends = run_transfers([("cpu", 80.0, 0.0), ("dense", 33.0 + 1.0 / 3.0, 1.0)])[1]
    assert ends[1] == pytest.approx(2.0)
    assert ends[0] == pytest.approx(2.0 + (40.0 - 80.0 / 3.0) / 40.0)


def test_the_meter_counts_bytes_and_time() -> None:
    bus, ends = run_transfers([("cpu", 80.0, 0.0), ("dense", 100.0, 0.0), ("cpu", 7.0, 5.0)])
    meter = bus.meter
    assert (meter.cpu_bytes, meter.dense_bytes) == (87.0, 100.0)
    assert meter.cpu_s == pytest.approx(3.0 + 7.0 / 40.0)
    assert meter.dense_s == pytest.approx(3.0)
    assert max(ends) == pytest.approx(5.0 + 7.0 / 40.0)


def test_no_rate_is_ever_above_the_limit() -> None:
    transfers: list[tuple[UnitName, float, float]] = [
        ("cpu", 10.0 * (i + 1), 0.1 * i) for i in range(5)
    ] + [("dense", 15.0 * (i + 1), 0.17 * i) for i in range(4)]
    bus, ends = run_transfers(transfers)
    total = bus.meter.cpu_bytes + bus.meter.dense_bytes
    assert total / max(ends) <= 60.0 + 1e-9
    assert bus.meter.cpu_bytes / bus.meter.cpu_s <= 40.0 + 1e-9
    assert bus.meter.dense_bytes / bus.meter.dense_s <= 50.0 + 1e-9


@pytest.mark.parametrize(("overlap", "seconds"), [(1.0, 1.0), (0.5, 1.5), (0.0, 2.0)])
def test_reading_takes_from_the_cores_what_it_does_not_hide(overlap: float, seconds: float) -> None:
    """A second of computing, and a read of a second that begins with it."""
    env = simpy.Environment()
    bus = Bus(env, shared_bytes_s=1e9, read_overlap=overlap)
    reading = bus.read(1.0, 1e6)
    env.run(until=bus.work("cpu", 1.0, bytes_s=1e9))
    assert env.now == pytest.approx(seconds)
    env.run(until=reading)
    assert env.now == pytest.approx(seconds)
    assert bus.meter.read_bytes == 1e6


@pytest.mark.parametrize(("compute_s", "read_s"), [(1.0, 3.0), (3.0, 1.0)])
def test_of_the_shorter_one_of_reading_and_computing_a_part_is_saved(
    compute_s: float, read_s: float
) -> None:
    env = simpy.Environment()
    bus = Bus(env, shared_bytes_s=1e9, read_overlap=0.6)
    both = [bus.read(read_s, 1.0), bus.work("cpu", compute_s)]
    env.run(until=env.all_of(both))
    assert env.now == pytest.approx(4.0 - 0.6 * 1.0)


def test_a_thread_of_several_uses_its_share_of_the_unit() -> None:
    env = simpy.Environment()
    bus = Bus(env, shared_bytes_s=60.0)
    env.run(until=bus.work("cpu", 1.0, share=0.25))
    assert env.now == pytest.approx(4.0)
    env.run(until=env.all_of([bus.work("cpu", 0.25, share=0.25) for _ in range(4)]))
    assert env.now == pytest.approx(5.0)
