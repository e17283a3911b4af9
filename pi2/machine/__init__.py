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


def describe_processor(machine: Machine) -> dict[str, Any]:
    """The unit of a device document that is this machine's processor, without measured figures."""
    from pi2.plan.documents.device import IsaFeature

    values: dict[str, Any] = {"kind": "cpu", "model": machine.cpu.name[:120]}
    if machine.architecture in ("x86-64", "aarch64"):
        values["architecture"] = machine.architecture
        values["features"] = [item for item in get_args(IsaFeature) if item in machine.features]
    return {**values, "clusters": _describe_clusters(machine)}


def _describe_clusters(machine: Machine) -> list[dict[str, Any]]:
    """Kinds of cores; a container that has fewer cores than the machine states those."""
    from pi2.plan.documents.quantities import HERTZ_UNITS, format_quantity

    clusters = []
    left = machine.cores
    for number, item in enumerate(machine.cpu.clusters):
        cores = min(item.cores, left)
        left -= cores
        if cores <= 0:
            break
        values: dict[str, Any] = {"id": f"cores{number or ''}", "cores": cores}
        if item.max_hz:
            clock = round(item.max_hz / 1e6) * 10**6
            values["frequency"] = format_quantity(clock, HERTZ_UNITS)
        if item.core:
            values["core"] = item.core
        clusters.append(values)
    return clusters


def describe_capacity(machine: Machine) -> str:
    """The size of the machine's memory as people call it: systems keep some for themselves."""
    from pi2.plan.documents.quantities import format_bytes
    from pi2.plan.weights.layout import round_up

    half = 512 << 20
    return format_bytes(max(round_up(machine.memory.installed_bytes - half, 2 * half), half))


__all__ = [
    "Cpu",
    "CpuCores",
    "Machine",
    "Memory",
    "Storage",
    "bind_calling_thread",
    "describe_capacity",
    "describe_processor",
    "detect_cpu",
    "detect_machine",
    "detect_memory",
    "inspect_storage",
    "list_allowed_cores",
    "list_hints",
]
