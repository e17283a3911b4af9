"""Progress of a long job: whoever waits is told what is done, and how much of it."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Takes a label and the share that is done, 0 to 1; what follows the label's first comma, such as
a rate, may be another at every call."""


def ignore_progress(label: str, share: float) -> None:
    """Ignore what is reported."""
