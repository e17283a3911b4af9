"""`pi2 simulate`: what it prints and writes, and how it fails."""

import json
from pathlib import Path

import pytest

from pi2.cli.main import run
from tests.helpers.programs import Ask

PLANS = Path(__file__).parents[2] / "plans"
BAMBOO = str(PLANS / "oneplus-12/bamboo-7b-half.plan.toml")


def test_programs_read_one_object(ask: Ask) -> None:
    found = json.loads(ask(["simulate", BAMBOO, "--tokens", "16", "--prompt", "128", "--json"]).out)
    assert found["simulated"] is True
    assert (found["tokens"], found["prompt_tokens"]) == (16, 128)
    assert found["decode"]["p50_ms"] <= found["decode"]["p99_ms"]
    assert found["provenance"]["figures"]["published"] > 0
    assert len(found["plan_digest"]) == 64


def test_a_value_that_is_set_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = []
    for settings in ([], ["--set", "threads.compute=1", "--set", "decode.predictor=none"]):
        assert run(["simulate", BAMBOO, "--tokens", "8", "--json", *settings]) == 0
        speeds.append(json.loads(capsys.readouterr().out)["decode"]["tokens_s"])
    assert speeds[1] < speeds[0] / 2


def test_a_picture_of_an_unknown_type_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(["simulate", BAMBOO, "--tokens", "8", "--plot", str(tmp_path / "times.xyz")]) == 2
    assert "P633" in capsys.readouterr().err
