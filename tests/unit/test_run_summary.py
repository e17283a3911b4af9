"""What a run says while it goes and at its end."""

import io
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from pi2.cli.run import choose_hint, hint_reads
from pi2.diagnostics import UserError
from pi2.engine.statistics import Cause, RunStatistics, split_time
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.quantities import parse_size
from pi2.plan.reading.references import list_shipped
from pi2.progress import ProgressBar
from pi2.refit import read_plan
from tests.helpers.programs import Ask
from tests.helpers.tables import in_table

DEMO = list_shipped("plan")["demo"]
QUICK = ["--max-tokens", "3", "--set", "backends.cpu=reference"]


def summarise(ask: Ask, *arguments: str) -> dict[str, str]:
    lines = ask(["run", *arguments, "--prompt", "def ", *QUICK]).err.splitlines()
    return dict(line.split(": ", 1) for line in lines if re.match(r"[a-z ]+: ", line))


def test_every_line_has_a_label(ask: Ask) -> None:
    order = ["speed", "memory", "reads", "exact", "bound by"]
    assert list(summarise(ask, "demo", "-v"))[:8] == [*order, "segments", "neurons", "plan"]
    found = summarise(ask, "demo")
    assert [label for label in found if label not in ("expected", "hint")] == order
    assert re.search(r"load ([\d.,]+) s", found["speed"])
    assert re.search(r"prefill ([\d.,]+) tokens/s", found["speed"])
    assert re.search(r"decode ([\d.,]+) tokens/s", found["speed"])
    assert re.fullmatch(
        r"peak memory [\d.,]+ (MiB|GiB), (within|ABOVE) the budget of 128 MiB", found["memory"]
    )
    assert re.search(r"a token · cache hits [\d.]+% of the neurons needed", found["reads"])
    share = r"\d+% (disk|waiting for reads|memory bandwidth|compute)"
    assert re.fullmatch(
        rf"\w[\w ]+ \({share}(, {share})* of the time; memory gives [\d.]+ GB/s\)",
        found["bound by"],
    )


@in_table
def test_a_run_says_whether_it_is_exact(settings: list[str], exact: str, ask: Ask) -> None:
    given = [part for setting in settings for part in ("--set", setting)]
    assert summarise(ask, "demo", *given)["exact"] == exact
    document = json.loads(ask(["run", "demo", *given, "--prompt", "def ", *QUICK, "--json"]).out)
    assert document["exact"] == (exact == "yes") == (document["deviations"] == [])
    shares = document["time_shares"]
    assert document["bound_by"] == max(shares, key=shares.get)
    assert sum(shares.values()) == pytest.approx(1, abs=0.001)
    assert document["memory_bytes_s"] > 0


STEPS = RunStatistics(steps_s=10.0, step_bytes=20 * 10**9, steps_read_bytes=10**9)
"""Ten seconds of steps, and no prompt."""


@pytest.mark.parametrize(
    ("changes", "rates", "expected"),
    [
        # 20 GB of weights at 2.5 GB/s take 8 of 10 seconds.
        ({}, (2.5e9, None), {"memory bandwidth": 0.8, "compute": 0.2}),
        ({}, (10e9, None), {"memory bandwidth": 0.2, "compute": 0.8}),
        # Memory was faster than measured: it cannot take more time than there is.
        ({}, (1e9, None), {"memory bandwidth": 1.0}),
        ({"steps_waited_s": 6.0}, (10e9, None), {"disk": 0.6, "memory bandwidth": 0.2}),
        # The disk reads 1 GB in a second; for five more nobody had asked it.
        ({"steps_waited_s": 6.0}, (10e9, 1e9), {"disk": 0.1, "waiting for reads": 0.5}),
        ({"steps_waited_s": 6.0}, (10e9, 1e8), {"disk": 0.6, "waiting for reads": 0.0}),
        # A run of one token made no step: its prompt counts.
        (
            {"steps_s": 0.0, "prefill_s": 4.0, "waited_s": 1.0, "flash_read_bytes": 10**9},
            (10e9, 2e9),
            {"disk": 0.125, "waiting for reads": 0.125, "memory bandwidth": 0, "compute": 0.75},
        ),
    ],
)
def test_time_is_split_between_what_was_measured_and_counted(
    changes: dict[str, Any], rates: tuple[float, float | None], expected: dict[Cause, float]
) -> None:
    shares = split_time(replace(STEPS, **changes), *rates)
    assert {name: shares[name] for name in expected} == pytest.approx(expected)
    assert sum(shares.values()) == pytest.approx(1)
    assert split_time(RunStatistics(), *rates) == {}, "no steps and no prompt"


def test_the_hint_fits_what_bounds_the_run() -> None:
    resolved = small()
    room = {"room_bytes": 1 << 30, "cores": 8}
    threads = set_keys(resolved, "threads", compute=2)
    assert (choose_hint(threads, "compute", **room) or "").startswith("--set threads.compute=8")
    assert choose_hint(resolved, "compute", **room) is None
    memory = choose_hint(resolved, "memory bandwidth", **room)
    assert (memory or "").startswith("--set decode.speculation.tokens=")
    assert find_memory(choose_hint(resolved, "disk", **room)) > resolved.plan.memory.budget
    late = set_keys(resolved, "decode", predictor="low-rank", look_ahead="none")
    waits = choose_hint(late, "waiting for reads", **room)
    assert (waits or "").startswith("--set decode.look_ahead=layer")
    threaded = set_keys(set_keys(late, "decode", look_ahead="layer"), "io", engine="pread")
    waits = choose_hint(threaded, "waiting for reads", **room)
    assert (waits or "").startswith("--set io.engine=io_uring")


def set_keys(resolved: ResolvedPlan, table: str, **values: object) -> ResolvedPlan:
    own = getattr(resolved.plan, table).model_copy(update=values)
    return replace(resolved, plan=resolved.plan.model_copy(update={table: own}))


def test_a_dry_run_is_bound_by_nothing(ask: Ask) -> None:
    command = ["run", "demo", "--set", "backends.cpu=null", "--prompt", "x", "--max-tokens", "2"]
    said = ask(command).err
    assert "dry run: " in said and "bound by" not in said


def find_memory(hint: str | None) -> int:
    match = re.search(r"--memory '([^']+)'", hint or "")
    assert match is not None, hint
    return parse_size(match[1])


def small() -> ResolvedPlan:
    return read_plan(DEMO, memory_bytes=99 << 20).resolved


def test_the_hint_is_the_memory_that_keeps_all_neurons() -> None:
    whole = find_memory(hint_reads(small(), 1 << 30))
    segments = read_plan(DEMO, memory_bytes=whole).resolved.plan.memory.segments
    neurons = 8 * 1024 * 512
    assert segments.hot + segments.cold >= neurons


def test_a_machine_without_so_much_memory_gets_another_hint() -> None:
    resolved = load_plan(list_shipped("plan")["cloud-vm-zen5/bamboo-7b"])
    room = 2 * resolved.plan.memory.budget
    hint = hint_reads(resolved, room)
    if hint is not None and "keeps all" not in hint:
        assert find_memory(hint) <= room


def test_a_budget_that_is_too_small_is_a_finding() -> None:
    with pytest.raises(UserError, match="a budget of 8 MiB is not enough") as caught:
        read_plan(DEMO, overrides={"memory.budget": "8 MiB"})
    assert caught.value.exit_code == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("pi2.progress.time.monotonic", found)
    return found


def test_a_pipe_gets_no_progress(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        for clock.now, share in ((0.0, 0.0), (2.0, 0.5), (4.0, 1.0)):
            bar("compiling kernels", share)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_reports_once_and_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("pi2.progress.PATIENCE_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar() as bar:
        bar("planning", 0.0)
        for _ in range(1000):
            if "planning" in screen.getvalue():
                break
            time.sleep(0.01)
    assert "planning" in screen.getvalue()
