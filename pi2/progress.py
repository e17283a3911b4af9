"""Progress of a long job: its label and the share done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Lock, Timer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

Progress = Callable[[str, float], None]
"""Takes a label and the share that is done, 0 to 1; what follows the label's first comma, such as
a rate, may be another at every call."""
COMPILING = "compiling kernels"


def ignore_progress(label: str, share: float) -> None:
    """Ignore reports."""


def say(line: str) -> None:
    """Tell on standard error what a long job does."""
    print(line, file=sys.stderr)


class ByteProgress:
    """Reports how many of ``total_bytes`` are done, and their rate since the first report."""

    def __init__(self, progress: Progress, label: str, total_bytes: int = 0) -> None:
        self._progress = progress
        self._label = label
        self.total_bytes = total_bytes
        """May grow while work is under way."""
        self._first: tuple[float, int] | None = None
        self._done_bytes = 0

    def add(self, count: int) -> None:
        """Report that ``count`` more bytes are done."""
        self._done_bytes += count
        self(self._done_bytes)

    def __call__(self, done_bytes: int) -> None:
        total = max(1, self.total_bytes)
        now, done = time.monotonic(), min(done_bytes, total)
        since, before = self._first = self._first or (now, done)
        size = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        rate = f", {(done - before) / (now - since) / 2**20:,.0f} MiB/s" if now > since else ""
        self._progress(f"{self._label}, {size}{rate}", done / total)


PATIENCE_S = 1.0
"""Shorter jobs get no bar."""


class ProgressBar:
    """Shows labels and shares of what takes long, if standard error is a terminal.  A context
    manager; any thread may call it."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty()
        self._lock = Lock()
        self._shares: dict[str, tuple[str, float]] = {}
        """The last label and share, by the part of the label before its first comma."""
        self._timer: Timer | None = None
        self._bar: Bar | None = None
        self._tasks: dict[str, TaskID] = {}
        self._compiled_s = 0.0

    def __call__(self, label: str, share: float) -> None:
        if not self._shown:
            return
        name, passed_s = label.partition(",")[0], time.monotonic() - self._start
        if name == COMPILING and passed_s >= PATIENCE_S:
            self._compiled_s = passed_s
        with self._lock:
            self._shares[name] = label, share
            if self._timer is None:
                self._timer = Timer(max(0.0, PATIENCE_S - passed_s), self._open)
                self._timer.daemon = True
                self._timer.start()
            if self._bar is not None:
                self._update(self._bar)

    def _open(self) -> None:
        """Show what goes on, which may report nothing for long."""
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        with self._lock:
            if not self._shown:
                return
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._update(self._bar)
            self._bar.start()

    def _update(self, bar: Bar) -> None:
        for name, (label, share) in self._shares.items():
            if name not in self._tasks:
                self._tasks[name] = bar.add_task(label, total=1.0)
            bar.update(self._tasks[name], completed=share, description=label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._shown = False
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
        if self._compiled_s:
            text = f"note: kernels were compiled for {self._compiled_s:.0f} s and are cached"
            print(f"{text}: `pi2 cache`", file=sys.stderr)
