"""`pi2 sweep`: a grid of plans, simulated; what was done is not done again."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest

from pi2 import ray_cluster
from pi2.cli.main import run
from pi2.cli.simulate import expand_references, parse_range
from pi2.diagnostics import UserError
from pi2.planning import sweep
from tests.helpers.shipped_plans import read_device, read_model

GIB = 1 << 30


def make_cells(*memories: int) -> list[sweep.Cell]:
    device = read_device("oneplus-12")
    return sweep.list_cells([device], [read_model("bamboo-7b")], memories, context=1024, tokens=8)


def ignore(label: str, share: float) -> None:
    """Show nothing."""


def test_a_range_has_both_ends() -> None:
    assert parse_range("4GiB:6GiB:1GiB") == [4 * GIB, 5 * GIB, 6 * GIB]
    assert parse_range("4GiB") == [4 * GIB]
    for text in ("4GiB:2GiB:1GiB", "many", "1GiB:2GiB:0B"):
        with pytest.raises(UserError) as caught:
            parse_range(text)
        assert caught.value.diagnostics[0].code == "P105"


def test_more_memory_than_a_device_has_is_left_out() -> None:
    assert len(make_cells(4 * GIB, 100 * GIB)) == 1


def test_cells_become_rows_and_impossible_ones_say_why(tmp_path: Path) -> None:
    output = tmp_path / "results.parquet"
    found = sweep.run_sweep(make_cells(GIB // 2, 3 * GIB, 5 * GIB), output, jobs=1, progress=ignore)
    rows = pq.read_table(output).to_pylist()
    assert [row["code"] for row in rows] == ["P350", None, None]
    assert "at least" in rows[0]["reason"]
    assert rows[1]["simulated_tokens_s"] < rows[2]["simulated_tokens_s"]
    assert rows[1]["p50_ms"] <= rows[1]["p99_ms"]
    assert list(tmp_path.iterdir()) == [output], "nothing else is left behind"
    table = list(sweep.write_summary(found))
    assert any(line.startswith("| oneplus-12 | bamboo-7b | - |") for line in table)


def test_what_was_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, output = make_cells(3 * GIB, 5 * GIB), tmp_path / "results.parquet"
    done: list[int] = []

    def count(cell: sweep.Cell) -> sweep.Outcome:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(cell.memory_bytes)
        return sweep.Outcome(
            key=cell.key, device="d", model="m", memory_bytes=cell.memory_bytes,
            code=None, reason=None,
        )  # fmt: skip

    monkeypatch.setattr(sweep, "run_cell", count)
    with pytest.raises(KeyboardInterrupt):
        sweep.run_sweep(cells, output, jobs=1, progress=ignore)
    journal = output.with_name("results.parquet.cells")
    assert len(journal.read_text().splitlines()) == 1
    with journal.open("a") as file:
        file.write('{"key": "cut o')
    done.clear()
    sweep.run_sweep(cells, output, jobs=1, progress=ignore)
    assert done == [5 * GIB]
    assert [row["memory_bytes"] for row in pq.read_table(output).to_pylist()] == [3 * GIB, 5 * GIB]


def test_a_changed_document_is_another_cell() -> None:
    cell = make_cells(3 * GIB)[0]
    values = json.loads(cell.device)
    values["memory"]["read_bandwidth"]["value"] = "1 GB/s"
    other = sweep.Cell(
        device=json.dumps(values),
        model=cell.model,
        memory_bytes=cell.memory_bytes,
        context=cell.context,
        tokens=cell.tokens,
    )
    assert other.key != cell.key


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "results.parquet")
    arguments = ["--memory", "3GiB:4GiB:1GiB", "--tokens", "8", "--jobs", "1", "-o", output]
    names = ["--devices", "oneplus-12", "--models", "bamboo-7b"]
    assert run(["sweep", *names, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "Simulated tokens/s, not measured" in printed and "Fastest tokens/s" in printed
    assert pq.read_table(output).num_rows == 2


def test_a_pattern_names_files_or_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    names = ["oneplus-12", "oneplus-ace-2", "oneplus-ace-3"]
    assert list(expand_references(("oneplus-*",), "device")) == names
    paths = [f"./plans/devices/{name}.device.toml" for name in names]
    assert list(expand_references(("plans/devices/oneplus-*",), "device")) == paths
    with pytest.raises(UserError):
        list(expand_references(("nothing-*",), "device"))


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pi2[ray]'")
    ray_cluster.start_ray(module, 2)
    yield module
    module.shutdown()


@pytest.mark.slow
def test_ray_runs_a_sweep_as_processes_do(ray: Any, tmp_path: Path) -> None:
    cells = make_cells(GIB // 2, 3 * GIB)
    found = [
        sweep.run_sweep(cells, tmp_path / f"{on}.parquet", jobs=jobs, progress=ignore, on=on)
        for on, jobs in zip(reversed(get_args(sweep.Place)), (2, 1), strict=True)
    ]
    assert found[0] == found[1]
    assert ray.cluster_resources()["CPU"] == 2


@pytest.mark.slow
def test_a_worker_that_is_lost_loses_nothing(ray: Any, tmp_path: Path) -> None:
    assert ray.is_initialized()

    def work(number: int) -> int:
        marker = tmp_path / "lost"
        if number == 2 and not marker.exists():
            marker.touch()
            os._exit(1)
        return number * number

    assert sorted(sweep.run_on_ray(work, range(6), 2)) == [0, 1, 4, 9, 16, 25]
    assert (tmp_path / "lost").exists()


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError) as caught:
        list(sweep.run_on_ray(abs, [1], 1))
    assert caught.value.diagnostics[0].code == "P355"
    assert "pi2[ray]" in (caught.value.diagnostics[0].help or "")
