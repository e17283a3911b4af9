"""The circumstances of a run."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from pi2.benchmarks.report import Conditions
from pi2.machine import Machine, detect_machine
from pi2.plan.documents.quantities import approximate_bytes


def describe_conditions(text: str | None) -> Conditions:
    """Machine, time and load; ``text`` names the file that tokens are taken from, if any."""
    return Conditions(
        machine=describe_machine(detect_machine()),
        started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load_average=_read_load(),
        tokens=f"the text {text}" if text else "the vocabulary in order",
    )


def describe_machine(machine: Machine) -> str:
    """One line: processor, cores, features, memory, system."""
    cpu = machine.cpu
    features = " ".join(sorted(cpu.features)) or "no known features"
    memory = approximate_bytes(machine.memory.limit_bytes)
    return f"{cpu.name}, {cpu.cores} cores ({features}), {memory}, {machine.system}"


def _read_load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None
