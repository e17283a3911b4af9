"""The demo plan on two units as a user runs it: one unit's text."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import start_pi2
from tests.helpers.slow import keep_quick

ROOT = Path(__file__).parents[2]
ALONE = ROOT / "plans" / "demo.plan.toml"
TWO = ROOT / "plans" / "demo-two-units.plan.toml"
TOKENS = 24
EXACT = (
    'decode.predictor="gate"', 'decode.activations="fp32"', 'prefill.activations="fp32"',
    'kv.type="fp32"', "memory.budget=160MiB", "memory.segments.kv=8MiB",
)  # fmt: skip
"""It does not matter to the text which unit computes a neuron."""


def run(plan: Path, *settings: str) -> dict[str, Any]:
    arguments = ["run", str(plan), "--prompt", "def read_lines(path):"]
    arguments += ["--temperature", "0", "--max-tokens", str(TOKENS), "--ignore-eos"]
    for setting in (*EXACT, *settings):
        arguments += ["--set", setting]
    done = start_pi2(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(ALONE)


@pytest.mark.parametrize("prompts", keep_quick(["cpu", "second"], ["second"]))
def test_two_units_write_what_one_writes(alone: dict[str, Any], prompts: str) -> None:
    found = run(TWO, f'prefill.unit="{prompts}"')
    assert len(found["token_ids"]) == TOKENS and found["text"] == alone["text"]
    assert found["flash_read_generation_bytes"] > 0, "the model is larger than the memory"
    assert 0 < found["peak_rss_bytes"] <= found["budget_bytes"]
    units = found["units"]
    assert list(units) == ["cpu", "second"]
    assert (units["cpu"]["owned_share"], units["second"]["owned_share"]) == (0.7, 0.3)
    shares = [unit["computed_share"] for unit in units.values()]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert units["second"]["busy_s"] > 0 and units["second"]["lost"] is None
    assert alone["units"] == {}
