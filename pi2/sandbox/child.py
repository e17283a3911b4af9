"""Starts such a process, limits what it may take, and hears what it has to say."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_START_S = 60.0
"""For the interpreter to start and the processor to be free, at most."""
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TZDIR", "SYSTEMROOT")
"""Variables that the process sees: nobody's passwords are among them."""
_FAILED = 10
"""Exit status of a process that says itself, on standard output, what went wrong."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may take."""

    cpu_s: float
    """Seconds of processor time, once it has begun with its work."""
    memory_mib: int
    """Address space."""


class ChildFailed(Exception):
    """The work was not done; the text says why, and fits after a colon."""


def run_child(module: str, request: bytes, limits: Limits) -> bytes:
    """Run ``module`` of this package on ``request`` and return its answer.

    Raises `ChildFailed` if it fails, breaks off, or takes more than its ``limits``.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH", "")) if path)
    settings = {"PYTHONPATH": paths, "RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    numbers = [str(limits.cpu_s), str(limits.memory_mib)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-X", "utf8", "-m", f"{__package__}.{module}", *numbers],
            input=request,
            capture_output=True,
            env=known | settings,
            timeout=_START_S + 4 * limits.cpu_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"it takes more than {limits.cpu_s:.2g} s") from None
    except OSError as error:
        raise ChildFailed(f"no process can be started for it: {error.strerror}") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode == _FAILED:
        raise ChildFailed(done.stdout.decode("utf-8", "replace"))
    if done.returncode in (-signal.SIGPROF, -signal.SIGXCPU):
        raise ChildFailed(f"it takes more than {limits.cpu_s:.2g} s of processor time")
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    if done.returncode == -signal.SIGABRT and any("allocation" in line for line in lines):
        raise ChildFailed(_describe_memory(limits))
    raise ChildFailed(f"it ends the process that it is in (exit status {done.returncode})")


def _describe_memory(limits: Limits) -> str:
    return f"it takes more than {limits.memory_mib} MiB of memory"


def serve(work: Callable[[bytes], bytes], explain: Callable[[BaseException], str]) -> None:
    """Be such a process: take the limits from the command line, do ``work`` on what comes in, and
    end.  ``explain`` says why it fails, whatever it raises."""
    cpu_s, memory_mib = float(sys.argv[1]), int(sys.argv[2])
    limits = Limits(cpu_s, memory_mib)
    request = sys.stdin.buffer.read()
    _limit(limits)
    try:
        answer, status = work(request), 0
    except MemoryError:
        answer, status = _describe_memory(limits).encode(), _FAILED
    except BaseException as error:  # a library's panic is no Exception
        answer, status = explain(error).encode("utf-8", "replace"), _FAILED
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    # What is left of the work could take its time to go.
    os._exit(status)


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
