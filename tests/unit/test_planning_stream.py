"""Layers that stream by in pieces: `pi2.costs.settings`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pi2.costs.cost import cost_plan
from pi2.costs.settings import Stream
from pi2.costs.terms import find_chance
from pi2.fitting.check import load_plan

PIECE, BYTE_S = 500, 1e-9
"""Neurons of a piece, of a megabyte each: a piece takes 0.5 s to read."""
MISTRAL = Path(__file__).parents[2] / "plans/cloud-vm-zen5/mistral-7b.plan.toml"


def make_stream(overlap: float = 1.0) -> Stream:
    return Stream(byte_s=BYTE_S, overlap=overlap, neurons=PIECE, stride=1_000_000)


def test_nothing_is_waited_for_where_everything_stays() -> None:
    assert make_stream().time_wait(0.0, before_s=1.0, compute_s=0.0) == 0.0


def test_computing_hides_reads_that_are_shorter() -> None:
    assert make_stream().time_wait(4 * PIECE, before_s=0.0, compute_s=4.0) == pytest.approx(0.0)


def test_pieces_that_take_longer_to_read_are_waited_for() -> None:
    wait_s = make_stream().time_wait(4 * PIECE, before_s=0.0, compute_s=0.8)
    assert wait_s == pytest.approx(4 * (0.5 - 0.2))


def test_what_comes_before_a_layer_s_pieces_hides_the_first_of_them_only() -> None:
    short, long = (
        make_stream().time_wait(4 * PIECE, before_s=before_s, compute_s=0.8)
        for before_s in (0.0, 100.0)
    )
    assert long == pytest.approx(3 * (0.5 - 0.2))
    assert long < short


def test_where_reading_needs_the_cores_all_of_it_is_waited_for() -> None:
    wait_s = make_stream(overlap=0.0).time_wait(4 * PIECE, before_s=9.0, compute_s=9.0)
    assert wait_s == pytest.approx(make_stream().time_read(4 * PIECE))


def test_a_last_piece_counts_as_one() -> None:
    assert make_stream().count_pieces(PIECE + 1) == 2.0


def test_chances_of_misses_are_few_where_few_are_missing() -> None:
    assert find_chance(0.0) == 0.0
    assert find_chance(0.01) == pytest.approx(0.01, rel=0.01)
    assert find_chance(50.0) == pytest.approx(1.0)


def test_dense_decoding_streams_what_is_not_hot_whatever_the_cache_has_room_for() -> None:
    def predict(cold: str) -> float:
        changes = {
            "layers.hot": 0.5,
            "memory.segments.hot": "1700 MiB",
            "memory.segments.cold": cold,
        }
        return cost_plan(load_plan(MISTRAL, overrides=changes)).tokens_s

    whole = cost_plan(load_plan(MISTRAL)).tokens_s
    assert predict("0 B") < 0.5 * whole
    assert predict("1000 MiB") == pytest.approx(predict("0 B"))


def test_a_longer_prompt_takes_longer_but_less_for_each_token() -> None:
    resolved = load_plan(MISTRAL)
    short, long = (cost_plan(resolved, prompt=tokens).prefill_tokens_s for tokens in (16, 256))
    assert short is not None and long is not None
    assert short < long < 16 * short
