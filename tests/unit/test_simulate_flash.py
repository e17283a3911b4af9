"""Read rates between measured points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pi2.costs.constants import Flash, FlashPoint
from tests.helpers.simulation import KIB, MIB, make_flash


def make_single(**settings: object) -> Flash:
    return replace(make_flash(), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "extent", "rate"),
    [(4 * KIB, 128 * MIB, 1000e6), (4 * KIB, 512 * MIB, 800e6), (512 * KIB, 128 * MIB, 3500e6)],
)
def test_a_measured_point_is_returned_as_it_is(block: int, extent: int, rate: float) -> None:
    found = make_flash().find_rate_bytes_s("random", block, range_bytes=extent)
    assert found == pytest.approx(rate)


def test_between_two_blocks_the_rate_lies_between_theirs() -> None:
    rates = [
        make_flash().find_rate_bytes_s("random", block * KIB, range_bytes=128 * MIB)
        for block in (4, 8, 64, 512)
    ]
    assert rates == sorted(rates)
    assert len(set(rates)) == 4


def test_half_a_block_takes_as_long_as_a_whole_one() -> None:
    flash = make_flash()
    whole = flash.find_rate_bytes_s("random", 4 * KIB, range_bytes=128 * MIB)
    half = flash.find_rate_bytes_s("random", 2 * KIB, range_bytes=128 * MIB)
    assert 2 * half == pytest.approx(whole)


def test_beyond_the_largest_block_and_range_the_rate_stays() -> None:
    flash = make_flash()
    assert flash.find_rate_bytes_s("sequential", 64 * MIB) == pytest.approx(4e9)
    wide = flash.find_rate_bytes_s("random", 4 * KIB, range_bytes=64 * 1024 * MIB)
    assert wide == pytest.approx(800e6)


def test_a_wider_range_is_slower() -> None:
    flash = make_flash()
    rates = [
        flash.find_rate_bytes_s("random", 4 * KIB, range_bytes=size * MIB)
        for size in (64, 128, 256, 512)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[1] > rates[2] > rates[3]


def test_the_core_that_reads_matters_where_figures_name_cores() -> None:
    points = tuple(
        FlashPoint(pattern="random", block_bytes=4096, rate_bytes_s=rate, core=core)
        for core, rate in (("little", 700e6), ("big", 1000e6))
    )
    flash = make_single(points=points)
    assert flash.find_rate_bytes_s("random", 4096, core="little") == 700e6
    assert flash.find_rate_bytes_s("random", 4096, core="big") == 1000e6
    assert flash.find_rate_bytes_s("random", 4096) == 1000e6


def test_of_several_depths_the_deepest_rate_counts_for_many_reads() -> None:
    points = tuple(
        FlashPoint(pattern="random", block_bytes=4096, rate_bytes_s=rate, threads=threads)
        for threads, rate in ((1, 20e6), (32, 360e6))
    )
    assert make_single(points=points).find_rate_bytes_s("random", 4096) == 360e6


def test_a_pattern_without_figures_is_an_error() -> None:
    with pytest.raises(LookupError):
        make_single(points=()).find_rate_bytes_s("random", 4096)
