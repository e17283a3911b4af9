"""What this machine is: processor, memory, storage and software.  Pure Python, nothing heavy."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pi2.machine.cpu import Cpu, CpuCores, bind_calling_thread, detect_cpu, list_allowed_cores
from pi2.machine.memory import Memory, detect_memory, read_meminfo, read_text
from pi2.machine.storage import Storage, inspect_storage

if TYPE_CHECKING:
    from pi2.plan.documents.device import IsaFeature


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan is held against before it runs."""

    system: str
    """Operating system and its release, for example ``Linux 6.1.0``."""
    cpu: Cpu
    memory: Memory

    @property
    def architecture(self) -> str:
        """Instruction set: ``x86-64``, ``aarch64`` or another."""
        return self.cpu.architecture

    @property
    def features(self) -> frozenset[IsaFeature]:
        return self.cpu.features

    @property
    def cores(self) -> int:
        return self.cpu.cores


def detect_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine; ``root`` holds ``proc`` and ``sys`` (tests give another one)."""
    return Machine(
        system=f"{platform.system()} {platform.release()}".strip(),
        cpu=detect_cpu(root),
        memory=detect_memory(root),
    )


def describe_cpu(cpu: Cpu, cores: int) -> dict[str, Any]:
    """Values of a device's unit that is this processor, ``cores`` of it at most."""
    from pi2.plan.documents.device import IsaFeature
    from pi2.plan.documents.quantities import HERTZ_UNITS, format_quantity

    values: dict[str, Any] = {"kind": "cpu", "model": cpu.name[:120]}
    if cpu.architecture in ("x86-64", "aarch64"):
        values["architecture"] = cpu.architecture
        values["features"] = [item for item in get_args(IsaFeature) if item in cpu.features]
    values["clusters"] = []
    for number, item in enumerate(cpu.clusters):
        count = min(item.cores, cores)
        cores -= count
        if count <= 0:
            break
        cluster: dict[str, Any] = {"id": f"cores{number or ''}", "cores": count}
        if item.max_hz:
            clock = round(item.max_hz / 1e6) * 10**6
            cluster["frequency"] = format_quantity(clock, HERTZ_UNITS)
        values["clusters"].append(cluster | ({"core": item.core} if item.core else {}))
    return values


def round_capacity(installed_bytes: int) -> int:
    """What people call the memory's size: systems keep some for themselves."""
    from pi2.plan.weights.layout import round_up

    return max(round_up(installed_bytes - (512 << 20), 1 << 30), 512 << 20)


def list_hints(machine: Machine, root: Path = Path("/")) -> Iterator[str]:
    """What keeps runs on this machine slower than they could be, and what changes it."""
    memory = machine.memory
    huge = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    if "[never]" in huge:
        yield "huge pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    if swap := read_meminfo(root).get("SwapTotal"):
        yield f'{swap >> 20} MiB of swap may take idle weights: state memory.lock = "locked"'
    if memory.limit_bytes < memory.installed_bytes:
        yield (
            f"a control group allows {memory.limit_bytes >> 20} of "
            f"{memory.installed_bytes >> 20} MiB: raise memory.max for larger budgets"
        )
    quota = machine.cpu.quota_cores
    if quota is not None and quota < machine.cpu.cores_online:
        yield (
            f"a control group allows {quota:g} of {machine.cpu.cores_online} cores: raise cpu.max"
        )
    fast = {"x86-64": "avx512vnni", "aarch64": "dotprod"}.get(machine.architecture)
    if fast is not None and fast not in machine.features:
        yield f"the CPU has no {fast}: products of 8-bit weights take more instructions"


__all__ = [
    "Cpu",
    "CpuCores",
    "Machine",
    "Memory",
    "Storage",
    "bind_calling_thread",
    "describe_cpu",
    "detect_cpu",
    "detect_machine",
    "detect_memory",
    "inspect_storage",
    "list_allowed_cores",
    "list_hints",
    "round_capacity",
]
