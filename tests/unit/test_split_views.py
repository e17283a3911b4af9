"""What commands say of layers that two units compute."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pi2.cli.main import run
from pi2.engine.run_report import summarise_units
from pi2.measuring.report import Conditions, Row, Workload, describe_row, write_markdown
from pi2.measuring.session import Outcome, PlanContestant
from pi2.measuring.timeline import record_run
from pi2.orchestrator import load
from pi2.plan.toml.text import write_value
from tests.helpers.models import make_tiny
from tests.helpers.plans import write_plan
from tests.helpers.tables import in_table

Capture = pytest.CaptureFixture[str]
TWO: dict[str, Any] = {
    "device": "host-two-units",
    "backends": {"cpu": "reference", "npu": "reference"},
    "layers.split": {"second": 0.3, "cpu": 0.7},
    "layers.hot": 0.4,
}
BATCHES: dict[str, Any] = {
    "decode.batch": 3,
    "layers.batches": [{"sequences": 2, "split": {"second": 0.1, "cpu": 0.9}}],
}
APART = {"memory.units": {"second": {"budget": "2 MiB"}}}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("views")
    return write_plan(folder, make_tiny(folder))


def extend(plan: Path, name: str, *settings: Mapping[str, Any]) -> Path:
    path = plan.parent / f"{name}.plan.toml"
    lines = ["schema_version = 3", f'extends = ["{plan.name}"]']
    values = {key: value for item in settings for key, value in item.items()}
    lines += [f"{key} = {write_value(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def print_lines(capsys: Capture, *arguments: object) -> list[str]:
    assert run([str(item) for item in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_show_says_who_has_which_neurons_in_which_memory(plan: Path, capsys: Capture) -> None:
    found = print_lines(capsys, "show", extend(plan, "two", TWO))
    assert "#   second computes neurons 0-28, which it keeps in memory.segments.hot" in found
    line = "#   cpu computes the predicted neurons among the others; neurons 29-37 stay in "
    assert f"{line}memory.segments.hot" in found
    assert any(line.startswith("# second: needs ") for line in found)
    assert not any("which it keeps" in line for line in print_lines(capsys, "show", plan))


def test_show_says_what_changes_with_the_number_of_sequences(plan: Path, capsys: Capture) -> None:
    found = print_lines(capsys, "show", extend(plan, "batches", TWO, BATCHES, APART))
    line = (
        "#   second computes neurons 0-28 in steps of 1 sequence, neurons 0-9 in steps of 2 to 3 "
    )
    assert f"{line}sequences, and keeps neurons 0-28 in memory.units.second, main memory" in found
    line = "#   cpu computes the predicted neurons among the others; neurons 10-37 stay in "
    assert f"{line}memory.segments.hot" in found


def test_show_says_who_has_which_rows_of_projections(plan: Path, capsys: Capture) -> None:
    rows = {"projections": {"attention": {"second": 0.5, "cpu": 0.5}}}
    found = print_lines(capsys, "show", extend(plan, "rows", TWO, rows))
    line = "# projections: second computes 64 rows to query, key and value and 32 of the output "
    assert f"{line}in each layer, 0 of the head; cpu the others" in found


def test_waiting_for_rows_of_projections_is_no_python(plan: Path) -> None:
    rows = {"projections": {"attention": {"second": 0.5, "cpu": 0.5}}}
    with load(plan, set={**TWO, **rows, "decode.predictor": "gate"}) as model:
        recorder, summary = record_run(model, [5, 6, 7], 2)
    waits = [item for item in recorder.slices if item.name == "wait for second 1"]
    assert len(waits) == 3 * 3, "the FFN's share and both projections, of a prompt and two tokens"
    assert summary.unit_wait_s > 0.0


@in_table
def test_explain_says_what_a_split_costs(plan: Path, capsys: Capture, key: str) -> None:
    settings = {"prefill.unit": "second"}
    path = extend(plan, "apart", TWO, APART, settings)
    found = " ".join(" ".join(print_lines(capsys, "explain", key, path)).split())
    assert "costs: second: needs " in found
    assert "of memory.units.second, main memory, which has 2 MiB" in found


def test_explain_says_what_a_layer_s_units_have(plan: Path, capsys: Capture) -> None:
    found = " ".join(print_lines(capsys, "explain", "layers.1.hot", extend(plan, "two", TWO)))
    assert "second computes neurons 0-28" in found


def test_diff_compares_what_units_compute_and_need(plan: Path, capsys: Capture) -> None:
    one, other = extend(plan, "two", TWO), extend(plan, "batches", TWO, BATCHES, APART)
    found = print_lines(capsys, "diff", one, other, "--no-simulate")
    line = next(line for line in found if "layers 0-2" in line)
    assert "dense unit second with neurons 0-28 -> second with neurons 0-28 in steps of 1" in line
    assert any(line.split()[0] == "units.second" for line in found)
    (layers,) = json.loads("\n".join(print_lines(capsys, "diff", plan, one, "--json")))["layers"]
    assert layers["dense"] == [None, {"unit": "second", "neurons": [29]}]


def test_a_benchmark_says_how_busy_each_unit_was(plan: Path) -> None:
    rows = []
    for settings in ({}, {**TWO, "decode.predictor": "gate"}):
        contestant = PlanContestant(plan, settings)
        try:
            workload = Workload("tg", 4, 4)
            samples = tuple(contestant.run(workload) for _ in range(2))
            rows.append(
                Row(
                    description=contestant.describe(),
                    workload=workload,
                    samples=samples,
                    peak_rss_bytes=0,
                )
            )
        finally:
            contestant.close()
    alone, two = (describe_row(row)["busy_shares"] for row in rows)
    assert alone == {}
    assert list(two) == ["second"] and 0.0 < two["second"] < 1.0
    conditions = Conditions(machine="x", started="now", load_average=None, tokens="y")
    assert "busy" not in write_markdown(conditions, [Outcome(row=rows[0])])
    table = write_markdown(conditions, [Outcome(row=row) for row in rows])
    assert f"second {two['second']:.1%}" in table


def test_a_run_s_summary_names_units_and_those_that_were_lost() -> None:
    units: dict[str, dict[str, Any]] = {
        "cpu": {"owned_share": 0.7, "computed_share": 0.25, "busy_s": None, "lost": None},
        "second": {"owned_share": 0.3, "computed_share": None, "busy_s": 1.5, "lost": "gone"},
    }
    assert list(summarise_units(units)) == [
        "units: cpu owns 70% of the neurons and computed 25% of those computed · "
        "second owns 30% of the neurons, busy 1.50 s",
        "note: the unit second was lost, the run went on without it: gone",
    ]
    assert list(summarise_units({})) == []
