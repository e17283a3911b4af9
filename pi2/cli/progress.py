"""A progress bar on a terminal, for what takes longer than a second; one line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0


class ProgressBar:
    """Call it with a label and the share done; use it as a context manager."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty()
        self._said = False
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, share: float) -> None:
        if time.monotonic() - self._start < PATIENCE_S and not self._bar:
            return
        if not self._shown:
            # Whoever waits for a pipe, or reads a log, is told once what for.
            if not self._said and share < 1.0:
                self._said = True
                print(f"{label.partition(',')[0]}...", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        name = label.partition(",")[0]
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(label, total=1.0)
        self._bar.update(self._tasks[name], completed=share, description=label)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
