"""The course of a benchmark: turns, processes, and how their failures are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.diagnostics import UserError
from pi2.engine.accounts import TokenBytes
from pi2.measuring.contestant import BandwidthLimit, Profile, RemoteContestant, Worker
from pi2.measuring.report import Bandwidth, Description, Sample, Workload
from pi2.measuring.session import Course, run_session
from pi2.progress import Progress, ignore_progress
from tests.helpers.patience import PATIENCE_S
from tools.bench_against import Other, keep_whole

# The course of a session


@dataclass
class FakeContestant(RemoteContestant):
    name: str
    log: list[str]
    seconds: list[float]
    description: Description = field(init=False)

    def __post_init__(self) -> None:
        self.description = Description(
            engine=self.name, model="m", backend="b", threads=1, synthetic=False
        )

    def run(self, workload: Workload) -> Sample:
        self.log.append(f"{self.name} {workload.name}")
        return Sample(tokens=workload.tokens, seconds=self.seconds.pop(0))

    def profile(self, workload: Workload) -> Profile | None:
        self.log.append(f"{self.name} profile")
        return None

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        return None

    def read_peak_rss_bytes(self) -> int:
        return 1


@dataclass
class FakeLimit(BandwidthLimit):
    log: list[str]
    speeds: list[float]

    def measure(self) -> list[float]:
        self.log.append("limit")
        return [self.speeds.pop(0)]

    def summarise(self, speeds: list[float]) -> Bandwidth:
        return Bandwidth(bytes_s=float(np.median(speeds)), threads=1, method="fake")


def test_contestants_take_turns_after_a_warm_up_with_the_limit_in_between() -> None:
    log: list[str] = []
    a = FakeContestant("a", log, [99.0, 1.0, 2.0])
    b = FakeContestant("b", log, [99.0, 4.0, 8.0])
    outcomes = list(
        run_session(
            [a, b],
            Course(workloads=[Workload("tg", 8, 0)], repetitions=2),
            FakeLimit(log, [3e9, 9e9, 5e9]),
        )
    )
    assert log == [
        *("a tg8", "b tg8"),
        *("limit", "a tg8", "b tg8", "a tg8", "b tg8", "limit", "limit"),
    ]
    rows = [item.row for item in outcomes]
    assert [row.description.engine for row in rows] == ["a", "b"]
    assert rows[0].speed.median == pytest.approx((8 + 4) / 2), "the warm-up of 99 s is left out"
    assert rows[1].speed.median == pytest.approx((2 + 1) / 2)
    assert rows[0].bandwidth is not None and rows[0].bandwidth.bytes_s == 5e9


def test_numbers_of_sequences_take_turns_and_depths_do_not() -> None:
    log: list[str] = []
    a = FakeContestant("a", log, [9.0, 9.0, 2.0, 1.0, 2.0, 1.0, 9.0, 1.0, 1.0])
    workloads = [Workload("tg", 8, 0, 1), Workload("tg", 8, 0, 4), Workload("tg", 8, 32, 1)]
    limit = FakeLimit(log, [1.0] * 6)
    course = Course(workloads=workloads, repetitions=2)
    rows = [item.row for item in run_session([a], course, limit)]
    assert [entry for entry in log if entry != "limit"] == [
        *(("a tg8 x 1", "a tg8 x 4") * 3),
        *(("a tg8 x 1 @ d32",) * 3),
    ]
    assert [row.workload for row in rows] == workloads
    assert [row.sequences for row in rows] == [1, 4, 1]
    assert [row.speed.median for row in rows] == [4.0, 8.0, 8.0]


# Processes
@dataclass
class Echo:
    """A recipe, and what it makes."""

    fault: str = ""

    def __call__(self, progress: Progress) -> Echo:
        progress("loading", 0.5)
        if self.fault == "user":
            raise UserError.of("P999", "no such thing", help="look elsewhere")
        if self.fault == "bug":
            raise ZeroDivisionError("a bug")
        return self

    def double(self, value: int) -> int:
        if value < 0:
            raise UserError.of("P998", "negative")
        return 2 * value

    def die(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def say_who_and_sleep(self, path: str) -> None:
        written = Path(f"{path}.partial")
        written.write_text(str(os.getpid()))
        written.rename(path)
        time.sleep(300.0)

    def close(self) -> None:
        pass


@dataclass
class Crashing(Echo):
    """An engine that ends in its second run."""

    runs: int = 0

    def describe(self) -> Description:
        return Description(engine="b", model="m", backend="b", threads=1, synthetic=False)

    def run(self, workload: Workload) -> Sample:
        self.runs += 1
        if self.runs == 2:
            self.die(signal.SIGSEGV)
        return Sample(tokens=workload.tokens, seconds=1.0)


def test_an_engine_that_crashes_is_left_out_of_a_comparison() -> None:
    log: list[str] = []
    course = Course(workloads=[Workload("pp", 8, 0), Workload("tg", 8, 0)], repetitions=2)
    a = FakeContestant("a", log, [99.0, 1.0, 2.0] * 2)
    with Other(Crashing(), ignore_progress, "b") as b:
        outcomes = keep_whole(run_session([a, b], course, FakeLimit(log, [1.0] * 6)))
    assert [item.row.description.engine for item in outcomes] == ["a", "a"]
    assert b.lost is not None and b.lost.diagnostics[0].message == "b was ended by SIGSEGV"


def test_objects_are_called_in_a_process_of_their_own() -> None:
    seen: list[tuple[str, float]] = []
    worker = Worker(Echo(), lambda label, share: seen.append((label, share)))
    try:
        assert worker.call("double", 21) == 42 and worker.read_peak_rss_bytes() > 2**20
    finally:
        worker.close()
    assert seen == [("loading", 0.5)]


def test_a_users_mistake_arrives_as_what_it_was() -> None:
    with pytest.raises(UserError) as caught:
        Worker(Echo(fault="user"))
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.help) == ("P999", "look elsewhere")
    assert caught.value.exit_code == 2

    worker = Worker(Echo())
    with pytest.raises(UserError, match="negative"):
        worker.call("double", -1)
    worker.close()


def test_a_bug_arrives_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: a bug"):
        Worker(Echo(fault="bug"))


@pytest.mark.parametrize(
    ("subject", "number", "advice"),
    [("llama.cpp", signal.SIGSEGV, "another build"), ("pi2", signal.SIGKILL, "memory")],
)
def test_a_process_that_is_ended_is_named_and_explained(
    subject: str, number: signal.Signals, advice: str
) -> None:
    worker = Worker(Echo(), subject=subject)
    with pytest.raises(UserError) as caught:
        worker.call("die", number)
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.message) == ("P640", f"{subject} was ended by {number.name}")
    assert advice in (finding.help or "")
    worker.close()


_KILLED_CALLER = """
import sys, time
from pi2.measuring.contestant import Worker
from tests.unit.test_bench_session import Echo
from tests.helpers.patience import PATIENCE_S

if __name__ == "__main__":
    Worker(Echo()).call("say_who_and_sleep", sys.argv[1])
"""


def test_a_process_ends_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    script, said = tmp_path / "caller.py", tmp_path / "said"
    script.write_text(_KILLED_CALLER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    caller = subprocess.Popen([sys.executable, str(script), str(said)], env=environment)
    try:
        worker = int(_wait_for(lambda: said.read_text() if said.exists() else ""))
    finally:
        caller.kill()
        caller.wait()
    assert _wait_for(lambda: not Path(f"/proc/{worker}").exists()), "it goes on"


def _wait_for(find: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := find()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
