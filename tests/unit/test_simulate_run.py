"""Whole simulated runs: reproducible, bounded, and moved by every figure in the right direction."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.costs.constants import Constants, describe_constants
from pi2.costs.description import Description
from pi2.simulate import SimulationResult, simulate
from tests.helpers.simulation import make_inputs

TOKENS = 64


def run(inputs: Description, seed: int = 0, tokens: int = TOKENS) -> SimulationResult:
    return simulate(inputs, tokens=tokens, seed=seed)


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    first, second, other = run(make_inputs()), run(make_inputs()), run(make_inputs(), seed=1)
    assert first.describe() == second.describe()
    assert np.any(first.decode.token_s != other.decode.token_s)
    assert first.tokens_s == pytest.approx(other.tokens_s, rel=0.05)


def test_later_tokens_take_longer_because_of_their_keys_and_values() -> None:
    inputs = make_inputs(hot=1.0, workload={"kv_token_bytes": 65536})
    token_s = run(inputs, tokens=1024).decode.token_s
    growth = token_s[-64:].mean() - token_s[:64].mean()
    assert growth == pytest.approx(960 * 65536 * 8 / 40e9, rel=0.02)


def test_results_are_labelled_as_simulated() -> None:
    result = run(make_inputs())
    assert result.describe()["simulated"] is True
    assert result.summarise().startswith("SIMULATED")


def test_every_constant_is_described() -> None:
    for name, value, unit, kind, meaning in describe_constants(Constants()):
        assert name and unit and meaning
        assert kind in ("published", "estimated", "calibrated", "assumed")
        assert value >= 0.0


@pytest.mark.slow
def test_ten_thousand_tokens_of_a_47b_take_less_than_a_minute() -> None:
    import time

    moe = {"layers": 32, "experts": 8, "active_experts": 2, "active": 0.1}
    inputs = make_inputs(workload=moe, choices={"cold_neurons": 0.05 * 32 * 8 * 14336})
    start = time.process_time()
    simulate(inputs, tokens=10_000)
    assert time.process_time() - start < 60.0


class TestLookingAhead:
    def run(self, mode: str, **changes: object) -> SimulationResult:
        return run(make_inputs(choices={"look_ahead": mode}, **changes))  # type: ignore[arg-type]

    def test_reads_that_begin_earlier_are_waited_for_less(self) -> None:
        none, attention, layer = (self.run(mode) for mode in ("none", "attention", "layer"))
        assert none.tokens_s < attention.tokens_s < layer.tokens_s
        assert none.decode.waiting_s.mean() > layer.decode.waiting_s.mean()
        assert layer.decode.read_bytes.mean() == pytest.approx(none.decode.read_bytes.mean())

    def test_the_flash_is_never_asked_for_more_than_it_gives(self) -> None:
        layer = self.run("layer", hot=0.1)
        assert (layer.decode.flash_s <= layer.decode.token_s).all()

    def test_with_everything_in_memory_it_makes_no_difference(self) -> None:
        assert self.run("layer", hot=1.0).tokens_s == self.run("none", hot=1.0).tokens_s
