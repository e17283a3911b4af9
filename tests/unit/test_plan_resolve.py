"""Loading a plan: references, overrides, layers, digest."""

from pathlib import Path

import pytest

from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.plan.toml.source import parse_assignments

PARTS = Path(__file__).parents[2] / "tests/plans/broken/parts"


def test_paths_are_relative_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PARTS / "base.plan.toml"
    resolved = load_plan(plan, overrides={"weights": Path("elsewhere")})
    assert resolved.store_path == PARTS / "elsewhere"
    assert (resolved.device.id, resolved.model.id) == ("phone", "small")
    monkeypatch.chdir("/")
    assert load_plan(plan, overrides={"weights": "elsewhere"}).digest == resolved.digest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a = 1.5", 1.5), ("a=true", True), ('a="x y"', "x y"),
        ("a=low-rank", "low-rank"), ("a=64 MiB", "64 MiB"), ("a={cpu = 1.0}", {"cpu": 1.0}),
        ("a=[1, 2]", [1, 2]), ("a=b=c", "b=c"),
    ],
)  # fmt: skip
def test_assignments_are_toml_or_text(text: str, value: object) -> None:
    assert parse_assignments((text,)) == {"a": value}


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=[1", 'a="x', "a={", "a=1\nb=2"])
def test_broken_assignments_are_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_assignments((text,))
    assert (caught.value.diagnostics[0].code, caught.value.exit_code) == ("P016", 2)
