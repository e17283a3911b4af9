"""What is read from plans, devices and models, and what is said of missing figures."""

import re
from pathlib import Path

import pytest

from pi2.costs.cost import Description
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.simulate import read_inputs, simulate

PLANS = Path(__file__).parents[2] / "plans"
PAPER = PLANS.parent / "tools/paper/plans"
BAMBOO = PAPER / "oneplus-12/bamboo-7b-half.plan.toml"


def read(path: Path, **overrides: object) -> Description:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return read_inputs(load_plan(path, overrides=values))


def copy_documents(folder: Path, edit: dict[str, tuple[str, str]]) -> Path:
    """Copy the plan with its device and model; ``edit`` replaces text (pattern, by) by kind."""
    text = BAMBOO.read_text("utf-8")
    for kind, name in (("device", "oneplus-12"), ("model", "bamboo-7b")):
        document = (PLANS / f"{kind}s/{name}.{kind}.toml").read_text("utf-8")
        pattern, by = edit.get(kind, ("^", ""))
        changed, count = re.subn(pattern, by, document, flags=re.DOTALL)
        assert count, f"{pattern} is not in {name}"
        (folder / f"{name}.{kind}.toml").write_text(changed, "utf-8")
        text = text.replace(f'{kind} = "{name}"', f'{kind} = "{name}.{kind}.toml"')
    path = folder / BAMBOO.name
    path.write_text(text, "utf-8")
    return path


class TestPrediction:
    def test_more_active_neurons_are_never_faster(self, tmp_path: Path) -> None:
        speeds = []
        for share in (0.10, 0.18, 0.25, 0.28, 0.35, 0.6):
            edit = {"model": (r"active = 0\.10", f"active = {share}")}
            speeds.append(
                simulate(read_inputs(load_plan(copy_documents(tmp_path, edit))), tokens=32)
            )
        found = [item.tokens_s for item in speeds]
        assert found == sorted(found, reverse=True)
        assert found[0] > 1.1 * found[1] > 1.1 * found[2]


class TestMissingFigures:
    def find(self, path: Path) -> list[str]:
        with pytest.raises(UserError) as caught:
            read(path)
        assert caught.value.exit_code == 2
        assert {item.code for item in caught.value.diagnostics} == {"P330"}
        assert all(item.help for item in caught.value.diagnostics)
        return [item.message for item in caught.value.diagnostics]

    def test_the_demo_s_own_machine_states_nothing(self) -> None:
        messages = self.find(PLANS / "demo.plan.toml")
        assert any("units.cpu.read_bandwidth" in message for message in messages)
        assert any("storage.reads" in message for message in messages)

    def test_a_plan_that_reads_nothing_needs_no_flash_figures(self) -> None:
        inputs = read(PAPER / "x86-laptop/prosparse-llama-2-7b.plan.toml")
        assert inputs.settings.reads is None
        assert simulate(inputs, tokens=2).decode.read_bytes.sum() == 0.0

    def test_reads_of_one_pattern_are_not_enough(self, tmp_path: Path) -> None:
        random = r'\[\[storage\.reads\]\][^\[]*?pattern = "random".*?(?=\n\[|\Z)'
        messages = self.find(copy_documents(tmp_path, {"device": (random, "")}))
        assert [m for m in messages if "random" in m]

    def test_without_a_peak_the_bandwidth_is_missing(self, tmp_path: Path) -> None:
        pattern = r"\[units.cpu.read_bandwidth\].*?\n\n|\[memory.peak_bandwidth\].*?\n\n"
        messages = self.find(copy_documents(tmp_path, {"device": (pattern, "")}))
        assert ["units.cpu.read_bandwidth" in message for message in messages] == [True]


def test_two_units_beside_the_cpu_are_refused() -> None:
    split = {"cpu": 0.4, "npu": 0.3, "gpu": 0.3}
    backends = {"cpu": "null", "npu": "null", "gpu": "null"}
    with pytest.raises(UserError) as caught:
        read(BAMBOO, layers__split=split, backends=backends)
    assert "P262" in {item.code for item in caught.value.diagnostics}


def test_another_unit_in_other_layers_is_refused() -> None:
    backends = {"cpu": "null", "npu": "null", "gpu": "null"}
    others = [{"select": "0-3", "split": {"cpu": 0.7, "gpu": 0.3}}]
    with pytest.raises(UserError) as caught:
        read(BAMBOO, layers__overrides=others, backends=backends)
    (finding,) = caught.value.diagnostics
    assert (finding.code, "gpu, npu" in finding.message) == ("P331", True)
