"""Figures as people read them and as device files state them."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pi2.authoring.drafting import Wish, draft_plan
from pi2.backends.hexagon.specification import choose_version
from pi2.cli.main import run
from pi2.engine.run_report import summarise_pressure
from pi2.fitting.completion import StoreOrigin, complete_plan
from pi2.plan.documents.device import Hexagon, Memory, Unit
from pi2.plan.documents.quantities import (
    BYTE_UNITS,
    approximate_bytes,
    approximate_number,
    approximate_share,
    format_bytes,
    parse_quantity,
    round_size,
)
from pi2.plan.reading.references import list_shipped
from tests.helpers.shipped_plans import read_device, read_model
from tests.helpers.slow import keep_quick, mark_slow
from tests.helpers.tables import in_table


@in_table
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert approximate_number(value) == text


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_an_approximate_number_is_near_and_plain(value: float) -> None:
    text = approximate_number(value)
    assert re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)
    assert float(text) == pytest.approx(value, rel=0.0051)


def test_a_share_is_never_minus_nothing() -> None:
    assert [approximate_share(item) for item in (-0.001, 0.0, 0.124)] == ["0%", "0%", "12%"]
    assert approximate_share(-0.0001, 1) == "0.0%"


@in_table
def test_sizes_are_written_exactly_in_the_unit_with_the_fewest_digits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(min_value=0, max_value=2**62))
def test_a_written_size_is_read_as_itself(size: int) -> None:
    assert parse_quantity(format_bytes(size), BYTE_UNITS) == size


@given(st.integers(min_value=0, max_value=2**48))
def test_a_rounded_size_is_hardly_smaller_and_short(size: int) -> None:
    rounded = round_size(size)
    assert size - 2**20 < rounded <= size
    assert sum(char.isdigit() for char in format_bytes(rounded)) <= 9


def test_a_thousand_tebibytes_are_written_without_an_exponent() -> None:
    assert approximate_bytes(5000 * 2**40) == "5000 TiB"


MODELS = sorted(list_shipped("model"))


@pytest.mark.parametrize("name", keep_quick(MODELS, MODELS[1::4]))
def test_the_plan_of_a_first_run_keeps_everything_in_memory(name: str) -> None:
    model = read_model(name)
    device = read_device("host")
    wish = Wish(device="host", model=name, store="store", budget_bytes=None)
    draft = tomllib.loads(draft_plan(wish, device, model))
    plan = complete_plan(draft, device, StoreOrigin(model)).values
    assert plan["layers"]["hot"] == 1.0
    sizes = [parse_quantity(text, BYTE_UNITS) for text in plan["memory"]["segments"].values()]
    budget = parse_quantity(plan["memory"]["budget"], BYTE_UNITS)
    assert sum(sizes) <= budget <= sum(sizes) + 4 * 2**20
    assert sum(char.isdigit() for char in plan["memory"]["budget"]) <= 6


@pytest.mark.parametrize("size", ["5315543244 B", mark_slow("4.951 GiB")])
@pytest.mark.parametrize("command", [["new", "plan"], ["plan"]], ids=["new plan", "plan"])
def test_a_plan_for_an_odd_size_has_a_budget_that_people_can_read(
    command: list[str], size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--device", "oneplus-12", "--model", "bamboo-7b", "--context", "512"]
    assert run([*command, *arguments, "--memory", size, "-o", "a.plan.toml"]) == 0
    text = Path("a.plan.toml").read_text("utf-8")
    assert re.search(r'^budget = "5069 MiB"', text, re.MULTILINE)
    assert not re.search(r'"[0-9]{7,} ', text)


@in_table
def test_a_few_pages_are_no_memory_pressure(
    faults: int | None, swapped: int | None, lines: list[str]
) -> None:
    assert summarise_pressure({"major_faults": faults, "swapped_bytes": swapped}) == lines


@pytest.mark.parametrize(
    ("text", "size"),
    [("14.8 GiB", 15_891_378_995), ("15.9GB", 15_900_000_000), ("7.1 KiB", 7270), ("512 B", 512)],
)
def test_a_size_is_rounded_to_bytes(text: str, size: int) -> None:
    values: dict[str, Any] = {"usable": text}
    assert Memory.model_validate(values).usable == size


def test_a_part_of_a_byte_is_no_size() -> None:
    values: dict[str, Any] = {"usable": "0.4 B"}
    with pytest.raises(ValidationError, match="not a whole number"):
        Memory.model_validate(values)


@pytest.mark.parametrize(
    ("stated", "compiled"),
    [(None, "v66"), ("v66", "v66"), ("v71", "v69"), ("v75", "v75"), ("v79", "v75"), ("v81", "v75")],
)
def test_programs_are_for_newest_version_that_npu_runs(stated: str | None, compiled: str) -> None:
    unit = Unit(kind="npu", architecture="hexagon", hexagon=Hexagon(version=stated))
    assert choose_version(unit) == compiled


@pytest.mark.parametrize("stated", ["v65", "75", "v7", "hexagon v79"])
def test_what_is_no_version_is_refused(stated: str) -> None:
    with pytest.raises(ValidationError):
        Hexagon(version=stated)
