"""Where the cells of a sweep are computed: in this process, in several, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from pi2.diagnostics import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")
RETRIES = 3
"""Times that Ray starts a task again whose worker was lost."""
_AHEAD = 4
"""Tasks for each worker that Ray is given before it has done the first."""


class WorkersLost(Exception):
    """Workers ended before their work did; what they had done was given back."""


def run_in_processes(
    run: Callable[[Task], Result], tasks: Sequence[Task], jobs: int
) -> Iterator[Result]:
    """Yield results as they come; raises `WorkersLost`."""
    if jobs == 1:
        yield from map(run, tasks)
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for job in as_completed([pool.submit(run, task) for task in tasks]):
                yield job.result()
    except BrokenProcessPool:
        raise WorkersLost from None


def run_on_ray(
    run: Callable[[Task], Result], tasks: Sequence[Task], jobs: int | None
) -> Iterator[Result]:
    """Results as they come, from the cluster that RAY_ADDRESS names, else from one that is started
    on this machine with ``jobs`` workers.

    Ray runs a task whose worker was lost again, `RETRIES` times; then raises `WorkersLost`.
    `UserError` P355 without Ray, or where there is no such cluster.
    """
    ray = _import_ray()
    started = not ray.is_initialized()
    if started:
        _start(ray, jobs)
    try:
        remote = ray.remote(max_retries=RETRIES)(run)
        workers = jobs or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting = list(reversed(tasks))
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < workers * _AHEAD:
                running.append(remote.remote(waiting.pop()))
            done, running = ray.wait(running)
            for job in done:
                try:
                    yield ray.get(job)
                except ray.exceptions.WorkerCrashedError:
                    raise WorkersLost from None
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None
    finally:
        if started:
            ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError.of(
            "P355", "ray is not installed", help="pip install 'pi2[ray]', or --on processes"
        ) from None
    return ray


def _start(ray: Any, jobs: int | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS")
    # Workers of this machine find what this process finds; those of a cluster have pi2 installed.
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([root, *(item for item in sys.path if item)])
    local: dict[str, Any] = {
        "num_cpus": jobs or os.cpu_count() or 1,
        "include_dashboard": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
    }
    try:
        ray.init(log_to_driver=False, logging_level="error", **({} if address else local))
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError.of(
            "P355",
            f"no Ray cluster at {address or 'this machine'}: {reason}",
            help="start one with `ray start --head`, or leave RAY_ADDRESS unset",
        ) from None
