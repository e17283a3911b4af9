"""What runs a library of graphs: an emulator, or a real NPU through the vendor's driver."""

import fcntl
import os
import shutil
import struct
from collections.abc import Sequence
from typing import Protocol

from pi2.backends.units import UnitFailed, open_region
from pi2.plan.documents.device import Unit

EMULATOR = "qemu-hexagon"
_EMULATED_CPU = "v67"
"""The newest that Debian's emulator knows; it runs newer programs without vectors of floats."""
HOST_PROGRAM = "pi2-npu-host"
"""The program that talks to the vendor's driver (`dsp/host.c`)."""
_HEAPS = ("/dev/dma_heap/qcom,system", "/dev/dma_heap/system")
_ALLOCATE = 0xC0184800
"""``DMA_HEAP_IOCTL_ALLOC`` of Linux: {length u64, fd u32, fd_flags u32, heap_flags u64}."""
_HEAP_REQUEST = struct.Struct("<QIIQ")


class Machine(Protocol):
    """What a worker runs on."""

    @property
    def is_emulated(self) -> bool:
        """Whether times mean nothing."""

    def list_command(self, library: str) -> Sequence[str]:
        """The worker's program and arguments."""

    def open_memory(self, size: int) -> int:
        """Return a file descriptor of memory that the worker can map; or `UnitFailed`."""


class Emulator:
    """qemu's user mode: the worker is a Linux process of another architecture."""

    is_emulated = True

    def list_command(self, library: str) -> Sequence[str]:
        return [EMULATOR, "-cpu", _EMULATED_CPU, library]

    def open_memory(self, size: int) -> int:
        return open_region(size)


class Driver:
    """A real NPU: a program of this machine passes messages on to the vendor's driver (FastRPC)."""

    is_emulated = False

    def list_command(self, library: str) -> Sequence[str]:
        """Run the program that was built with the vendor's SDK."""
        return [HOST_PROGRAM, library]

    def open_memory(self, size: int) -> int:
        for heap in filter(os.path.exists, _HEAPS):
            try:
                with open(heap, "rb", buffering=0) as opened:
                    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
                    request = bytearray(_HEAP_REQUEST.pack(size, 0, flags, 0))
                    fcntl.ioctl(opened, _ALLOCATE, request)
                    return int(_HEAP_REQUEST.unpack(request)[1])
            except OSError as error:
                raise UnitFailed(f"{heap} gives no memory: {error.strerror}") from error
        raise UnitFailed("this system has no memory that an NPU can map (/dev/dma_heap)")


def choose_machine(unit: Unit) -> Machine:
    """Return the unit's machine: the emulator if the device document asks for it."""
    return Emulator() if unit.emulated else Driver()


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return what keeps the unit from being used here, and what to install."""
    # A bundle has its libraries, and nothing to link.
    from pi2.backends.hexagon import linkers

    found = []
    if unit.architecture not in (None, "hexagon"):
        found.append(f"it computes on Hexagon NPUs, and the device says {unit.architecture!r}")
    if not unit.emulated:
        if shutil.which(HOST_PROGRAM) is None:
            found.append(
                f"there is no `{HOST_PROGRAM}`, which passes work on to the NPU's driver: build it"
                " with the vendor's SDK (backends/hexagon/dsp/build.sh), or use a device file with"
                " `emulated = true`"
            )
        if not any(map(os.path.exists, _HEAPS)):
            found.append("this system has no memory that an NPU can map (/dev/dma_heap)")
        return found
    if shutil.which(EMULATOR) is None:
        found.append(f"there is no {EMULATOR}, which emulates the NPU: apt install qemu-user")
    return found + linkers.find_obstacles()
