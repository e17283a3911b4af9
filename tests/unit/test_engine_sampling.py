"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pi2.diagnostics import UserError
from pi2.engine.answer import Sampler, SamplingOptions

LOGITS = np.array([0.0, 3.0, 2.0, 1.0, -5.0], np.float32)
NOTHING = np.array([], np.int64)


def draw(options: SamplingOptions, times: int = 400) -> np.ndarray:
    sampler = Sampler(options)
    return np.bincount([sampler.sample(LOGITS, NOTHING) for _ in range(times)], minlength=5)


def test_temperature_zero_is_greedy() -> None:
    assert draw(SamplingOptions(), 5).tolist() == [0, 5, 0, 0, 0]


def test_a_seed_gives_the_same_tokens_again() -> None:
    options = SamplingOptions(temperature=1.0, seed=7)
    first, second = Sampler(options), Sampler(options)
    draws = [(first.sample(LOGITS, NOTHING), second.sample(LOGITS, NOTHING)) for _ in range(50)]
    assert all(a == b for a, b in draws)
    assert len({a for a, _ in draws}) > 1


def test_frequencies_follow_the_softmax() -> None:
    counts = draw(SamplingOptions(temperature=1.0, seed=0), 4000) / 4000
    expected = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.abs(counts - expected).max() < 0.03


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (SamplingOptions(temperature=5.0, top_k=2, seed=0), {1, 2}),
        (SamplingOptions(temperature=1.0, top_p=0.6, seed=0), {1}),
        (SamplingOptions(temperature=1.0, top_p=0.7, seed=0), {1, 2}),
        (SamplingOptions(temperature=1.0, min_p=0.3, seed=0), {1, 2}),
        (SamplingOptions(temperature=1.0, min_p=1.0, seed=0), {1}),
    ],
)
def test_unlikely_tokens_are_cut(options: SamplingOptions, allowed: set[int]) -> None:
    assert set(np.flatnonzero(draw(options))) == allowed


def test_a_repeated_token_becomes_less_likely() -> None:
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0))
    assert sampler.sample(LOGITS, np.array([1, 1])) == 2


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"top_k": -1}, {"seed": -1}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingOptions(**wrong)  # type: ignore[arg-type]
