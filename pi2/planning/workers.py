"""Where the cells of a sweep are computed: in this process, in several, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pi2.ray_cluster import import_ray, start_ray

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
    ray = import_ray("pip install 'pi2[ray]', or --on processes")
    started = not ray.is_initialized()
    if started:
        start_ray(ray, jobs)
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
