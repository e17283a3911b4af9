"""The demo plan on two units as a user runs it: one unit's text, also when the other is lost."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patience import PATIENCE_S
from tests.helpers.programs import start_pi2

ROOT = Path(__file__).parents[2]
ALONE = ROOT / "plans" / "demo.plan.toml"
TWO = ROOT / "plans" / "demo-two-units.plan.toml"
TOKENS = 24
EXACT = (
    'decode.predictor="gate"',
    'decode.activations="fp32"',
    'prefill.activations="fp32"',
    'kv.type="fp32"',
    "memory.budget=160MiB",
    "memory.segments.kv=8MiB",
)
"""It does not matter to the text which unit computes a neuron."""


def list_arguments(plan: Path, *settings: str) -> list[str]:
    arguments = ["run", str(plan), "--prompt", "def read_lines(path):"]
    arguments += ["--temperature", "0", "--max-tokens", str(TOKENS), "--ignore-eos"]
    for setting in (*EXACT, *settings):
        arguments += ["--set", setting]
    return arguments


def run(plan: Path, *settings: str) -> dict[str, Any]:
    done = start_pi2(*list_arguments(plan, *settings), "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(ALONE)


@pytest.mark.parametrize("prompts", ["cpu", "second"])
def test_two_units_write_what_one_writes(alone: dict[str, Any], prompts: str) -> None:
    found = run(TWO, f'prefill.unit="{prompts}"')
    assert len(found["token_ids"]) == TOKENS and found["text"] == alone["text"]
    assert found["flash_read_generation_bytes"] > 0, "the model is larger than the memory"
    assert 0 < found["peak_rss_bytes"] <= found["budget_bytes"]
    units = found["units"]
    assert list(units) == ["cpu", "second"]
    assert (units["cpu"]["owned_share"], units["second"]["owned_share"]) == (0.7, 0.3)
    shares = [unit["computed_share"] for unit in units.values()]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1.0, abs=1e-3)
    assert units["second"]["busy_s"] > 0 and units["second"]["lost"] is None
    assert alone["units"] == {}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_a_run_goes_on_when_a_unit_s_process_is_killed(alone: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "pi2", *list_arguments(TWO)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    first = process.stdout.read(1)
    assert first, process.communicate()[1].decode()
    (worker,) = find_workers(process.pid)
    os.kill(worker, signal.SIGKILL)
    rest, errors = process.communicate(timeout=PATIENCE_S)
    said = errors.decode()
    assert process.returncode == 0, said
    assert (first + rest).decode() == alone["text"] + "\n"
    assert "the run goes on without a unit" in said
    assert "note: the unit second was lost, the run went on without it: its process has" in said


def find_workers(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text("utf-8", errors="replace")
            command = (folder / "cmdline").read_text("utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        own = int(status.rpartition(")")[2].split()[1])
        if own == parent and "pi2.backends.reference.worker" in command:
            found.append(int(folder.name))
    return found
