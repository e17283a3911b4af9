"""Progress of a long job: its label and the share done."""

import sys
import time
from collections.abc import Callable

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
