"""Wishes that no plan can fulfil are explained before anything is written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi2.diagnostics import UserError
from pi2.planning.planner import plan as make_plan
from pi2.planning.wish import Wish, find_device_memory
from tests.helpers.programs import Ask
from tests.helpers.shipped_plans import read_device, read_model
from tests.helpers.slow import keep_quick

PHONES = Path(__file__).parents[2] / "plans/devices"


def make_small(folder: Path) -> str:
    """Path of a phone with 3 GiB."""
    phone = (PHONES / "xiaomi-14.device.toml").read_text().replace('"16 GiB"', '"3 GiB"')
    path = folder / "small.device.toml"
    path.write_text(phone.replace('"xiaomi-14"', '"small"'))
    return str(path)


def test_usable_memory_counts_before_installed() -> None:
    found = {}
    for name in ("oneplus-12", "xiaomi-14", "host"):
        found[name] = find_device_memory(read_device(name))
    assert found == {"oneplus-12": 19 * 10**9, "xiaomi-14": 16 << 30, "host": None}


def test_a_speed_that_needs_more_than_the_device_has(tmp_path: Path, ask: Ask) -> None:
    wish = ["--device", make_small(tmp_path), "--model", "llama-2-7b"]
    told = ask(["plan", *wish, "--speed", "4tok/s"], 1).err
    assert "4 tokens/s take" in told and "has 3 GiB" in told
    nearest = told.split("--speed ")[1].split()[0]
    ask(["plan", *wish, "--speed", nearest])  # what is offered exists


def test_a_curve_ends_where_the_devices_memory_does(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.cli.plan.POINTS", 2)
    wish = ["--device", make_small(tmp_path), "--model", "bamboo-7b", "--pareto"]
    assert ask(["plan", *wish]).out.splitlines()[-1].startswith("| 3 GiB |")
    told = ask(["plan", *wish, "--context", "10000000"], 2).err
    assert "3 GiB is not enough" in told


SPEEDS = [
    ("oneplus-12", "llama-2-7b", 8.0),
    ("raspberry-pi-5", "qwen3-8b", 1.0),
    ("xiaomi-14", "qwen3-30b-a3b", 4.0),
    ("cloud-vm-zen5", "bamboo-7b", 8.0),
]


def make_wish(device: str, model: str, speed: float | None = None) -> Wish:
    found: dict[str, Any] = {"device": read_device(device), "model": read_model(model)}
    return Wish(device=found["device"], model=found["model"], tokens_s=speed)


@pytest.mark.parametrize(("device", "model", "speed"), keep_quick(SPEEDS, SPEEDS[:1]))
def test_a_speed_is_reached_with_the_least_memory(device: str, model: str, speed: float) -> None:
    wish = make_wish(device, model, speed)
    found = make_plan(wish)
    assert found.cost.range_tokens_s.low >= speed
    budget = found.resolved.plan.memory.budget
    less = replace(wish, tokens_s=None, memory_bytes=round(0.95 * budget))
    assert make_plan(less).cost.range_tokens_s.low < speed, "less memory would do"


@pytest.mark.parametrize(("device", "model", "speed"), SPEEDS[:2])
def test_what_a_refused_speed_offers_can_be_had(device: str, model: str, speed: float) -> None:
    wish = make_wish(device, model, 50.0 * speed)
    with pytest.raises(UserError, match="tokens/s") as caught:
        make_plan(wish)
    assert caught.value.exit_code == 1
    told = str(caught.value.diagnostics[0].help)
    nearest = float(told.split("--speed ")[1].split("tok/s")[0])
    assert nearest > speed
    assert make_plan(replace(wish, tokens_s=nearest)).cost.tokens_s >= nearest


def test_a_refused_speed_within_a_memory_offers_a_speed_and_a_memory() -> None:
    wish = replace(make_wish("xiaomi-14", "qwen3-8b", 6.0), memory_bytes=3 << 30)
    with pytest.raises(UserError) as caught:
        make_plan(wish)
    finding = caught.value.diagnostics[0]
    assert finding.code == "P350" and "within 3 GiB" in finding.message
    told = str(finding.help)
    nearest = float(told.split("--speed ")[1].split("tok/s")[0])
    assert make_plan(replace(wish, tokens_s=nearest)).cost.tokens_s >= nearest
    memory = int(told.split("--memory '")[1].split(" MiB")[0]) << 20
    assert make_plan(replace(wish, memory_bytes=memory)).cost.tokens_s >= 6.0
