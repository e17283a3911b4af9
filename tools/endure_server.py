"""Ten hours in ten minutes: a server with several models that takes turns, dies, and starts again.

python tools/endure_server.py MODEL MODEL ... [--memory 900MB] [--seconds 600] [-o FILE]

`pi2 serve` holds the models within one budget.  Clients hold conversations that grow, others close
their streams early.  Meanwhile the server gets SIGTERM and SIGKILL and is started again, the disk
of its prefix files fills up (a small tmpfs; needs root), and the first model's file is replaced by
the second's.  Afterwards every answer is followed token by token with the model in this process.
Prints a summary as JSON; exits with 1 if an answer was wrong, a request was lost without a signal,
memory grew, or the log has a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

import pi2
from load_server import GROWTH_BYTES, HEAD, KEY, Load, ask, divide_in_quarters, follow
from pi2.loading import find_plan
from pi2.weights.file_reading import FileFiller

TURNS = 6
"""Turns of a conversation, before a new one begins."""
DISK_BYTES = 64 << 20
"""Room for kernels and prefix files."""
TOPICS = ("The sea", "An old bridge", "def sort(", "Winter", "A letter", "import numpy", "Bread")
EVENTS = (
    (0.2, "terminate"),
    (0.35, "kill"),
    (0.5, "fill the disk"),
    (0.6, "kill"),
    (0.7, "free the disk"),
    (0.8, "replace a file"),
    (0.9, "terminate"),
)
"""Part of the time after which each disturbance comes."""


@dataclass(slots=True)
class Server:
    """A server that may be started again at the same port."""

    command: list[str]
    environment: dict[str, str]
    log: Path
    port: int = 0
    names: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            command = [*self.command, "--port", str(self.port)]
            self.process = subprocess.Popen(command, stderr=log, env=self.environment)
        for _ in range(6000):
            text = self.log.read_bytes()[begin:].decode("utf-8", "replace")
            for line in text.splitlines():
                if line.startswith("pi2 serves "):
                    names, _, address = line.removeprefix("pi2 serves ").partition(" on ")
                    self.names = [name.strip() for name in names.split(",")]
                    self.port = int(address.split()[0].rstrip("/").rpartition(":")[2])
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"the server does not start:\n{text}")

    def stop(self, number: int) -> int:
        """Send a signal, and return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


@dataclass(slots=True)
class Session:
    """What the clients saw."""

    answers: dict[tuple[str, str], Counter[tuple[int, ...]]] = field(default_factory=dict)
    """Tokens that answered a prompt of a model, and how often."""
    turns: int = 0
    tokens: int = 0
    interrupted: int = 0
    closed: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    exit_codes: list[int] = field(default_factory=list)
    lives: list[list[int]] = field(default_factory=lambda: [[]])
    """Anonymous bytes of each process that served, second by second."""
    restarting: bool = False


def make_request(model: str, prompt: str, tokens: int) -> dict[str, object]:
    """A greedy completion that streams its tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def converse(server: Server, session: Session, until: float, seed: int) -> None:
    """Hold one conversation after the other; the prompt grows by each answer."""
    generator = random.Random(seed)
    while time.perf_counter() < until:
        model = server.names[(seed + generator.randrange(2)) % len(server.names)]
        prompt = f"{generator.choice(TOPICS)} {seed % 3}"
        for turn in range(TURNS):
            request = make_request(model, prompt, generator.choice((4, 8, 16)))
            load = Load(server.address, model, [request])
            life = len(session.lives)
            try:
                async with httpx2.AsyncClient(timeout=300) as client:
                    ids, _ = await ask(client, load, 0)
            except (httpx2.TransportError, RuntimeError) as error:
                if session.restarting or len(session.lives) != life:
                    session.interrupted += 1
                else:
                    session.lost[f"{type(error).__name__}: {error}"[:120]] += 1
                await asyncio.sleep(0.5)
                break
            except httpx2.HTTPStatusError as error:
                session.refused[f"{model}: {error.response.status_code}"] += 1
                await asyncio.sleep(0.5)
                break
            session.answers.setdefault((model, prompt), Counter())[ids] += 1
            session.turns += 1
            session.tokens += len(ids)
            prompt += f" {ids[0]} and then ({turn})"
            if time.perf_counter() >= until:
                break


async def close_early(server: Server, session: Session, until: float, seed: int) -> None:
    """Open streams and close them before the answer has ended."""
    generator = random.Random(seed)
    while time.perf_counter() < until:
        model = generator.choice(server.names)
        request = make_request(model, generator.choice(TOPICS) * 20, 200)
        async with httpx2.AsyncClient(timeout=300) as client:
            task = asyncio.create_task(ask(client, Load(server.address, model, [request]), 0))
            await asyncio.sleep(1.0 + 2.0 * generator.random())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        session.closed += 1


async def watch_memory(server: Server, session: Session, until: float) -> None:
    """Note the anonymous memory of the server's process every second."""
    while time.perf_counter() < until:
        with suppress(OSError, ValueError, StopIteration):
            assert server.process is not None
            text = Path(f"/proc/{server.process.pid}/status").read_text("ascii")
            line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
            session.lives[-1].append(int(line.split()[1]) << 10)
        await asyncio.sleep(1.0)


async def disturb(
    server: Server, session: Session, files: list[Path], disk: Path, start: float, seconds: float
) -> None:
    """Bring the disturbances of `EVENTS` in their order."""
    filler = disk / "filler"
    for share, event in EVENTS:
        await asyncio.sleep(max(start + share * seconds - time.perf_counter(), 0.0))
        print(f"{time.perf_counter() - start:6.0f} s: {event}", file=sys.stderr)
        if event in ("terminate", "kill"):
            session.restarting = True
            number = signal.SIGTERM if event == "terminate" else signal.SIGKILL
            session.exit_codes.append(await asyncio.to_thread(server.stop, number))
            session.lives.append([])
            await asyncio.to_thread(server.start)
            session.restarting = False
        elif event == "fill the disk":
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        elif event == "free the disk":
            filler.unlink(missing_ok=True)
        else:
            copy = files[0].with_suffix(".new")
            shutil.copyfile(files[1], copy)
            copy.replace(files[0])


async def run(
    server: Server, session: Session, files: list[Path], disk: Path, options: argparse.Namespace
) -> None:
    """Let clients and disturbances go on for the time that was asked for."""
    start = time.perf_counter()
    until = start + options.seconds
    await asyncio.gather(
        *(converse(server, session, until, seed) for seed in range(options.clients)),
        *(close_early(server, session, until, 100 + seed) for seed in range(2)),
        watch_memory(server, session, until),
        disturb(server, session, files, disk, start, options.seconds),
    )


def find_wrong(session: Session, name: str, paths: list[Path], most: int) -> tuple[int, int]:
    """Answers that were followed, and answers that no model of ``paths`` would give."""
    mine = [
        (prompt, ids)
        for (model, prompt), seen in session.answers.items()
        if model == name
        for ids in seen
    ]
    random.Random(0).shuffle(mine)
    wrong = mine[:most]
    for path in paths:
        with pi2.load(path) as model:
            wrong = [
                (prompt, ids)
                for prompt, ids in wrong
                if not follow(model, make_request(name, prompt, len(ids)) | {"seed": 0}, ids)
            ]
    for prompt, ids in wrong:
        print(f"wrong: {name}: {prompt!r} {ids}", file=sys.stderr)
    return len(mine[:most]), len(wrong)


@contextmanager
def make_small_disk() -> Iterator[Path]:
    """A folder on a file system of its own that can be filled; an ordinary one without root."""
    folder = Path(tempfile.mkdtemp(prefix="pi2-endure-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files first, then plans")
    parser.add_argument("--memory", default="900MB")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--followed", type=int, default=40, help="answers followed for each model")
    parser.add_argument("--log", type=Path, help="keep the server's log")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    session = Session()
    with tempfile.TemporaryDirectory(prefix="pi2-models-") as scratch, make_small_disk() as disk:
        models = []
        for path in options.models:
            is_file = path.suffix == ".gguf"
            own = Path(shutil.copy(path, scratch)) if is_file else find_plan(path)
            models.append(own)
        command = [sys.executable, "-m", "pi2", "serve", *map(str, models)]
        command += ["--memory", options.memory, "--set", "serve.prefix_cache=32 MiB"]
        environment = {**os.environ, "PI2_API_KEY": KEY, "PI2_CACHE_DIR": str(disk)}
        server = Server(command, environment, Path(scratch) / "log")
        server.start()
        files = [path for path in models if path.suffix == ".gguf"]
        try:
            asyncio.run(run(server, session, files, disk, options))
            alive = httpx2.get(f"{server.address}/health", headers=HEAD).is_success
        finally:
            session.exit_codes.append(server.stop(signal.SIGTERM))
        log = server.log.read_text("utf-8", "replace")
        if options.log is not None:
            options.log.write_text(log, "utf-8")
        followed = {}
        for name, path in zip(server.names, options.models, strict=True):
            # The replaced file may answer as the file that it was, or as the one that it is.
            paths = [path, options.models[1]] if models[0].stem == name else [path]
            plans = [find_plan(one, files=FileFiller()) for one in paths]
            followed[name] = find_wrong(session, name, plans, options.followed)
    quarters = [divide_in_quarters(life) for life in session.lives if len(life) > 20]
    grown = max((life[-1] - max(life[:2]) for life in quarters), default=0)
    found = {
        "models": server.names,
        "memory": options.memory,
        "seconds": options.seconds,
        "turns": session.turns,
        "tokens_s": round(session.tokens / options.seconds, 1),
        "followed_and_wrong": followed,
        "interrupted_by_signals": session.interrupted,
        "closed_early": session.closed,
        "lost": dict(session.lost),
        "refused": dict(session.refused),
        "exit_codes": session.exit_codes,
        "anonymous_bytes_by_quarter": quarters,
        "tracebacks": log.count("Traceback"),
        "log_lines": Counter(
            line.split(" ")[1] if " " in line else line for line in log.splitlines()
        ).most_common(20),
        "alive": alive,
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", "utf-8")
    if found["tracebacks"]:
        print(log[log.index("Traceback") - 400 :][:4000], file=sys.stderr)
    wrong = sum(wrong for _, wrong in followed.values())
    is_bad = wrong or session.lost or grown > GROWTH_BYTES or found["tracebacks"] or not alive
    return int(bool(is_bad))


if __name__ == "__main__":
    sys.exit(main())
