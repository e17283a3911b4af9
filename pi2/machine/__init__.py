"""What this machine is: processor, memory, storage and software.  Pure Python, nothing heavy."""

from __future__ import annotations

from pi2.machine.affinity import bind_calling_thread, list_allowed_cores
from pi2.machine.cpu import Cpu, CpuCores, detect_cpu
from pi2.machine.machine import Machine, detect_machine
from pi2.machine.memory import Memory, detect_memory
from pi2.machine.storage import Storage, inspect_storage

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
