"""A unit's graphs have shapes that its programs can have.

Why: an NPU's programs have fixed shapes and compute a few tokens in one pass over weights: 1, 2, 4
or 8.  Graphs of a number that is no multiple of these cannot be compiled, one that is named twice
would be compiled twice, and units of other kinds have no graphs.

Example: ``units.npu.graphs.tokens = [1, 3, 128]``, or graphs of a GPU.

Fix: name 1, 2, 4 and multiples of 8, each once, and shares above 0; a job runs the smallest graph
that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.toml.paths import KeyPath

CODE = "P276"
SEVERITY = "error"
NEEDS = ("resolved",)

_STEP = 8


def check(facts: Facts) -> Iterator[Finding]:
    """Look at the graphs of every unit."""
    resolved = facts.resolved
    for name, settings in resolved.plan.units.items():
        graphs, path = settings.graphs, ("units", name, "graphs")
        if graphs is None or name not in resolved.device.units:
            continue
        kind = resolved.device.units[name].kind
        if kind != "npu":
            yield Finding(
                path=path,
                at="key",
                message=f"`{name}` is a {kind.upper()}; only programs of an NPU have fixed shapes",
                help="take the table out",
            )
            continue
        for place, tokens in enumerate(graphs.tokens):
            if tokens not in (1, 2, 4) and tokens % _STEP:
                larger = tokens // _STEP * _STEP + _STEP
                yield Finding(
                    path=(*path, "tokens", place),
                    message=f"no graph computes {tokens} tokens",
                    help=f"write {4 if tokens == 3 else larger}: it holds jobs of {tokens} tokens",
                )
        yield from _find_twice(graphs.tokens, (*path, "tokens"))
        for place, share in enumerate(graphs.shares or ()):
            if share == 0:
                yield Finding(
                    path=(*path, "shares", place),
                    message="a graph of no neurons computes nothing",
                    help="take it out",
                )
        yield from _find_twice(graphs.shares or (), (*path, "shares"))


def _find_twice(values: Sequence[float], path: KeyPath) -> Iterator[Finding]:
    for place, value in enumerate(values):
        if value in values[:place]:
            yield Finding(
                path=(*path, place), message=f"{value:g} is named twice", help="take it out"
            )
