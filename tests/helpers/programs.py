"""pi2 and scripts of Python, each in a process of its own."""

import subprocess
import sys
from typing import Any


def start_pi2(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -m pi2`` to its end; what it writes is text."""
    return start_python("-m", "pi2", *arguments, **options)


def start_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end, without standard input unless ``options`` give it."""
    usual: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    if "input" not in options:
        usual["stdin"] = subprocess.DEVNULL
    command = [sys.executable, *map(str, arguments)]
    done: subprocess.CompletedProcess[str] = subprocess.run(command, **(usual | options))
    return done
