"""A control group that limits the memory of a command: Linux, versions 1 and 2, as root.

What the command maps or reads through the page cache counts as well, and nothing is swapped: it is
a smaller machine as far as memory goes.  Source: Documentation/admin-guide/cgroup-v1/memory.rst and
cgroup-v2.rst of the Linux kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pi2.machine.memory import list_groups, read_int, read_text

_PATIENCE_S = 5.0


class GroupUnavailable(Exception):
    """No group can be made here; the text says why."""


class MemoryGroup:
    """Use it as a context manager; the group is removed at the end."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        name: str = "pi2",
        version: Literal[1, 2] | None = None,
        root: Path = Path("/"),
    ) -> None:
        """``version`` of control groups; None takes what there is.  ``root`` has ``proc`` and
        ``sys``."""
        self._version = version
        self._root = root
        self.limit_bytes = limit_bytes
        self._name = f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        """Make the group; raises `GroupUnavailable`."""
        if sys.platform != "linux":
            raise GroupUnavailable("control groups exist on Linux only")
        reasons = []
        for parent in self._list_parents():
            folder = parent / self._name
            try:
                folder.mkdir()
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror}")
                continue
            try:
                self._limit(folder)
            except OSError as error:
                folder.rmdir()
                reasons.append(f"{folder}: {error.strerror}")
                continue
            self._folder = folder
            return self
        if not reasons:
            kind = "" if self._version is None else f" of version {self._version}"
            reasons = [f"no memory controller{kind} that gives groups to this process"]
        raise GroupUnavailable("; ".join(reasons))

    def _list_parents(self) -> Iterator[Path]:
        """Groups in which one with a memory limit may be made, the nearest first."""
        for group in list_groups(self._root, "memory"):
            if (group / "memory.limit_in_bytes").exists():
                if self._version in (None, 1):
                    yield group
            elif (group / "cgroup.subtree_control").exists() and self._version in (None, 2):
                control = group / "cgroup.subtree_control"
                # Processes may be in leaves only, so that this process's own group rarely works.
                if "memory" not in (read_text(control) or "").split():
                    with suppress(OSError):
                        control.write_text("+memory")
                if "memory" in (read_text(control) or "").replace("+", "").split():
                    yield group

    def _limit(self, folder: Path) -> None:
        limit = str(self.limit_bytes)
        if (folder / "memory.limit_in_bytes").exists():
            (folder / "memory.limit_in_bytes").write_text(limit)
            with suppress(OSError):
                (folder / "memory.memsw.limit_in_bytes").write_text(limit)
            with suppress(OSError):
                (folder / "memory.swappiness").write_text("0")
            return
        (folder / "memory.max").write_text(limit)
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")

    @property
    def folder(self) -> Path:
        """The group's folder."""
        assert self._folder is not None, "enter it first"
        return self._folder

    @property
    def peak_bytes(self) -> int | None:
        """Most that was charged at once, page cache included."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            value = read_int(self.folder / name)
            if value is not None:
                return value
        return None

    @property
    def kills(self) -> int:
        """Processes that the system has ended for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            for line in (read_text(self.folder / name) or "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start ``command`` in the group; ``options`` are those of `subprocess.Popen`."""
        # A shell moves itself into the group, and becomes the command.
        line = [
            "/bin/sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self.folder / "cgroup.procs"),
            *command,
        ]
        return subprocess.Popen(line, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A group can be removed when its last process is gone, which may take a moment.
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    return
                time.sleep(0.05)
