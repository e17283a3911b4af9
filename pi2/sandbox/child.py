"""Starts such a process, limits its resources, and reads its answers."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    import subprocess

MIB = 1 << 20
START_S = 60.0
"""For the interpreter to start and the processor to be free, at most."""
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TZDIR", "SYSTEMROOT")
"""Variables that the process sees: passwords are not among them."""
FAILED = 10
"""Exit status of a process that says itself, on standard output, what went wrong."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may take."""

    cpu_s: float
    """Seconds of processor time, once it has begun with its work."""
    memory_mib: int
    """Address space."""

    def add_input(self, size_bytes: int, memory_factor: int) -> Limits:
        """These limits, more for an input: a second per MiB, and ``memory_factor`` times its
        size."""
        size_mib = size_bytes / MIB
        return Limits(self.cpu_s + size_mib, self.memory_mib + ceil(memory_factor * size_mib))


class ChildFailed(Exception):
    """The work was not done; the text says why, and fits after a colon."""


def start_child(module: str, limits: Limits) -> subprocess.Popen[bytes]:
    """Start a process of ``module``; raises `ChildFailed` if there can be none."""
    root = str(Path(__file__).resolve().parents[2])
    known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)
    settings = {"PYTHONPATH": paths, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-X", "utf8", "-m", f"{__package__}.{module}"]
    numbers = [str(limits.cpu_s), str(limits.memory_mib)]
    import subprocess

    try:
        return subprocess.Popen(
            [*command, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=known | settings,
            start_new_session=True,
        )
    except OSError as error:
        raise ChildFailed(f"no process can be started for it: {error.strerror}") from None


def run_child(module: str, request: bytes, limits: Limits) -> bytes:
    """Run ``module`` of this package on ``request`` within ``limits``; raises `ChildFailed`."""
    with StayingChild(module, limits) as child:
        return child.run(request)


def describe_end(status: int, errors: bytes, limits: Limits) -> str:
    if status in (-signal.SIGPROF, -signal.SIGXCPU):
        return f"it takes more than {limits.cpu_s:.2g} s of processor time"
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    if status == -signal.SIGABRT and any("allocation" in line for line in lines):
        return _describe_memory(limits)
    if status == -signal.SIGKILL:
        return f"it takes more than {limits.cpu_s:.2g} s"
    return f"it ends the process that it is in (exit status {status})"


def read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    """So many bytes; None if there are fewer."""
    data = stream.read(size)
    return data if len(data) == size else None


def _describe_memory(limits: Limits) -> str:
    return f"it takes more than {limits.memory_mib} MiB of memory"


def serve(work: Callable[[bytes], bytes], explain: Callable[[BaseException], str]) -> None:
    """Be such a process: apply limits, do ``work`` on one message after the other, each preceded by
    its length, until one fails or none follows; ``explain`` words failures."""
    cpu_s, memory_mib = float(sys.argv[1]), int(sys.argv[2])
    limits = Limits(cpu_s, memory_mib)
    streams = sys.stdin.buffer, sys.stdout.buffer
    _limit(limits)
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        head = read_exactly(streams[0], 8)
        data = None if head is None else read_exactly(streams[0], int.from_bytes(head, "little"))
        if data is None:
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        answer, status = _answer(work, explain, limits, data)
        streams[1].write(bytes([status]) + len(answer).to_bytes(8, "little") + answer)
        streams[1].flush()
        if status:
            os._exit(status)


def _answer(
    work: Callable[[bytes], bytes],
    explain: Callable[[BaseException], str],
    limits: Limits,
    request: bytes,
) -> tuple[bytes, int]:
    try:
        return work(request), 0
    except MemoryError:
        return _describe_memory(limits).encode(), FAILED
    except BaseException as error:  # a library's panic is no Exception
        return explain(error).encode("utf-8", "replace"), FAILED


def _limit(limits: Limits) -> None:
    """Limit this process; the system ends it where it goes on for too long."""
    size = limits.memory_mib * MIB
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (allowed, hard))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)


_MOST_PIECES = 1000


class StayingChild:
    """Runs a module of this package on one request after the other.  Any thread may ask."""

    def __init__(self, module: str, limits: Limits) -> None:
        self._module = module
        self.limits = limits
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pieces = 0

    def run(self, request: bytes) -> bytes:
        """The answer to a request; raises `ChildFailed` as `run_child` does."""
        with self._lock:
            if self._pieces == _MOST_PIECES:
                self._end()
            if self._process is None:
                self._process = start_child(self._module, self.limits)
                self._pieces = 0
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            self._pieces += 1
            watch = Timer(START_S + 4 * self.limits.cpu_s, process.kill)
            watch.start()
            try:
                process.stdin.write(len(request).to_bytes(8, "little") + request)
                process.stdin.flush()
                head = read_exactly(process.stdout, 9)
                answer = None
                if head is not None:
                    answer = read_exactly(process.stdout, int.from_bytes(head[1:], "little"))
            except OSError:  # it has ended before it has read everything
                head = answer = None
            finally:
                watch.cancel()
            if head is None or answer is None:
                raise ChildFailed(self._explain_end())
            if head[0] == FAILED:
                self._end()
                raise ChildFailed(answer.decode("utf-8", "replace"))
            return answer

    def _explain_end(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        _, errors = process.communicate()
        return describe_end(process.returncode, errors, self.limits)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
