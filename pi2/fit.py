"""Whether a device document describes this machine: the P3xx diagnostics."""

from __future__ import annotations

from collections.abc import Iterator

from pi2.diagnostics import Diagnostic
from pi2.machine import Machine
from pi2.plan.device import Device, Unit
from pi2.plan.quantities import approximate_bytes

_ELSEWHERE = "run it on such a machine, or take a plan whose device is this one (`pi2 doctor`)"


def find_misfits(
    device: Device, machine: Machine, budget_bytes: int, *, threads: int | None = None
) -> list[Diagnostic]:
    """What keeps a plan for ``device`` from running on ``machine``; empty if nothing does.

    Whatever the document leaves open is asked of the machine and so fits.  ``budget_bytes`` is the
    plan's budget and ``threads`` its compute threads, where it states them.  Errors mean that the
    plan cannot run here; warnings that it will run, but not as it was planned.

    - P301: another architecture
    - P302: the processor lacks features that kernels of this device may use
    - P303: the budget is more than the memory that this process can have
    - P304 (warning): fewer cores than compute threads
    - P305 (warning): the budget is more than what is free now
    """
    found: list[Diagnostic] = []
    for name, unit in device.units.items():
        if unit.kind == "cpu":
            found += _check_processor(device.id, name, unit, machine)
            found += _check_cores(unit, machine, threads)
    found += _check_memory(machine, budget_bytes)
    return found


def _check_processor(device: str, name: str, unit: Unit, machine: Machine) -> Iterator[Diagnostic]:
    """Compare instruction sets; features say nothing where the architecture already differs."""
    if unit.architecture not in (None, machine.architecture):
        yield Diagnostic(
            code="P301",
            message=f"device {device!r} has an {unit.architecture} processor,"
            f" this machine has {machine.architecture}",
            help=_ELSEWHERE,
            path=f"units.{name}.architecture",
        )
        return
    missing = sorted(set(unit.features or ()) - machine.features)
    if missing:
        yield Diagnostic(
            code="P302",
            message=f"this machine's processor lacks {', '.join(missing)},"
            f" which device {device!r} states",
            help=_ELSEWHERE,
            path=f"units.{name}.features",
        )


def _check_cores(unit: Unit, machine: Machine, threads: int | None) -> Iterator[Diagnostic]:
    wanted = threads or sum(cluster.cores for cluster in unit.clusters)
    if wanted > machine.cores:
        yield Diagnostic(
            code="P304",
            severity="warning",
            message=f"the plan uses {wanted} compute threads, this process has"
            f" {machine.cores} core{'s' if machine.cores > 1 else ''}",
            help=f"set threads.compute = {machine.cores}",
            path="threads.compute",
        )


def _check_memory(machine: Machine, budget_bytes: int) -> Iterator[Diagnostic]:
    memory = machine.memory
    if memory.limit_bytes and budget_bytes > memory.limit_bytes:
        kind = "installed" if memory.limit_bytes == memory.installed_bytes else "allowed here"
        yield Diagnostic(
            code="P303",
            message=f"the plan's budget is {approximate_bytes(budget_bytes)},"
            f" {approximate_bytes(memory.limit_bytes)} of memory is {kind}",
            help="lower memory.budget and its segments, or run it where there is more memory",
            path="memory.budget",
        )
    elif memory.limit_bytes and budget_bytes > memory.available_bytes:
        yield Diagnostic(
            code="P305",
            severity="warning",
            message=f"the plan's budget is {approximate_bytes(budget_bytes)},"
            f" only {approximate_bytes(memory.available_bytes)} of memory is free now",
            help="end other programs, or lower memory.budget and its segments",
            path="memory.budget",
        )
