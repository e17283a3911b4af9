"""A worker process of an NPU: started once, given memory once, then messages
(`pi2.backends.hexagon.messages`)."""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import U8
from pi2.backends.dense_unit import UnitFailed
from pi2.backends.hexagon import messages as m
from pi2.backends.hexagon.machines import Machine

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a message."""

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
        """Start the worker of a library of so many ``graphs`` with ``size`` bytes of memory;
        ``scratch`` of them are what graphs keep while they run.  `UnitFailed` where that cannot
        be."""
        file = machine.open_memory(size)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.memory: U8 = np.frombuffer(mmap.mmap(file, size), np.uint8)
            self._process = self._begin(machine.list_command(library), file)
            words = (m.MAGIC, m.PROTOCOL, file, size, scratch)
            self._write(m.HELLO.pack(*words, *[0] * (m.OPERANDS - 1)))
            try:
                found = self._take_reply(m.PROTOCOL).graphs
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

    def _begin(self, command: Sequence[str], file: int) -> subprocess.Popen[bytes]:
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
            raise UnitFailed(f"its worker cannot be started: {error.strerror}") from error

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The worker."""
        return self._process

    def ask(self, graph: int, operands: Sequence[int] = ()) -> int:
        """Let the worker run a graph; return the message's number."""
        self.asked = (self.asked + 1) % 2**32
        rest = [0] * (m.OPERANDS - len(operands))
        words = (m.MAGIC, self.asked, graph, len(operands), *operands, *rest)
        self._write(m.MESSAGE.pack(*words))
        return self.asked

    def take_reply(self) -> Reply:
        """Wait for the next reply."""
        reply = self._take_reply()
        self.answered = reply.number
        return reply

    def _take_reply(self, expected: int | None = None) -> Reply:
        assert self._process.stdout is not None
        data = self._process.stdout.read(m.REPLY.size)
        if len(data) < m.REPLY.size:
            status = self._process.wait()
            raise UnitFailed(f"its worker has ended with exit code {status}{self._read_errors()}")
        magic, number, failure, graphs, start_s, start_ns, end_s, end_ns = m.REPLY.unpack(data)
        if failure:
            raise UnitFailed(m.FAILURES.get(failure, f"its worker reports error {failure}"))
        if magic != m.MAGIC or expected not in (None, number):
            raise UnitFailed(m.FAILURES[3])
        return Reply(number, start_s + start_ns * 1e-9, end_s + end_ns * 1e-9, graphs)

    def _read_errors(self) -> str:
        """The last line that the worker has written about itself."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1]}" if said else ""

    def catch_up(self) -> None:
        """Return when the worker has done what it was asked for, and nothing is left to read.

        An interrupt may have kept back messages and replies, so that these cannot be counted: a
        message that asks for nothing is answered after all others.
        """
        number = self.ask(m.NOTHING)
        while self.take_reply().number != number:
            pass

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError as error:
            raise UnitFailed(f"its worker has ended: {error.strerror}") from error

    def close(self, *, at_once: bool = False) -> None:
        """End the worker, after what it was asked for or ``at_once``; may be called twice."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        if at_once:
            process.kill()
        try:
            process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Not before it has ended: it would complain that nobody reads its replies.
        process.stdout.close()
        self._errors.close()
        self.memory = np.zeros(0, np.uint8)
