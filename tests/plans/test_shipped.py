"""Every document that comes with pi2 is sound, for pi2 and for editors."""

import re
from pathlib import Path

import jsonschema
import pytest
import tomli

from pi2.cli.main import run
from pi2.diagnostics import UserError
from pi2.plan.documents.quantities import parse_size
from pi2.plan.toml.source import detect_kind
from pi2.refit import read_plan
from tests.helpers.programs import Ask
from tests.helpers.shipped_plans import SCHEMAS, has_package, list_plans
from tests.helpers.slow import keep_quick

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "plans").rglob("*.toml"))
PAPER = sorted((ROOT / "tools/paper/plans").rglob("*.plan.toml"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in SHIPPED + PAPER if has_package(p)], ids=_name)
def test_it_validates_without_findings(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run(["validate", str(path)]), capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize("path", SHIPPED, ids=_name)
def test_it_agrees_with_its_json_schema(path: Path) -> None:
    schema = SCHEMAS[f"{detect_kind(path.name)}.schema.json"]
    errors = list(
        jsonschema.Draft7Validator(schema).iter_errors(tomli.loads(path.read_text("utf-8")))
    )
    assert errors == []


@pytest.mark.parametrize("path", SHIPPED + PAPER, ids=_name)
def test_it_names_its_schema_for_editors(path: Path) -> None:
    start, _, reference = path.read_text("utf-8").splitlines()[0].partition(" ")
    assert start == "#:schema"
    target = (path.parent / reference).resolve()
    assert target == ROOT / "schemas" / f"{detect_kind(path.name)}.schema.json"


@pytest.mark.parametrize("path", keep_quick(list_plans(), list_plans()[::3]), ids=_name)
def test_what_show_prints_is_the_same_plan(path: Path, ask: Ask, tmp_path: Path) -> None:
    text = ask(["show", str(path)]).out
    values = tomli.loads(path.read_text("utf-8"))
    for kind in {"device", "model"} & values.keys():
        # Written elsewhere, relative references need their folder.
        if "/" in values[kind] or values[kind].endswith(".toml"):
            text = text.replace(values[kind], str(path.parent / values[kind]))
    again = tmp_path / path.name
    again.write_text(text, "utf-8")
    assert ask(["show", str(again)]).out.splitlines()[0] == text.splitlines()[0]


@pytest.mark.parametrize("path", keep_quick(list_plans(), list_plans()[::3]), ids=_name)
def test_another_context_batch_or_budget_fits_or_says_the_least(path: Path) -> None:
    budget = read_plan(path).resolved.plan.memory.budget
    wishes: list[tuple[dict[str, object], int | None]] = [
        ({"kv.context": 8192}, None),
        ({"decode.batch": 2}, None),
        *(({}, int(budget * part)) for part in (0.05, 0.75, 1.25)),
    ]
    for overrides, memory in wishes:
        try:
            assert read_plan(path, overrides=overrides, memory_bytes=memory).resolved.layers
        except UserError as error:
            (found,) = error.diagnostics
            if found.code in ("P203", "P231"):  # the device's memory, the model's context
                continue
            least = re.search(r"(?:--memory '?|the budget to )([\d.]+ ?\w+)", found.help or "")
            assert least is not None, found
            size = parse_size(least[1])
            assert read_plan(path, overrides=overrides, memory_bytes=size).resolved.layers


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.name.endswith(".plan.toml")], ids=_name)
def test_a_plan_to_copy_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 25


def test_there_is_something_to_check() -> None:
    assert {detect_kind(path.name) for path in SHIPPED} == {"plan", "device", "model", "family"}
