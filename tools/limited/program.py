"""What programs that measure engines under memory limits have in common, from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from limited.engines import open_likeness
from limited.memory_group import GroupUnavailable, MemoryGroup
from limited.random_gguf import find_gguf, write_gguf
from limited.read_ahead import set_read_ahead
from pi2.caches import find_cache_folder
from pi2.diagnostics import UserError, texts
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.progress import ProgressBar


def run_program(measure: Callable[[], None]) -> int:
    """The exit code of a program that does nothing but ``measure``; says why it cannot."""
    try:
        measure()
    except UserError as error:
        sys.stderr.write(texts.render_full(error.diagnostics, colour=False, sources=error.sources))
        return error.exit_code
    except GroupUnavailable as reason:
        print(f"no memory limit can be set here: {reason}", file=sys.stderr)
        return 2
    return 0


def prepare_peer_file(resolved: ResolvedPlan) -> Path:
    """llama.cpp's file of the model's shape, in the cache folder; written once."""
    with ExitStack() as closing:
        like = open_likeness(resolved, closing)
        path = find_gguf(resolved.model, find_cache_folder("peers"), like)
        if not path.exists():
            with ProgressBar() as progress:
                write_gguf(resolved.model, path, progress, like)
    return path


def drop_page_cache() -> None:
    """Let the system forget what it has read; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@contextmanager
def start_limited(
    command: Sequence[str], limit_bytes: int, **options: Any
) -> Iterator[tuple[subprocess.Popen[str], MemoryGroup | None]]:
    """A process in a control group with the limit, and the group; a limit of 0 is none.
    ``options`` are those of `subprocess.Popen`; raises `GroupUnavailable`."""
    if not limit_bytes:
        yield subprocess.Popen(command, **options, text=True), None
        return
    with MemoryGroup(limit_bytes, name="pi2-bench") as group:
        yield group.start(command, **options), group


def was_killed(group: MemoryGroup | None) -> bool:
    """Whether the limit has ended a process."""
    return group is not None and group.kills > 0


def run_limited(
    script: str, job: Mapping[str, Any], path: str, before: Sequence[str] = ()
) -> dict[str, Any]:
    """Let ``script`` run one engine once with an empty page cache, reading ahead in ``path`` as the
    job says; a limit of 0 is none."""
    drop_page_cache()
    program = [sys.executable, "-B", str(Path(script).resolve())]
    command = [*before, *program, "--child", json.dumps(job)]
    with ExitStack() as cleanup:
        cleanup.enter_context(set_read_ahead(Path(path), job.get("read_ahead_kib")))
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = start_limited(command, job["limit"], **streams)
        process, group = cleanup.enter_context(started)
        out, err = process.communicate()
        if process.returncode:
            why = "killed for lack of memory" if was_killed(group) else err.strip()[-300:]
            return {"failed": why or f"exit status {process.returncode}"}
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        if group is not None:
            result["group_peak_bytes"] = group.peak_bytes
    return result


def show(lines: Iterable[str], output: Path | None) -> None:
    """Print a table, and append it to ``output``."""
    text = "\n".join(lines)
    print(text)
    if output is not None:
        with output.open("a") as file:
            file.write(f"{text}\n\n")
