"""`tools/synthesize.py` as its users run it: its store, plan and statistics; killed and again."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import tomlkit

import pi2
from pi2.importing.conversion_job import read_counts
from pi2.store.manifest import read_manifest
from pi2.store.verification import verify_store
from tests.helpers.models import make_model
from tests.helpers.programs import start_python
from tests.helpers.synthetic_stores import SHAPE

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "synthesize.py"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    model = make_model({"shape": {**SHAPE, "layers": 6}, "tied_head": False})
    path = tmp_path / "tiny.model.toml"
    path.write_text(tomlkit.dumps(model.model_dump(mode="json", exclude_none=True)))
    return path


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run_tool(
    environment: dict[str, str], *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    return start_python(TOOL, *arguments, env=environment)


def test_tool_says_of_model_that_nobody_knows(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_tool(environment, "nosuch", tmp_path / "store")
    assert done.returncode == 2 and "P015" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_tool_writes_store_statistics_and_a_plan_that_runs(
    tmp_path: Path, model_file: Path, environment: dict[str, str]
) -> None:
    (tmp_path / ".git").mkdir()  # a project: the plan names a model outside of its own folder
    plan = tmp_path / "plans" / "tiny.plan.toml"
    done = run_tool(
        environment, model_file, tmp_path / "store", "--plan", plan, "--backend", "reference"
    )
    assert done.returncode == 0, done.stderr
    assert "synthetic" in done.stdout
    store = tmp_path / "store"
    statistics = json.loads((store / "statistics.json").read_text())
    assert statistics["synthetic"] is True and statistics["asked"]["skew"] == 0.26
    assert len(statistics["layers"]) == 6
    assert statistics["mean"]["active"] == pytest.approx(0.1, abs=0.02)
    assert read_counts(store / "activations.parquet", 6, 1024)[0].sum() > 0
    assert pq.read_schema(store / "activations.parquet").metadata[b"synthetic"] == b"true"
    assert {"statistics.json", "activations.parquet"} <= {
        entry.path for entry in read_manifest(store).files
    }
    assert verify_store(store) == []

    with pi2.load(plan) as model:
        result = model.generate("def ", max_tokens=24, seed=0).result
        assert len(set(result.token_ids)) > 12, "greedy decoding walks through the vocabulary"
        assert result.statistics.active_share == pytest.approx(0.1, abs=0.04)
        assert result.statistics.hit_rate == 1.0


def test_too_little_memory_for_a_plan_is_explained(
    tmp_path: Path, model_file: Path, environment: dict[str, str]
) -> None:
    plan = tmp_path / "tiny.plan.toml"
    done = run_tool(
        environment, model_file, tmp_path / "store", "--plan", plan, "--memory", "10 MiB"
    )
    assert done.returncode == 2
    assert "error[P552]: 10 MiB of memory is too little" in done.stderr
    assert not plan.exists()


@pytest.mark.slow
def test_a_store_that_is_there_is_measured_not_made_again(
    tmp_path: Path, model_file: Path, environment: dict[str, str]
) -> None:
    store = tmp_path / "store"
    assert run_tool(environment, model_file, store, "--tokens", "32").returncode == 0
    before = (store / "dense.arrow").stat().st_mtime_ns
    again = run_tool(environment, model_file, store, "--tokens", "32")
    assert (store / "dense.arrow").stat().st_mtime_ns == before
    other = run_tool(environment, model_file, store, "--seed", "7")
    assert other.returncode == 2 and "P521" in other.stderr
    assert again.returncode == 0, again.stderr
