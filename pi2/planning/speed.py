"""Wishes for a speed: plans for several memories, until the least that suffices is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import floor, log10
from typing import TYPE_CHECKING, TypeVar

from pi2.costs.cost import Cost, cost_plan
from pi2.diagnostics import Diagnostic, UserError
from pi2.fitting.budget import MIB
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.documents.quantities import (
    approximate_bytes,
    approximate_number,
    compare_bytes,
    write_least,
    write_most,
)
from pi2.plan.weights.layout import round_up
from pi2.planning.wish import Wish

if TYPE_CHECKING:
    from pi2.planning.planner import PlannedPlan

_CLOSE = 1 / 1024
"""Part of a memory that is not worth another plan."""
_MARGINS = (1.0, 0.9, 0.8, 0.65, 0.5)
"""Parts of the time of a token that the program may take for a plan of least energy."""

_Given = TypeVar("_Given", Wish, int)
Planner = Callable[[Wish], "PlannedPlan"]
"""The best plan within a memory, however fast; UserError where there is none."""


def find_device_memory(device: Device) -> int | None:
    """Bytes that a process may have; None where the device leaves it to the machine."""
    memory = device.memory
    return memory.usable if memory.usable is not None else memory.capacity


def check_device_memory(wish: Wish) -> int | None:
    """The device's memory; UserError P350 where a wish is for more."""
    limit = find_device_memory(wish.device)
    if limit is not None and wish.memory_bytes is not None and wish.memory_bytes > limit:
        has, asked = compare_bytes(limit, wish.memory_bytes)
        raise UserError.of(
            "P350",
            f"the device {wish.device.id!r} has {has} of memory, {asked} are asked for",
            help=f"--memory '{write_most(limit)}' is the most",
        )
    return limit


def check_speed(resolved: ResolvedPlan) -> tuple[Diagnostic, ...]:
    """P354 where a plan is predicted to be slower than the ``speed`` that it states, a warning
    where its device has no figures for it."""
    wished = resolved.plan.speed or 0.0
    try:
        cost = cost_plan(resolved)
    except UserError as error:
        return tuple(replace(item, severity="warning") for item in error.diagnostics)
    found = cost.range_tokens_s
    if found.low >= wished:
        return ()
    name = resolved.path.name
    return UserError.of(
        "P354",
        f"speed = {approximate_number(wished, 9)} tok/s: {found.write()} tokens/s are predicted on "
        f"{resolved.device.id}, after {cost.position} tokens of context, and the least is promised",
        help=f"`pi2 plan {name}` finds a faster plan, or says what can be reached; or write "
        f'speed = "{_round_down(found.low)} tok/s"',
        notes=[name_limit(cost, "this plan")],
    ).diagnostics


def reach_speed(wish: Wish, make_plan: Planner, bounds: tuple[int, int]) -> PlannedPlan:
    """The plan for a speed: fastest in a stated memory, else least memory or energy; P350."""
    assert wish.tokens_s is not None
    device_bytes = check_device_memory(wish)
    stated = [size for size in (wish.memory_bytes, device_bytes) if size is not None]
    limit = min(stated, default=bounds[1])

    def plan_at(size: int) -> PlannedPlan:
        return make_plan(replace(wish, memory_bytes=size, objective="speed"))

    def find_least(fastest: PlannedPlan) -> PlannedPlan:
        return _shrink(float(wish.tokens_s or 0.0), fastest, plan_at, bounds[0])

    fastest = plan_at(limit)
    if fastest.promised_tokens_s < wish.tokens_s:
        most = plan_at(bounds[1]) if limit < bounds[1] else fastest
        needed = find_least(most) if most.promised_tokens_s >= wish.tokens_s else None
        raise _explain(wish, fastest, needed)
    if wish.objective == "energy":
        found = [fastest, *_list_sparing(replace(wish, memory_bytes=limit), make_plan)]
        fast = [item for item in found if item.promised_tokens_s >= wish.tokens_s]
        return min(fast, key=lambda item: item.cost.token_j or item.cost.token_s)
    if wish.memory_bytes is not None and wish.objective == "speed":
        return fastest
    return replace(find_least(fastest), wish=wish)


def _shrink(
    tokens_s: float, best: PlannedPlan, plan_at: Callable[[int], PlannedPlan], low: int
) -> PlannedPlan:
    """The plan with the least memory, from ``low`` to the memory of ``best``, that is so fast."""
    high = best.resolved.plan.memory.budget
    while high - low > max(MIB, high * _CLOSE):
        size = round_up((low + high) // 2, MIB)
        found = next(_try(plan_at, size), None)
        if found is not None and found.promised_tokens_s >= tokens_s:
            best, high = found, size
        else:
            low = size
    return best


def _try(make: Callable[[_Given], PlannedPlan], value: _Given) -> Iterator[PlannedPlan]:
    try:
        yield make(value)
    except UserError:
        return


def _list_sparing(wish: Wish, make_plan: Planner) -> Iterator[PlannedPlan]:
    assert wish.tokens_s is not None
    for margin in _MARGINS:
        yield from _try(make_plan, replace(wish, tokens_s=wish.tokens_s / margin))


def _explain(wish: Wish, fastest: PlannedPlan, needed: PlannedPlan | None) -> UserError:
    """P350: what limits the fastest plan, and the nearest wishes; ``needed`` has more memory."""
    assert wish.tokens_s is not None
    wished = approximate_number(wish.tokens_s, 9)
    nearest = [f"--speed {_round_down(fastest.promised_tokens_s)}tok/s"]
    where = "" if wish.memory_bytes is None else f" within {approximate_bytes(wish.memory_bytes)}"
    most = approximate_number(fastest.promised_tokens_s)
    message = f"{wished} tokens/s cannot be promised{where}: {most} are the most"
    if needed is not None:
        budget, room = needed.resolved.plan.memory.budget, find_device_memory(wish.device)
        if room is not None and budget > room:
            takes, has = compare_bytes(budget, room)
            message = (
                f"{wished} tokens/s take {takes} of memory, the device {wish.device.id!r} has "
                f"{has}: {most} are the most{where}"
            )
        else:
            nearest.append(f"--memory '{write_least(budget)}'")
    word = "wish is" if len(nearest) == 1 else "wishes are"
    return UserError.of(
        "P350",
        message,
        help=f"the nearest {word} {' and '.join(nearest)}",
        notes=[name_limit(fastest.cost)],
        exit_code=1,
    )


def _round_down(speed: float) -> str:
    digits = max(2 - floor(log10(speed)), 0)
    return approximate_number(floor(speed * 10**digits) / 10**digits, 9)


def name_limit(cost: Cost, plan: str = "the fastest plan") -> str:
    parts = {
        "attention": sum(x.attention_s for x in cost.layers),
        "finding active neurons": sum(x.predict_s + x.look_up_s for x in cost.layers),
        "computing neurons": sum(max(x.compute_s, x.dense_s) for x in cost.layers),
        "waiting for flash": sum(x.wait_s for x in cost.layers),
        "the head": cost.head_s,
        "the embedding": cost.embedding_s,
    }
    shown = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items())
    return f"a token of {plan}: {shown}"
