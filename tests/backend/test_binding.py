"""Compute threads run on the cores that the plan names; threads that read do not."""

import os

import pytest

from pi2.machine import list_allowed_cores
from tests.helpers.programs import start_python

PROGRAM = """
import os
from pathlib import Path
import pi2
from pi2.orchestrator import load

before = os.sched_getaffinity(0)
cores = sorted(before)[:2]
plan = Path(pi2.__file__).parent / "plans/demo.plan.toml"
with load(plan, set={"threads.cores": ",".join(map(str, cores)), "io.engine": "pread"}) as model:
    text = list(model.generate("def f", max_tokens=4))
    for task in Path("/proc/self/task").iterdir():
        caller = task.name == str(os.getpid())
        print("caller" if caller else "other", sorted(os.sched_getaffinity(int(task.name))))
print("after", os.sched_getaffinity(0) == before)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(list_allowed_cores()) < 2, reason="needs two cores to bind threads to")
def test_threads_run_where_the_plan_says() -> None:
    lines = start_python("-c", PROGRAM, check=True).stdout.splitlines()
    every = sorted(os.sched_getaffinity(0))
    assert f"caller [{every[0]}]" in lines, "the calling thread is the first compute thread"
    others = [line for line in lines if line.startswith("other")]
    bound = others.count(f"other [{every[1]}]")
    assert bound == 1, "the second thread has the second core"
    assert others.count(f"other {every}") == len(others) - bound >= 1, "readers are free"
    assert lines[-1] == "after True", "closing gives the cores back"
