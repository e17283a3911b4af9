"""Wishes that no plan can fulfil are explained before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from pi2.cli.main import run
from pi2.plan.documents.device import Device
from pi2.planning.device_memory import find_device_memory
from pi2.planning.documents import read_document

pytest.importorskip("scipy")
PHONES = Path(__file__).parents[2] / "plans/devices"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["plan", *arguments])
    return code, capsys.readouterr().err


def make_small(folder: Path) -> str:
    """Path of a phone with 12 GiB."""
    phone = (PHONES / "xiaomi-14.device.toml").read_text().replace('"16 GiB"', '"12 GiB"')
    path = folder / "small.device.toml"
    path.write_text(phone.replace('"xiaomi-14"', '"small"'))
    return str(path)


def test_usable_memory_counts_before_installed() -> None:
    found = {}
    for name in ("oneplus-12", "xiaomi-14", "host"):
        device = read_document(name, "device").document
        assert isinstance(device, Device)
        found[name] = find_device_memory(device)
    assert found == {"oneplus-12": 19 * 10**9, "xiaomi-14": 16 << 30, "host": None}


def test_more_memory_than_the_device_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wish = ["--device", "oneplus-12", "--model", "bamboo-7b"]
    code, told = plan(capsys, *wish, "--memory", "1TiB")
    assert code == 2 and "error[P350]" in told
    assert "--memory '18119 MiB' is the most" in told
    assert run(["plan", *wish, "--memory", "18119 MiB"]) == 0


def test_a_speed_that_needs_more_than_the_device_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["--device", make_small(tmp_path), "--model", "turbosparse-mixtral-47b"]
    code, told = plan(capsys, *wish, "--speed", "12tok/s")
    assert code == 1 and "12 tokens/s take" in told and "has 12 GiB" in told
    nearest = told.split("--speed ")[1].split()[0]
    assert plan(capsys, *wish, "--speed", nearest)[0] == 0, "what is offered exists"


def test_a_curve_ends_where_the_devices_memory_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.cli.plan.POINTS", 2)
    wish = ["--device", make_small(tmp_path), "--model", "turbosparse-mixtral-47b", "--pareto"]
    assert run(["plan", *wish]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 12 GiB |")
    code, told = plan(capsys, *wish, "--context", "10000000")
    assert code == 2 and "12 GiB is not enough" in told


def test_a_figure_of_zero_is_a_finding_and_no_division(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (PHONES / "oneplus-12.device.toml").read_text().replace('"oneplus-12"', '"mine"')
    path = tmp_path / "mine.device.toml"
    path.write_text(text.replace('"43.9 GB/s"', '"0 GB/s"'))
    code, told = plan(capsys, "--device", str(path), "--model", "bamboo-7b", "--memory", "3GiB")
    assert code == 1 and "error[P261]: no machine has 0 B/s here" in told


def test_unknown_prompts_say_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["plan", "--device", "raspberry-pi-5", "--model", "bamboo-7b", "--memory", "3GiB"]) == 0
    )
    assert "Prompts unknown, no unit of the plan has units.*.compute" in capsys.readouterr().out
