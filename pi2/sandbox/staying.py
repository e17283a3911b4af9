"""A process that stays, for work that comes again and again: starting one takes 0.1 s and more.

Each piece of work has the limits that it would have in a process of its own.  One that fails ends
the process, and the next one gets a new one; so does every thousandth, so that nothing adds up.
"""

from __future__ import annotations

import subprocess
from threading import Lock, Timer
from types import TracebackType
from typing import Self

from pi2.sandbox.child import (
    FAILED,
    START_S,
    ChildFailed,
    Limits,
    describe_end,
    read_exactly,
    start_child,
)

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
                self._process = start_child(self._module, self.limits, stays=True)
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
        """End the process."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
