"""What a run says while it goes and at its end."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pi2.cli.commands import ProgressBar
from pi2.cli.main import run
from pi2.cli.run import hint_reads
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import parse_size
from pi2.plan.reading.references import list_shipped
from pi2.refit import read_plan
from tests.helpers.mixtures import make_mixture_plan

DEMO = list_shipped("plan")["demo"]
QUICK = ["--max-tokens", "3", "--set", "backends.cpu=reference"]


def summarise(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """The labelled lines."""
    capsys.readouterr()
    assert run(["run", *arguments, "--prompt", "def ", *QUICK]) == 0
    lines = capsys.readouterr().err.splitlines()
    return dict(line.split(": ", 1) for line in lines if re.match(r"[a-z ]+: ", line))


def test_every_line_has_a_label(capsys: pytest.CaptureFixture[str]) -> None:
    order = ["speed", "memory", "reads", "exact", "bound by"]
    assert list(summarise(capsys, "demo", "-v"))[:7] == [*order, "neurons", "plan"]
    found = summarise(capsys, "demo")
    assert [label for label in found if label not in ("expected", "hint")] == order
    assert re.search(r"load ([\d.,]+) s", found["speed"])
    assert re.search(r"prefill ([\d.,]+) tokens/s", found["speed"])
    assert re.search(r"decode ([\d.,]+) tokens/s", found["speed"])
    assert re.fullmatch(
        r"peak memory [\d.,]+ (MiB|GiB), (within|ABOVE) the budget of 128 MiB", found["memory"]
    )
    assert re.search(r"a token · cache hits [\d.]+% of the neurons needed", found["reads"])
    assert re.search(r"\(\d+% of the time waited for reads\)", found["bound by"])


@pytest.mark.parametrize(
    ("settings", "exact"),
    [
        (["decode.predictor=low-rank"], "no, low-rank predictors choose the neurons"),
        (["decode.predictor=gate"], "yes"),
        (["decode.predictor=none"], "yes"),
        (["decode.predictor=gate", "kv.type=int8"], "no, the KV cache is int8"),
    ],
)
def test_a_run_says_whether_it_is_exact(
    settings: list[str], exact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [part for setting in settings for part in ("--set", setting)]
    assert summarise(capsys, "demo", *given)["exact"] == exact
    assert run(["run", "demo", *given, "--prompt", "def ", *QUICK, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] == (exact == "yes") == (document["deviations"] == [])
    assert document["bound_by"] in ("disk", "processor and memory")
    assert 0 <= document["read_wait_share"] <= 1


def test_a_mixture_that_leaves_nothing_out_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_mixture_plan(tmp_path, "silu", {"predictor": None})
    router = ["--set", "decode.predictor=router"]
    assert summarise(capsys, str(plan), *router)["exact"] == "yes"


def test_a_dry_run_is_bound_by_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    command = ["run", "demo", "--set", "backends.cpu=null", "--prompt", "x", "--max-tokens", "2"]
    assert run(command) == 0
    said = capsys.readouterr().err
    assert "dry run: " in said and "bound by" not in said


def find_memory(hint: str | None) -> int:
    match = re.search(r"--memory '([^']+)'", hint or "")
    assert match is not None, hint
    return parse_size(match[1])


def small() -> ResolvedPlan:
    return read_plan(DEMO, memory_bytes=99 << 20).resolved


def test_the_hint_is_the_memory_that_keeps_all_neurons() -> None:
    resolved = small()
    whole = find_memory(hint_reads(resolved, 1 << 30))
    fitted = read_plan(DEMO, memory_bytes=whole).resolved
    segments = fitted.plan.memory.segments
    neurons = 8 * 1024 * 512
    assert segments.hot + segments.cold >= neurons


def test_a_machine_without_so_much_memory_gets_another_hint() -> None:
    resolved = load_plan(list_shipped("plan")["cloud-vm-zen5/bamboo-7b"])
    room = 2 * resolved.plan.memory.budget
    hint = hint_reads(resolved, room)
    if hint is not None and "keeps all" not in hint:
        assert find_memory(hint) <= room
    router = replace(
        resolved,
        plan=resolved.plan.model_copy(
            update={"decode": resolved.plan.decode.model_copy(update={"predictor": "router"})}
        ),
    )
    told = hint_reads(router, resolved.plan.memory.budget)
    assert told == "--set decode.look_ahead=layer reads experts before they are needed"


def test_a_budget_that_is_too_small_is_a_finding() -> None:
    with pytest.raises(UserError, match="a budget of 8 MiB is not enough") as caught:
        read_plan(DEMO, overrides={"memory.budget": "8 MiB"})
    assert caught.value.exit_code == 1


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("pi2.cli.commands.time.monotonic", found)
    return found


def test_a_pipe_gets_one_line_of_what_takes_long(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar() as bar:
        bar("compiling kernels", 0.0)
        assert capsys.readouterr().err == ""
        clock.now = 2.0
        for share in (0.1, 0.5, 1.0):
            bar("compiling kernels", share)
        bar("loading neurons", 0.5)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "compiling kernels...\n")


def test_a_pipe_gets_nothing_of_what_is_quick_or_done(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar() as bar:
        bar("compiling kernels", 0.9)
        clock.now = 2.0
        bar("compiling kernels", 1.0)
    assert capsys.readouterr().err == ""
