"""Which backends generated plans name, and what they say of it."""

import re
from pathlib import Path

import pytest

from pi2.authoring import drafting
from pi2.authoring.drafting import explain_backends
from pi2.cli.main import run
from pi2.fitting import completion
from pi2.fitting.check import load_plan
from pi2.fitting.completion import choose_backends


def generate(folder: Path, *command: str) -> str:
    """Text of a plan for the OnePlus 12, which has an NPU."""
    path = folder / "my.plan.toml"
    wish = ["--device", "oneplus-12", "--model", "bamboo-7b", "--memory", "4 GiB"]
    assert run([*command, *wish, "--context", "512", "-o", str(path)]) == 0
    units = load_plan(path).device.units
    text = path.read_text("utf-8")
    plan = load_plan(path)
    used = {units[name].kind for layer in plan.layers for name in layer.split}
    assert dict(plan.plan.backends) == choose_backends(used)
    return text


def test_every_kind_has_a_backend_that_computes() -> None:
    assert choose_backends({"cpu"}) == {"cpu": "cpu"}
    assert choose_backends({"cpu", "npu"}) == {"cpu": "cpu", "npu": "hexagon"}
    assert explain_backends({"cpu", "npu"}) is None


def test_kind_without_a_backend_makes_a_plan_to_count_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (completion, drafting):
        monkeypatch.setattr(module, "list_usual_backends", lambda: {"cpu": "cpu"})
    assert choose_backends({"cpu", "npu"}) == {"cpu": "null", "npu": "null"}
    assert explain_backends({"cpu"}) is None
    assert (explain_backends({"cpu", "npu"}) or "").endswith("no backend serves npu yet")


@pytest.mark.parametrize("command", [["new", "plan"], ["plan"]], ids=["new plan", "plan"])
def test_both_commands_choose_backends_for_the_units_that_they_use(
    command: list[str], tmp_path: Path
) -> None:
    text = generate(tmp_path, *command)
    if command == ["plan"]:
        has_npu = re.search(r"^split = .*npu", text, re.MULTILINE) is not None
        assert "gpu is left out: " in text and ("npu is left out: " in text) != has_npu
    else:
        assert "# The cpu computes everything; `pi2 plan` divides the work with the gpu" in text
