"""pi2 and scripts of Python, in processes of their own or in this one."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tests.helpers.patience import PATIENCE_S


def start_pi2(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pi2`` to its end; what it writes is text."""
    return start_python("-m", "pi2", *arguments, **options)


def start_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end, without standard input unless ``options`` give it."""
    usual: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    usual["timeout"] = PATIENCE_S
    if "input" not in options:
        usual["stdin"] = subprocess.DEVNULL
    command = [sys.executable, *map(str, arguments)]
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **(usual | options))
    return done


class Written(NamedTuple):
    out: str
    err: str


class Ask(Protocol):
    """Runs pi2 in this process, which ends with ``code``; returns what it has written."""

    def __call__(self, words: Sequence[str], code: int = 0) -> Written: ...
