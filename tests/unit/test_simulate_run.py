"""Whole simulated runs: reproducible, labelled, and what looking ahead does to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pi2.costs.constants import Constants, describe_constants
from pi2.costs.description import Description
from pi2.fitting.check import load_plan
from pi2.simulate import SimulationResult, read_inputs, simulate

PAPER = Path(__file__).parents[2] / "tools/paper/plans"
HALF = "oneplus-12/bamboo-7b-half"
WHOLE = "x86-laptop/prosparse-llama-2-7b"


def read(name: str, **overrides: object) -> Description:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return read_inputs(load_plan(PAPER / f"{name}.plan.toml", overrides=values))


def run(name: str = HALF, seed: int = 0, tokens: int = 64, **overrides: object) -> SimulationResult:
    return simulate(read(name, **overrides), tokens=tokens, seed=seed)


def test_the_same_seed_gives_the_same_result_and_another_one_does_not() -> None:
    first, second, other = run(), run(), run(seed=1)
    assert first.describe() == second.describe()
    assert np.any(first.decode.token_s != other.decode.token_s)
    assert first.tokens_s == pytest.approx(other.tokens_s, rel=0.05)


def test_later_tokens_take_longer_because_of_their_keys_and_values() -> None:
    inputs = read(WHOLE)
    token_s = simulate(inputs, tokens=1024).decode.token_s
    growth = token_s[-64:].mean() - token_s[:64].mean()
    kept_bytes = 960 * inputs.sizes.kv_token * inputs.layers
    assert growth == pytest.approx(kept_bytes / inputs.rates.bandwidth_bytes_s, rel=0.2)


def test_results_are_labelled_as_simulated() -> None:
    result = run()
    assert result.describe()["simulated"] is True
    assert result.summarise().startswith("SIMULATED")


def test_every_constant_is_described() -> None:
    for name, value, unit, kind, meaning in describe_constants(Constants()):
        assert name and unit and meaning
        assert kind in ("published", "estimated", "calibrated", "assumed")
        assert value >= 0.0


def test_reads_that_begin_earlier_are_waited_for_less() -> None:
    none, attention, layer = (
        run(decode__look_ahead=mode) for mode in ("none", "attention", "layer")
    )
    assert none.tokens_s < attention.tokens_s <= layer.tokens_s
    assert none.decode.waiting_s.mean() > layer.decode.waiting_s.mean()
    assert (layer.decode.flash_s <= layer.decode.token_s).all()
