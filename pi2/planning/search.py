"""The best plan of a problem: every combination of choices spends its memory on the neurons that
save the most time for a byte.

Time falls along a convex curve with the neurons in memory, so steps taken in the order of what a
byte saves are the best for any memory (fractional knapsack)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

from pi2.costs.activity import LOOK_AHEAD_MODES
from pi2.costs.reads import IoChoice
from pi2.costs.settings import LookAhead
from pi2.fitting.budget import MIB, SHARE_STEPS
from pi2.planning.problem import ChunkChoice, EmbeddingChoice, KvChoice, Mode, Point, Problem

Goal = Literal["time", "memory", "energy"]
_PROMPT_PART = 0.03
"""What a prompt's token counts for against a generated one."""
_BYTE_WORTH = {"time": 1e-15, "memory": 1e-6, "energy": 1e-15}
"""Seconds, or joules, that a byte must save: a microsecond for a gigabyte, or a second for a
megabyte where the least memory is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choices of the best plan."""

    mode: Mode
    kv: KvChoice
    embedding: EmbeddingChoice
    chunk: ChunkChoice
    io: IoChoice
    look_ahead: LookAhead
    resident: tuple[float, ...]
    """Share of neurons in memory by group of layers."""
    dense: tuple[float, ...]
    """Share that a dense unit computes, by group."""
    lent_bytes: float
    """What the cache has of the context's memory."""
    token_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """From a point of a group's curve to the next, in all of its layers."""

    group: int
    before: Point
    after: Point
    bytes: float
    seconds: float
    """Change of a token's time, negative as a rule."""
    worth: float
    """Seconds or joules that a byte saves, as a mean up to the next corner of the convex line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """Curves of a mode: the points with the least memory, and steps from there, best first."""

    mode: Mode
    first: tuple[Point, ...]
    steps: tuple[_Step, ...]


def find_best(
    problem: Problem, goal: Goal, *, memory_bytes: float | None = None, token_s: float | None = None
) -> list[Solution]:
    """The best plan of each mode within the limits, the best first."""
    power_w = problem.rates.power_w or 1.0
    ranked: list[tuple[float, Solution]] = []
    for mode in problem.modes:
        best: tuple[float, Solution] | None = None
        path = _draw_path(problem, mode, goal)
        for kv, embedding, chunk in product(problem.kvs, problem.embeddings, problem.chunks):
            most_s = float("inf") if token_s is None else token_s
            bare = Solution(
                mode=mode,
                kv=kv,
                embedding=embedding,
                chunk=chunk,
                io=problem.ios[0],
                look_ahead=problem.look_aheads[-1]
                if mode.predictor in LOOK_AHEAD_MODES
                else "none",
                resident=(),
                dense=(),
                lent_bytes=0.0,
                token_s=problem.head_s + kv.token_s + embedding.token_s,
                memory_bytes=_count_fixed(problem, mode, kv, embedding, chunk),
            )
            for found, dense_j in _lend(problem, path, bare, goal, memory_bytes, most_s):
                prompt_s = _PROMPT_PART * _time_prompt_token(problem, chunk)
                match goal:
                    case "memory":
                        score = found.memory_bytes + (found.token_s + prompt_s) * 1e6
                    case "energy":
                        score = power_w * (found.token_s + prompt_s) + dense_j
                    case "time":
                        score = found.token_s + prompt_s
                score += found.memory_bytes * 1e-15
                if best is None or score < best[0]:
                    best = score, found
        ranked += [] if best is None else [best]
    return [solution for _, solution in sorted(ranked, key=lambda item: item[0])]


def _time_prompt_token(problem: Problem, chunk: ChunkChoice) -> float:
    """Seconds per prompt token that depend on the chunk: all neurons stream or unpack."""
    layers = sum(group.count for group in problem.groups)
    size = layers * problem.neurons * problem.stride
    flash = problem.rates.flash
    rate = problem.rates.gather.bytes_s if flash is None else flash.find_stream_rate()
    return size / rate / chunk.tokens + chunk.pass_s


def _count_fixed(
    problem: Problem, mode: Mode, kv: KvChoice, embedding: EmbeddingChoice, chunk: ChunkChoice
) -> float:
    """Bytes of everything but neurons, and for rounding."""
    spare = 2.0 * MIB  # sizes are written in whole MiB, rounded up: hot, and the cache
    if problem.unit_bytes is not None:
        # A unit's share is rounded down, and what that leaves is in main memory.
        layers = sum(group.count for group in problem.groups)
        spare += layers * problem.neurons * problem.stride / SHARE_STEPS
    spare += problem.unit_rows_bytes
    fixed = mode.predictor_bytes + kv.bytes + embedding.bytes + chunk.workspace_bytes
    return problem.runtime_bytes + spare + fixed


def _weigh(problem: Problem, goal: Goal, point: Point) -> float:
    """What a point of a curve costs: seconds, or joules."""
    if goal != "energy":
        return point.seconds
    return (problem.rates.power_w or 1.0) * point.seconds + _add_power(problem) * point.dense_s


def _add_power(problem: Problem) -> float:
    rates = problem.rates
    return max((rates.both_w or 0.0) - (rates.power_w or 0.0), 0.0)


def _draw_path(problem: Problem, mode: Mode, goal: Goal) -> _Path:
    first, steps = [], []
    for number, (group, curve) in enumerate(zip(problem.groups, mode.curves, strict=True)):
        rungs = _list_rungs(curve, [_weigh(problem, goal, point) for point in curve])
        hull = _find_hull(rungs)
        first.append(rungs[0][0])
        for (low, cost), (high, less) in pairwise(hull):
            worth = (cost - less) / (high.bytes - low.bytes)
            between = [point for point, _ in rungs if low.bytes <= point.bytes <= high.bytes]
            for before, after in pairwise(between):
                steps.append(
                    _Step(
                        group=number,
                        before=before,
                        after=after,
                        bytes=group.count * (after.bytes - before.bytes),
                        seconds=group.count * (after.seconds - before.seconds),
                        worth=worth,
                    )
                )
    steps.sort(key=lambda step: -step.worth)
    return _Path(mode=mode, first=tuple(first), steps=tuple(steps))


def _list_rungs(curve: Sequence[Point], costs: Sequence[float]) -> list[tuple[Point, float]]:
    """Points with their costs, each larger and cheaper than the one before."""
    rungs: list[tuple[Point, float]] = []
    for point, cost in sorted(zip(curve, costs, strict=True), key=lambda item: item[0].bytes):
        if rungs and cost >= rungs[-1][1]:
            continue
        if rungs and point.bytes <= rungs[-1][0].bytes + 1.0:
            rungs.pop()
        rungs.append((point, cost))
    return rungs


def _find_hull(rungs: Sequence[tuple[Point, float]]) -> list[tuple[Point, float]]:
    """The rungs on the convex line below all."""
    hull: list[tuple[Point, float]] = []
    for rung in rungs:
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], rung):
            hull.pop()
        hull.append(rung)
    return hull


def _turns_down(a: tuple[Point, float], b: tuple[Point, float], c: tuple[Point, float]) -> bool:
    return (b[1] - a[1]) * (c[0].bytes - a[0].bytes) >= (c[1] - a[1]) * (b[0].bytes - a[0].bytes)


_HALVINGS = 8


def _lend(
    problem: Problem,
    path: _Path,
    bare: Solution,
    goal: Goal,
    memory_bytes: float | None,
    most_s: float,
) -> Iterator[tuple[Solution, float]]:
    """Without lending, and with as much of the context's memory as the cache may have."""
    yield from _spend(problem, path, bare, goal, memory_bytes, most_s)
    low, high = 0.0, float(bare.kv.lent_bytes)
    found: list[tuple[Solution, float]] = []
    for number in range(_HALVINGS if path.mode.lends and high > 0.0 else 0):
        lent = high if number == 0 else (low + high) / 2
        bare = replace(bare, lent_bytes=lent)
        tried = list(_spend(problem, path, bare, goal, memory_bytes, most_s))
        if tried and number == 0:
            yield from tried
            return
        low, high, found = (lent, high, tried) if tried else (low, lent, found)
    yield from found


def _spend(
    problem: Problem,
    path: _Path,
    bare: Solution,
    goal: Goal,
    memory_bytes: float | None,
    most_s: float,
) -> Iterator[tuple[Solution, float]]:
    """The path as far as memory goes, or as the goal wants it, and joules of the dense unit;
    nothing where the limits do not let it begin or end."""
    groups, points = problem.groups, list(path.first)
    seconds = bare.token_s + sum(
        group.count * point.seconds for group, point in zip(groups, points, strict=True)
    )
    size = (
        bare.memory_bytes
        - bare.lent_bytes
        + sum(group.count * point.bytes for group, point in zip(groups, points, strict=True))
    )
    limit = float("inf") if memory_bytes is None else memory_bytes
    if size > limit:
        return
    mode, layer = path.mode, problem.neurons * problem.stride
    # Once the context is full, the cache has to work with what is its own.
    cold, least = 0.0, mode.least_cold_bytes + bare.lent_bytes if mode.lends else 0.0
    for step in path.steps:
        part = min((limit - size) / step.bytes, 1.0)
        added = groups[step.group].count * mode.cache_shares[step.group] * layer
        added *= step.after.resident - step.before.resident
        if step.worth < _BYTE_WORTH[goal]:
            needed = (least - cold) / added if cold < least and added > 0.0 else 0.0
            if seconds > most_s and step.seconds < 0.0:
                needed = max(needed, (most_s - seconds) / step.seconds)
            part = min(part, needed)
        points[step.group] = _mix(step.before, step.after, part)
        size, seconds = size + part * step.bytes, seconds + part * step.seconds
        cold += part * added
        if part < 1.0:
            break
    if cold < least * (1.0 - 1e-9) or seconds > most_s * (1.0 + 1e-9):
        return
    dense_s = sum(group.count * p.dense_s for group, p in zip(groups, points, strict=True))
    solution = replace(
        bare,
        resident=tuple(point.resident for point in points),
        dense=tuple(point.dense for point in points),
        token_s=seconds,
        memory_bytes=size,
    )
    yield solution, _add_power(problem) * dense_s


def _mix(before: Point, after: Point, part: float) -> Point:
    def mix(first: float, second: float) -> float:
        return first + part * (second - first)

    return Point(
        resident=mix(before.resident, after.resident),
        dense=mix(before.dense, after.dense),
        bytes=mix(before.bytes, after.bytes),
        seconds=mix(before.seconds, after.seconds),
        dense_s=mix(before.dense_s, after.dense_s),
    )
