"""Layers that stream by in pieces: `pi2.costs.settings`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pi2.costs.cost import cost_plan
from pi2.fitting.check import load_plan

PIECE, BYTE_S = 500, 1e-9
"""Neurons of a piece, of a megabyte each: a piece takes 0.5 s to read."""
MISTRAL = Path(__file__).parents[2] / "plans/cloud-vm-zen5/mistral-7b.plan.toml"


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
