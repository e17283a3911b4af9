"""What this machine is: processor, memory, storage and software.  Pure Python, nothing heavy."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.machine.cpu import Cpu, CpuCores, bind_calling_thread, detect_cpu, list_allowed_cores
from pi2.machine.memory import Memory, detect_memory
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


__all__ = [
    "Cpu",
    "CpuCores",
    "Machine",
    "Memory",
    "Storage",
    "bind_calling_thread",
    "detect_cpu",
    "detect_machine",
    "detect_memory",
    "inspect_storage",
    "list_allowed_cores",
]
