"""A worker process of an NPU, emulated or real, and what the engine and it say to each other.

Both see one region of memory.  The engine writes a *hello*, the worker maps the region and answers
with one; then every *message* names a graph and where its operands are, in bytes from the region's
start, and gets one *reply*.  Messages are answered in order; the end of messages ends the worker.
Everything is 32-bit, little-endian, as on the NPU; `dsp/protocol.h` says the same in C."""

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import U8
from pi2.backends.units import UnitFailed
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


def list_command(library: str, *, emulated: bool) -> list[str]:
    """Return a worker's program and arguments: qemu's user mode, or a program that passes messages
    on to the vendor's driver (FastRPC)."""
    return [EMULATOR, "-cpu", _EMULATED_CPU, library] if emulated else [HOST_PROGRAM, library]


_PATIENCE_S = 5.0
"""Time in which a worker may end by itself."""


def open_memory(size: int, *, emulated: bool) -> int:
    """Return a file descriptor of memory that two processes, or an NPU, can map; or
    `UnitFailed`."""
    if emulated:
        file = os.memfd_create("pi2-unit")
        os.ftruncate(file, size)
        return file
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


PROTOCOL = 1
"""Version of all that follows."""
MAGIC = 0x4E324950
"""``PI2N``."""

OPERANDS = 28
"""Operands of a message."""
WORDS = 4 + OPERANDS
MESSAGE = struct.Struct(f"<{WORDS}I")
"""`MAGIC`, its number, the graph's number (`NOTHING` asks only for a reply), the number of
operands, and the operands.  A hello has `MAGIC`, `PROTOCOL`, the file descriptor of the region, its
bytes, and the most bytes that graphs keep while they run, whose place is the last operand of each;
the rest is 0."""
NOTHING = 0xFFFFFFFF

REPLY_WORDS = 8
REPLY = struct.Struct(f"<{REPLY_WORDS}I")
"""`MAGIC`, the message's number, 0 or what failed (`FAILURES`), 0, when the work began and when it
ended: seconds and nanoseconds of the monotonic clock each.  The reply to a hello has `PROTOCOL` for
the number, and how many graphs the library has in the fourth place."""

FAILURES = {
    1: "its worker cannot map the memory",
    2: "its worker does not know the graph",
    3: "its worker speaks another version of the protocol",
    4: "the vendor's library reported an error",
}


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    start_s: float
    end_s: float
    """Seconds of `time.perf_counter`."""
    graphs: int = 0
    """Graphs of the library, in the reply to a hello."""


class Session:
    """A worker and the memory that it shares with this process."""

    def __init__(
        self, library: str, graphs: int, size: int, scratch: int = 0, *, emulated: bool
    ) -> None:
        """Start a worker for ``graphs`` with ``size`` bytes, ``scratch`` of them theirs;
        `UnitFailed`."""
        file = open_memory(size, emulated=emulated)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.memory: U8 = np.frombuffer(mmap.mmap(file, size), np.uint8)
            self.process = self._start(list_command(library, emulated=emulated), file)
            words = (MAGIC, PROTOCOL, file, size, scratch)
            self._write(MESSAGE.pack(*words, *[0] * (OPERANDS - 1)))
            try:
                found = self._take_reply(PROTOCOL).graphs
                if found != graphs:
                    raise UnitFailed(
                        f"its library has {found} graphs and not {graphs}: build it again"
                    )
            except UnitFailed:
                self.close(at_once=True)
                raise
        finally:
            os.close(file)
        self.asked = self.answered = 0
        """Numbers of the last message and of the last reply."""

    def _start(self, command: Sequence[str], file: int) -> subprocess.Popen[bytes]:
        """Start a worker that inherits the descriptor ``file``."""
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                # A message is written whole or not at all: an interrupt leaves no part of one.
                bufsize=0,
                pass_fds=[file],
                # Ctrl-C is for the engine, which ends this process.
                start_new_session=True,
            )
        except OSError as error:
            raise UnitFailed(f"its process cannot be started: {error.strerror}") from error

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        try:
            while data:
                data = data[self.process.stdin.write(data) :]
        except OSError as error:
            raise UnitFailed(f"its process has ended: {error.strerror}") from error

    def ask(self, graph: int, operands: Sequence[int] = ()) -> int:
        """Let the worker run a graph; return the message's number."""
        self.asked = (self.asked + 1) % 2**32
        rest = [0] * (OPERANDS - len(operands))
        words = (MAGIC, self.asked, graph, len(operands), *operands, *rest)
        self._write(MESSAGE.pack(*words))
        return self.asked

    def take_reply(self) -> Reply:
        reply = self._take_reply()
        self.answered = reply.number
        return reply

    def _take_reply(self, expected: int | None = None) -> Reply:
        assert self.process.stdout is not None
        data: bytes = self.process.stdout.read(REPLY.size)
        if len(data) < REPLY.size:
            code = self.process.wait()
            raise UnitFailed(f"its process has ended with exit code {code}{self._read_errors()}")
        magic, number, failure, graphs, start_s, start_ns, end_s, end_ns = REPLY.unpack(data)
        if failure:
            raise UnitFailed(FAILURES.get(failure, f"its worker reports error {failure}"))
        if magic != MAGIC or expected not in (None, number):
            raise UnitFailed(FAILURES[3])
        return Reply(number, start_s + start_ns * 1e-9, end_s + end_ns * 1e-9, graphs)

    def _read_errors(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1]}" if said else ""

    def catch_up(self) -> None:
        """Wait until the worker is idle, with an empty message: an interrupt loses counts."""
        number = self.ask(NOTHING)
        while self.take_reply().number != number:
            pass

    def close(self, *, at_once: bool = False) -> None:
        """End the worker, after its work or ``at_once``; may be called twice."""
        sink, source = self.process.stdin, self.process.stdout
        assert sink is not None and source is not None
        sink.close()
        if at_once:
            self.process.kill()
        try:
            self.process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Not before it has ended: it would complain that nobody reads its replies.
        source.close()
        self._errors.close()
        self.memory = np.zeros(0, np.uint8)
