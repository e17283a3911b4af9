"""`pi2 simulate`: what it prints and writes, and how it fails."""

import json
from pathlib import Path

import pytest

from pi2.cli.main import run
from tests.helpers.programs import Ask

PLANS = Path(__file__).parents[2] / "plans"
BAMBOO = str(PLANS / "oneplus-12/bamboo-7b-half.plan.toml")


def test_people_read_that_it_is_simulated_and_where_figures_are_from(ask: Ask) -> None:
    text = ask(["simulate", BAMBOO, "--tokens", "16"]).out
    assert text.startswith("SIMULATED, not measured")
    for word in ("prefill", "decode", "P99", "cache hits", "published", "estimated"):
        assert word in text


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


def test_a_trace_is_written_for_viewers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    assert run(["simulate", BAMBOO, "--tokens", "4", "--trace", str(path)]) == 0
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "no-such-folder" / "trace.json"
    assert "P631" in ask(["simulate", BAMBOO, "--tokens", "4", "--trace", str(path)], 2).err


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    assert run(["simulate", BAMBOO, "--tokens", "8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_type_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(["simulate", BAMBOO, "--tokens", "8", "--plot", str(tmp_path / "times.xyz")]) == 2
    assert "P633" in capsys.readouterr().err


def test_device_without_figures_is_told_what_to_measure(tmp_path: Path, ask: Ask) -> None:
    host = (PLANS / "devices/host.device.toml").read_text()
    (tmp_path / "mine.device.toml").write_text(host.replace('id = "host"', 'id = "mine"'))
    plan = tmp_path / "my.plan.toml"
    plan.write_text(
        f'schema_version = 3\nweights = "{PLANS}/stores/pi2-demo"\ndevice = "mine.device.toml"\n'
    )
    error = ask(["simulate", str(plan)], 2).err
    assert "P330" in error and "units.cpu.read_bandwidth" in error
    assert "pi2 probe" in error


def test_a_prompt_beyond_the_context_is_refused_and_an_answer_is_cut(
    capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    assert run(["simulate", BAMBOO, "--prompt", "4000", "--tokens", "4"]) != 0
    assert "P601" in capsys.readouterr().err
    found = ask(["simulate", BAMBOO, "--prompt", "2040", "--tokens", "99", "--json"])
    assert json.loads(found.out)["tokens"] == 8 and "ends after 8 tokens" in found.err
