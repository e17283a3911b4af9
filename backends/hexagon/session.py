"""A worker process of an NPU, and what the engine and it say to each other.

Both see one region of memory.  The engine writes a *hello*, the worker maps the region and answers
with one; then every *message* names a graph and where its operands are, in bytes from the region's
start, and gets one *reply*.  Messages are answered in order; the end of messages ends the worker.
Everything is 32-bit, little-endian, as on the NPU; `dsp/protocol.h` says the same in C."""

import mmap
import os
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import U8
from pi2.backends.hexagon.machines import Machine
from pi2.backends.units import UnitFailed, WorkerProcess

PROTOCOL = 1
"""Version of all that follows."""
MAGIC = 0x4E324950
"""``PI2N``."""

OPERANDS = 28
"""Operands of a message."""
WORDS = 4 + OPERANDS
MESSAGE = struct.Struct(f"<{WORDS}I")
"""`MAGIC`, its number, the graph's number (`NOTHING` asks only for a reply), the number of
operands, and the operands."""
NOTHING = 0xFFFFFFFF
HELLO = MESSAGE
"""`MAGIC`, `PROTOCOL`, the file descriptor of the region, its bytes, and the most bytes that graphs
keep while they run, whose place is the last operand of each; the rest is 0."""

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
    """The outcome of a message."""

    number: int
    start_s: float
    end_s: float
    """Seconds of `time.perf_counter`."""
    graphs: int = 0
    """Graphs of the library, in the reply to a hello."""


class Session:
    """A worker and the memory that it shares with this process."""

    def __init__(
        self, machine: Machine, library: str, graphs: int, size: int, scratch: int = 0
    ) -> None:
        """Start a worker for ``graphs`` with ``size`` bytes, ``scratch`` of them theirs;
        `UnitFailed`."""
        file = machine.open_memory(size)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.memory: U8 = np.frombuffer(mmap.mmap(file, size), np.uint8)
            self._worker = WorkerProcess(machine.list_command(library), file, stderr=self._errors)
            words = (MAGIC, PROTOCOL, file, size, scratch)
            self._worker.write(HELLO.pack(*words, *[0] * (OPERANDS - 1)))
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

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._worker.process

    def ask(self, graph: int, operands: Sequence[int] = ()) -> int:
        """Let the worker run a graph; return the message's number."""
        self.asked = (self.asked + 1) % 2**32
        rest = [0] * (OPERANDS - len(operands))
        words = (MAGIC, self.asked, graph, len(operands), *operands, *rest)
        self._worker.write(MESSAGE.pack(*words))
        return self.asked

    def take_reply(self) -> Reply:
        reply = self._take_reply()
        self.answered = reply.number
        return reply

    def _take_reply(self, expected: int | None = None) -> Reply:
        try:
            data = self._worker.read(REPLY.size)
        except UnitFailed as error:
            raise UnitFailed(f"{error}{self._read_errors()}") from None
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
        self._worker.close(at_once=at_once)
        self._errors.close()
        self.memory = np.zeros(0, np.uint8)
