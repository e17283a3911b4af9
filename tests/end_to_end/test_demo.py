"""The demo plan as a user runs it: the issue's own words, one test each."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pi2
from tests.helpers.patience import PATIENCE_S
from tests.helpers.programs import Ask, start_pi2

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "plans" / "demo.plan.toml"
PROMPT = "def read_lines(path):\n"


@pytest.fixture(scope="module", autouse=True)
def quick() -> None:
    """Kernels are optimised, as users' are."""


def run_json(*arguments: str) -> dict[str, Any]:
    done = start_pi2("run", PLAN, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_a_run_reads_neurons_from_flash_and_stays_within_its_budget() -> None:
    result = run_json("--prompt", "def ", "--seed", "1", "--max-tokens", "200", "--ignore-eos")
    assert len(result["token_ids"]) == 200 and result["flash_read_generation_bytes"] > 0
    assert 0 < result["peak_rss_bytes"] <= result["budget_bytes"]
    assert 0.0 < result["cache_hit_rate"] < 1.0 and result["predicted_share"] < 0.3


def test_exact_modes_agree_token_for_token() -> None:
    found = []
    for predictor in ("none", "gate"):
        with pi2.load(PLAN, set={"decode.predictor": predictor}) as model:
            text = model.generate(PROMPT, max_tokens=16, temperature=0.0, ignore_eos=True)
            found.append(text.result.token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(("predictor", "mode"), [("none", "prefill"), ("gate", "decode")])
def test_reference_and_cpu_agree_in_logits(predictor: str, mode: Any) -> None:
    logits = []
    for backend in ("reference", "cpu"):
        settings = {"backends": {"cpu": backend}, "decode.predictor": predictor}
        with pi2.load(PLAN, set=settings) as model:
            ids = model.encode((ROOT / "pi2" / "orchestrator.py").read_text("utf-8"))[:60]
            logits.append(model.logits(ids, mode=mode))
    reference, cpu = logits
    errors = np.linalg.norm(cpu - reference, axis=1) / np.linalg.norm(reference, axis=1)
    assert errors.max() < 1e-2


def test_the_prompt_may_come_from_standard_input_or_a_file(tmp_path: Path, ask: Ask) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("class Stack:\n")
    arguments = ["run", str(PLAN), "--max-tokens", "8"]
    piped = start_pi2(*arguments, input="class Stack:\n")
    assert piped.returncode == 0 and "within the budget" in piped.stderr
    for given in (["-f", str(file)], ["--prompt", "class Stack:\n"]):
        assert ask([*arguments, *given]).out == piped.stdout


@pytest.mark.slow
def test_guessed_tokens_change_nothing_but_the_speed() -> None:
    given = ["run", "demo", "--prompt", "def add(a, b):", "--max-tokens", "32"]
    # Kernels are compiled here: those of other tests are taken, which the program would not find.
    pi2.load(PLAN, set={"decode.speculation.tokens": 4}).close()
    guessing = start_pi2(*given, "-v", "--set", "decode.speculation.tokens=4")
    assert guessing.returncode == 0, guessing.stderr
    assert guessing.stdout == start_pi2(*given).stdout
    assert "\nspeculation: " in guessing.stderr


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_a_name_that_nothing_has_is_told_what_there_is(command: str, ask: Ask) -> None:
    said = ask([command, "dmo"], 2).err
    assert "error[P001]: no file, plan or model has this name" in said
    assert "did you mean demo" in said and "`pi2 list`" in said


def test_an_empty_prompt_begins_a_text(ask: Ask) -> None:
    said = ask(["run", str(PLAN), "--json", "-f", os.devnull, "--max-tokens", "8"])
    assert json.loads(said.out)["prompt_tokens"] == 1


def test_an_interrupt_ends_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pi2", "run", str(PLAN), "--prompt", "def ", "--max-tokens", "1000"]
        + ["--ignore-eos", "--set", 'backends.cpu="reference"'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it has begun to write
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_closed_pipe_ends_quietly() -> None:
    command = f'"{sys.executable}" -m pi2 run "{PLAN}" --prompt x | head -c 1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_text_is_streamed_as_it_is_made() -> None:
    with pi2.load(PLAN, set={"backends": {"cpu": "reference"}}) as model:
        generation = model.generate(PROMPT, max_tokens=12, ignore_eos=True)
        next(generation)
        made = model.scheduler.rounds.whole.tokens
        for _ in generation:
            pass
        assert made < model.scheduler.rounds.whole.tokens / 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt", "x" * 9000], 2, "P601"),
        (["--prompt", "x", "--temperature", "-1"], 2, "P604"),
        (["--prompt", "x", "--set", "weights=nowhere"], 2, "P501"),
        (["--prompt", "x", "--set", 'memory.segments.workspace="64 KiB"'], 1, "workspace"),
        (["--prompt", "x", "--set", 'memory.budget="8 MiB"'], 1, "budget"),
        (["--prompt", "x", "--set", "decode.predictr=gate"], 1, "decode.predictor"),
        (["--prompt", "x", "-f", "x"], 2, "give one of"),
        (["-f", str(ROOT)], 2, "P607"),
        ([], 2, "P603"),
    ],
)
def test_a_mistake_is_a_diagnostic(
    arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    said = ask(["run", str(PLAN), *arguments], code).err
    assert words in said and "Traceback" not in said
