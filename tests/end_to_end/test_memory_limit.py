"""The budget is a promise: a run lives in a control group of that size."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from check_budgets import Trial, run_trial
from limited.memory_group import GroupUnavailable, MemoryGroup
from pi2.caches import VARIABLE
from pi2.costs.cost import count_memory
from pi2.fitting.check import load_plan
from tests.end_to_end.test_demo import PLAN, run_json
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.patience import PATIENCE_S
from tests.helpers.programs import Ask, start_pi2

MIB = 1 << 20
KEYS = 32
"""Numbers of the keys of all heads in the model of `file`."""


@contextmanager
def make_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group of control groups 1 or 2, as this machine has them."""
    try:
        with MemoryGroup(limit_bytes, name="pi2-test") as made:
            yield made
    except GroupUnavailable as reason:
        pytest.skip(f"no control group: {reason}")


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with make_group(load_plan(PLAN).plan.memory.budget) as made:
        yield made


def run_in(group: MemoryGroup, cache: Path, *arguments: str) -> tuple[int, str, str]:
    # PYTHONDONTWRITEBYTECODE: what is written would count as the run's memory.
    process = group.start(
        [sys.executable, "-B", "-m", "pi2", "run", str(PLAN), "--json", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {VARIABLE: str(cache)},
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.fixture(scope="module", autouse=True)
def _compiler_in_memory() -> None:
    """Pages of a file count for the group that reads them first: the compiler's do not."""
    found = importlib.util.find_spec("tvm")
    assert found is not None and found.origin is not None
    for library in Path(found.origin).parent.glob("lib/*.so"):
        library.read_bytes()


@pytest.mark.slow
def test_the_first_run_lives_in_a_group_of_its_budget(group: MemoryGroup, tmp_path: Path) -> None:
    code, out, err = run_in(
        group, tmp_path, "--prompt", "def ", "--max-tokens", "100", "--ignore-eos"
    )
    assert code == 0, err
    assert list(tmp_path.glob("kernels/*.so")), "nothing was compiled"
    assert group.kills == 0
    result = json.loads(out)
    assert len(result["token_ids"]) == 100 and result["peak_rss_bytes"] <= group.limit_bytes
    assert group.peak_bytes is None or group.peak_bytes <= group.limit_bytes


def test_the_group_does_limit(group: MemoryGroup) -> None:
    code = f"x = b'1' * (2 * {group.limit_bytes}); print(len(x))"
    process = group.start([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    assert process.wait(timeout=PATIENCE_S) != 0
    assert group.kills >= 1


READ_AGAIN = """
import os, sys
from pi2.machine import detect_memory
os.posix_fadvise(file := os.open(sys.argv[1], 0), 0, 0, os.POSIX_FADV_DONTNEED)
before = detect_memory().available_bytes
for place in [*range(0, 24 << 20, 1 << 20)] * 3:
    os.pread(file, 1 << 20, place)
print(before - detect_memory().available_bytes)
"""


def test_a_file_that_was_read_three_times_leaves_the_group_its_memory(
    group: MemoryGroup, tmp_path: Path
) -> None:
    """The kernel calls such pages active."""
    file = tmp_path / "file"
    file.write_bytes(bytes(24 * MIB))
    os.sync()  # pages that are not written yet cannot be taken
    process = group.start(
        [sys.executable, "-B", "-c", READ_AGAIN, str(file)], stdout=subprocess.PIPE
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and int(out) < 12 * MIB, out


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a long context and few weights."""
    shape = {"hidden": 256, "ffn": 4096, "layers": 4, "context": 8192}
    return write_random_gguf(tmp_path_factory.mktemp("budgets"), shape)


def make_trial(file: Path, batch: int, prompt: int) -> Trial:
    return Trial(
        file=file, share=0.0, context=2048, prompt=prompt, drafts=6, batch=batch, huge="as is"
    )


@pytest.mark.parametrize(("batch", "prompt"), [(1, 6), (1, 300), (4, 6), (4, 300)])
def test_drafts_of_a_streamed_file_stay_within_a_group_of_the_budget(
    file: Path, batch: int, prompt: int
) -> None:
    trial = make_trial(file, batch, prompt)
    budget = trial.count_budget()
    # Kernels are compiled outside of the group.
    assert run_trial(trial, None, budget, 300).code == 0
    with make_group(budget) as group:
        found = run_trial(trial, group, budget, 300)
    # Speeds gate nothing here.
    assert replace(found, tokens_s=None).list_faults(budget) == [], found.note
    assert found.peak_bytes


def test_segments_say_what_they_state_and_what_they_took(file: Path) -> None:
    given = ["--prompt", "a b", "--max-tokens", "4", "--ignore-eos", "--set", "kv.context=8192"]
    done = start_pi2("run", file, "--json", *given, "--memory", "400MiB", "--set=decode.batch=4")
    segments = json.loads(done.stdout)["segments"]
    kv = segments["kv"]
    # Two tokens of a context touch a page or two of every head, and no large page.
    assert kv["allocated_bytes"] == kv["stated_bytes"] == 4 * 8192 * 4 * KEYS * 4
    assert 0 < kv["taken_bytes"] < 2 * MIB
    assert segments["runtime"]["allocated_bytes"] is None
    assert 20 * MIB < segments["runtime"]["taken_bytes"] <= segments["runtime"]["stated_bytes"]


def test_a_smaller_budget_is_kept_and_explained() -> None:
    resolved = load_plan(PLAN)
    needs = sum(need.bytes for _, need in resolved.needs.items())
    budget = resolved.plan.memory.segments.runtime + needs + 100_000
    assert budget < resolved.plan.memory.budget
    given = ["--prompt", "def ", "--memory", f"{budget} B"]
    result = run_json(*given, "--max-tokens", "20")
    assert result["budget_bytes"] == budget and 0 < result["peak_rss_bytes"] <= budget
    assert {"budget", "cold"} <= {change.split(":")[0] for change in result["budget_changes"]}
    shown = start_pi2("run", PLAN, *given, "--max-tokens", "2")
    assert "memory: budget: 128 MiB -> " in shown.stderr


def test_the_demo_runs_within_100_mib() -> None:
    result = run_json("--prompt", "def ", "--max-tokens", "20", "--memory", "100MiB")
    assert result["peak_rss_bytes"] <= result["budget_bytes"] == 100 * MIB
    assert any(change.startswith("runtime: 111 MiB -> ") for change in result["budget_changes"])


@pytest.mark.parametrize("predictor", ["low-rank", "none"])
def test_a_small_models_peak_is_what_was_predicted_to_3_percent(predictor: str) -> None:
    sets = {"decode.predictor": predictor, "threads.compute": 2}
    text = "def run(self, value):\n    return value\n" * 10
    given = ["--ignore-eos", "--max-tokens=64", *(f"--set={key}={sets[key]}" for key in sets)]
    # Where the system puts an array decides whether it touches one huge page more, of 2 MiB.
    results = [run_json("--prompt", text, *given) for _ in range(2)]
    predicted = count_memory(load_plan(PLAN, overrides=sets), results[0]["prompt_tokens"] + 64)
    assert min(own["peak_rss_bytes"] for own in results) == pytest.approx(predicted, rel=0.03)


def test_a_budget_that_is_too_small_is_refused_with_what_it_takes(ask: Ask) -> None:
    given = ["run", str(PLAN), "--prompt", "def ", "--memory"]
    said = ask([*given, "64MiB"], 2).err
    assert "P611" in said
    assert "64 MiB is not enough for this plan: it needs at least 9" in said
    assert "P612" in ask([*given, "64"], 2).err
