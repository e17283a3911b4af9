"""`pi2 diff`: what differs between two documents once everything is resolved, and what it does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pi2.authoring.difference import compare_layers, compare_segments
from pi2.fitting.check import load_plan
from pi2.plan.documents.quantities import approximate_bytes, format_bytes
from pi2.simulate import read_inputs, simulate, simulate_layers
from tests.helpers.programs import Ask

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "tests/plans/broken/parts"
LARGE = ROOT / "plans/oneplus-12/turbosparse-mixtral-47b.plan.toml"
SMALL = ROOT / "tools/paper/plans/oneplus-12/turbosparse-mixtral-47b-7gb.plan.toml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("phone.device.toml", "small.model.toml", "base.plan.toml"):
        shutil.copy(PARTS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(f'schema_version = 3\nextends = ["base.plan.toml"]\n{text}')
    return path


def test_layers_that_differ_alike_come_together(folder: Path) -> None:
    text = '[[layers.overrides]]\nselect = "2-4"\nhot = 0.1\n'
    other = write("other.plan.toml", f'inherit.layers.overrides = "append"\n{text}')
    before, after = load_plan("base.plan.toml"), load_plan(other)
    (change,) = compare_layers(before, after)
    assert change.name == "layers 2-4" and change.hot_bytes == (410 * 4096, 205 * 4096)
    hot = next(item for item in compare_segments(before, after) if item.name == "hot")
    assert hot.needs[1] - hot.needs[0] == 3 * (205 - 410) * 4096
    assert hot.sizes[0] == hot.sizes[1]


def diff(ask: Ask, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(["diff", "--json", *arguments]).out)
    return found


def test_speed_is_simulated_where_device_has_figures(ask: Ask) -> None:
    found = diff(ask, str(LARGE), str(SMALL))
    assert found["speed"]["simulated"] is True
    large, small = found["speed"]["decode_tokens_s"]
    assert large > small > 0
    times = found["layers"][0]["simulated_s"]
    assert 0 < times[0] < times[1]
    text = ask(["diff", str(LARGE), str(SMALL)]).out
    assert "speed, SIMULATED and not measured\n  decode " in text
    assert "layers 0-31: split " in text


def test_layers_together_take_a_token_without_its_head() -> None:
    plan = load_plan(SMALL)
    inputs = read_inputs(plan)
    layers = simulate_layers(inputs)
    assert len(layers) == len(plan.layers)
    assert 0.8 < sum(layers) / simulate(inputs, tokens=64).decode.token_s.mean() <= 1.0


@pytest.mark.parametrize(
    ("size", "text"), [(1023, "1023 B"), (999 << 20, "999 MiB"), (1020 << 20, "0.996 GiB")]
)
def test_bytes_for_people_have_three_digits(size: int, text: str) -> None:
    assert approximate_bytes(size) == text
    assert format_bytes(0) == "0 B"
