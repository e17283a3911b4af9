"""Where a token's time goes: compiled kernels, waiting for reads, Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pi2.engine.loaded_model import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one run, in the thread that drives it."""

    tokens: int
    total_s: float
    kernels_s: float
    """Time in compiled functions, or in the executor's calls where it has none."""
    io_wait_s: float
    """Time of waiting for neurons to arrive."""
    level: str
    """``kernels`` or ``executor calls``: what ``kernels_s`` was measured around."""
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Number and seconds of the executor's calls by name."""

    @property
    def python_s(self) -> float:
        """Time of everything else: orchestration in Python."""
        return self.total_s - self.kernels_s - self.io_wait_s


class Stopwatch:
    """Adds up the time spent in functions, in the thread that made it; others are not timed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.calls: dict[str, tuple[int, float]] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its calls timed under ``name``."""

        def timed(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments, **keywords)
            start = time.perf_counter()
            try:
                return function(*arguments, **keywords)
            finally:
                count, seconds = self.calls.get(name, (0, 0.0))
                self.calls[name] = (count + 1, seconds + time.perf_counter() - start)

        return timed

    @property
    def seconds(self) -> float:
        """Time in all of them; none of them calls another."""
        return sum(seconds for _, seconds in self.calls.values())


class Watches:
    """The three stopwatches of a profile."""

    def __init__(self) -> None:
        self.executor = Stopwatch()
        self.kernels = Stopwatch()
        self.io = Stopwatch()

    def report(self, tokens: int, total_s: float) -> Profile:
        """The profile of what has run since they were made."""
        compiled = bool(self.kernels.calls)
        watch = self.kernels if compiled else self.executor
        return Profile(
            tokens=tokens,
            total_s=total_s,
            kernels_s=watch.seconds,
            io_wait_s=self.io.seconds,
            level="kernels" if compiled else "executor calls",
            calls=dict(self.executor.calls),
        )


class TimedExecutor:
    """Stands for an executor and times its methods."""

    def __init__(self, executor: object, watch: Stopwatch) -> None:
        self._executor = executor
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._executor, name)
        if callable(value):
            value = self._watch.wrap(name, value)
            self.__dict__[name] = value  # the next look-up does not come here
        return value


class TimedReader:
    """Stands for a flash reader and times the waiting for what it reads."""

    def __init__(self, reader: Any, watch: Stopwatch) -> None:
        self._reader = reader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def finish(self, *arguments: Any) -> Any:
        """Wait for scattered reads."""
        return self._watch.wrap("finish", self._reader.finish)(*arguments)

    def start_run(self, *arguments: Any) -> Future[None]:
        """Begin a long read; waiting for its future is timed."""
        future: Future[None] = self._reader.start_run(*arguments)
        future.result = self._watch.wrap("result", future.result)  # type: ignore[method-assign]
        return future


@contextmanager
def watch_parts(parts: Parts) -> Iterator[Watches]:
    """Put stopwatches between the parts of a loaded model, and take them away again.

    Whatever of the engine holds the executor or the reader gets a stand-in; compiled functions
    that the executor holds are timed one by one.  Only a profile does this: other runs call what
    they always call.
    """
    watches = Watches()
    undo: list[Callable[[], None]] = []
    try:
        replace_parts(
            parts,
            TimedExecutor(parts.executor, watches.executor),
            TimedReader(parts.reader, watches.io),
            undo,
        )
        for name, value in list(vars(parts.executor).items()):
            timed = _wrap_kernels(name, value, watches.kernels)
            if timed is not value:
                _replace(parts.executor, name, timed, undo)
        yield watches
    finally:
        for step in reversed(undo):
            step()


def replace_parts(
    parts: Parts, executor: object, reader: object, undo: list[Callable[[], None]]
) -> None:
    """Give stand-ins for executor and reader to whatever of the engine holds them; ``undo`` takes
    the steps back."""
    stand_ins = {id(parts.executor): executor, id(parts.reader): reader}
    for owner in _find_engine_objects(parts):
        for name, value in list(vars(owner).items()):
            if id(value) in stand_ins:
                _replace(owner, name, stand_ins[id(value)], undo)


def _replace(owner: object, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    old = getattr(owner, name)
    setattr(owner, name, value)
    undo.append(lambda: setattr(owner, name, old))


def _find_engine_objects(parts: Parts) -> list[object]:
    """The engine's objects that are reachable from its two entrances."""
    found: list[object] = []
    waiting: list[object] = [parts.forward, parts.feed_forward]
    while waiting:
        item = waiting.pop()
        if any(item is other for other in found) or not hasattr(item, "__dict__"):
            continue
        if not type(item).__module__.startswith("pi2.engine"):
            continue
        found.append(item)
        waiting += vars(item).values()
    return found


def _wrap_kernels(name: str, value: Any, watch: Stopwatch) -> Any:
    """``value`` with the compiled functions in it timed: one, or some in lists and tuples."""
    if _is_kernel(value):
        return watch.wrap(name, value)
    if isinstance(value, list | tuple):
        timed = [_wrap_kernels(name, item, watch) for item in value]
        if any(new is not old for new, old in zip(timed, value, strict=True)):
            return type(value)(timed)
    return value


def _is_kernel(value: Any) -> bool:
    return callable(value) and type(value).__module__.partition(".")[0] == "tvm_ffi"
