"""A core for every bound compute thread, and no core twice.

Why: two threads that are bound to one core take turns, and every layer waits for both.

Example: ``threads.cores = "4-6"`` with ``threads.compute = 4``; ``"0,0"``; ``"7-4"``.

Fix: name as many different cores as there are compute threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.selectors import list_cores, parse_selector

CODE = "P236"
SEVERITY = "error"
NEEDS = ("plan",)

MOST_CORES = 1024
"""Bound of the numbers of cores; a plan may ask for as many threads."""


def check(facts: Facts) -> Iterator[Finding]:
    """Compare ``threads.cores`` with itself and with the number of threads."""
    threads = facts.plan.threads
    if threads.cores is None:
        return
    path = ("threads", "cores")
    for first, last in parse_selector(threads.cores):
        if first > last:
            yield Finding(
                path=path,
                message=f"the range {first}-{last} is reversed and names no core",
                help=f'write "{last}-{first}"',
            )
            return
        if last >= MOST_CORES:
            yield Finding(path=path, message=f"no machine has a core {last}")
            return
    cores = list_cores(threads.cores)
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        yield Finding(
            path=path,
            message=f"core {twice[0]} is named twice",
            help="two threads on one core take turns: name different ones",
        )
    elif threads.compute is not None and threads.compute != len(cores):
        yield Finding(
            path=path,
            message=f"{len(cores)} cores for {threads.compute} compute threads",
            help="name a core for each thread, or leave threads.compute out",
            origins=(
                Origin(
                    document="plan",
                    path=("threads", "compute"),
                    text=f"compute = {threads.compute}",
                ),
            ),
        )
