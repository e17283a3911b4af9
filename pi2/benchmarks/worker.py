"""Objects that live in a process of their own and are called over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from pi2.diagnostics import UserError
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.progress import Progress, ignore_progress

_STOP, _PEAK = "<stop>", "<peak>"
_PATIENCE_S = 20.0


class Recipe(Protocol):
    """Makes an object with a ``close``; picklable, because it is sent to the new process."""

    def __call__(self, progress: Progress) -> Any:
        """Make it; ``progress`` is called with a label and the share done."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way to the parent: `UserError` as its parts, a bug as its text."""

    error: tuple[Any, ...] | None
    text: str

    @classmethod
    def describe(cls, error: BaseException) -> _Failure:
        parts = None
        if isinstance(error, UserError):
            parts = (error.diagnostics, error.exit_code, dict(error.sources))
        return cls(parts, "".join(traceback.format_exception(error)))

    def raise_again(self) -> None:
        if self.error is not None:
            diagnostics, exit_code, sources = self.error
            raise UserError(diagnostics, exit_code=exit_code, sources=sources)
        raise RuntimeError(f"the measured process failed:\n{self.text}")


class Worker:
    """The caller's end.  Use it as a context manager; the process ends with it."""

    def __init__(
        self,
        recipe: Recipe,
        progress: Progress = ignore_progress,
        subject: str = "the measured process",
    ) -> None:
        """Start the process and wait until the object is made; findings call it ``subject``.

        Raises what making it raised: `UserError` as it was, anything else as `RuntimeError`.
        """
        context = multiprocessing.get_context("spawn")
        self._subject = subject
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, recipe), daemon=True)
        self._process.start()
        other.close()
        try:
            self._receive(progress)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the object; raises what it raises, as the constructor does."""
        self._pipe.send((name, *arguments))
        return self._receive(ignore_progress)

    def read_peak_rss_bytes(self) -> int:
        """Highest resident set of the process so far."""
        peak: int = self.call(_PEAK)
        return peak

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            try:
                self._pipe.send((_STOP,))
                self._process.join(timeout=_PATIENCE_S)
            except OSError:
                pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def _receive(self, progress: Progress) -> Any:
        while True:
            try:
                kind, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                raise _explain_end(self._subject, self._process.exitcode) from None
            if kind == "progress":
                progress(*value)
            elif kind == "failure":
                value.raise_again()
            else:
                return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _explain_end(subject: str, code: int | None) -> UserError:
    """Finding P640: the process has ended without an answer."""
    how, advice = f"ended with {code}", None
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = f"was ended by {name}"
        if name == "SIGKILL":
            advice = "the system kills what takes too much memory"
        elif name in ("SIGSEGV", "SIGILL", "SIGABRT", "SIGFPE"):
            advice = f"{subject} crashed: measure without it, or with another build of it"
    return UserError.of("P640", f"{subject} {how}", help=advice)


def _end_with_caller() -> None:
    """End this process when its caller is killed; a call that takes minutes would not notice."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "a worker is somebody's"
    caller.join()
    os._exit(1)


def _serve(pipe: Connection, recipe: Recipe) -> None:
    """Serve the caller in the other process: make the object, then answer calls until told to
    end."""
    made: Any = None
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        made = recipe(lambda label, share: pipe.send(("progress", (label, share))))
        pipe.send(("value", None))
        while True:
            name, *arguments = pipe.recv()
            if name == _STOP:
                break
            if name == _PEAK:
                pipe.send(("value", read_peak_rss_bytes()))
            else:
                pipe.send(("value", getattr(made, name)(*arguments)))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        # The caller was interrupted too, or is gone: there is nobody to tell.
        pass
    except BaseException as error:
        try:
            pipe.send(("failure", _Failure.describe(error)))
        except OSError:
            sys.exit(1)
    finally:
        if made is not None:
            made.close()
