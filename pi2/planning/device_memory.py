"""Wishes against what the device has: a plan that does not fit is no plan."""

from __future__ import annotations

from dataclasses import replace

from pi2.diagnostics import UserError
from pi2.plan.documents.device import Device
from pi2.plan.documents.quantities import approximate_number, compare_bytes, write_most
from pi2.planning.planner import PlannedPlan, plan
from pi2.planning.wish import Wish


def find_device_memory(device: Device) -> int | None:
    """Bytes that a process may have; None where the device leaves it to the machine."""
    memory = device.memory
    return memory.usable if memory.usable is not None else memory.capacity


def plan_within_device(wish: Wish) -> PlannedPlan:
    """The best plan for a wish that the device has the memory for.

    Raises `UserError` as `plan` does, and P350 for more memory than the device has, or a speed that
    needs more, with the nearest wish.
    """
    limit = find_device_memory(wish.device)
    if limit is not None and wish.memory_bytes is not None and wish.memory_bytes > limit:
        has, asked = compare_bytes(limit, wish.memory_bytes)
        raise UserError.of(
            "P350",
            f"the device {wish.device.id!r} has {has} of memory, {asked} are asked for",
            help=f"--memory '{write_most(limit)}' is the most",
        )
    planned = plan(wish)
    needed = planned.resolved.plan.memory.budget
    if limit is None or needed <= limit or wish.tokens_s is None:
        return planned
    within = plan(replace(wish, memory_bytes=limit, tokens_s=None, objective="speed"))
    speed = within.cost.tokens_s
    if speed >= wish.tokens_s:
        # The program is coarser than the cost model: what it finds in the way need not be.
        return within
    takes, has = compare_bytes(needed, limit)
    raise UserError.of(
        "P350",
        f"{approximate_number(wish.tokens_s, 9)} tokens/s take {takes} of memory, "
        f"the device {wish.device.id!r} has {has}",
        help=f"the nearest wish is --speed {approximate_number(int(speed * 100) / 100, 9)}tok/s",
        exit_code=1,
    )
