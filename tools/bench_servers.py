"""pi2's server beside llama.cpp's, in turns: a few clients, in memory and within a share of it.

    python tools/bench_servers.py --peer-python /opt/llama/bin/python
    python tools/bench_servers.py --model bamboo-7b --store /data/bamboo-7b --repetitions 3

Makes the synthetic store (tools/synthesize.py) and a GGUF file of the same shape once, in cache
folders.  Then, for each case, repetition and engine: drops the page cache, starts the server, in a
control group where the case has a limit (page cache counted, no swap), asks it once, and then lets
the clients ask at the same time, each the same number of times.  Tokens per second are all tokens
of all answers by the time from the first question to the last answer.  The bandwidth of the memory
is measured in the same run.  Needs root, and a Python with llama-cpp-python[server].
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from limited.plans import CONTEXT, find_limit, prepare_store, write_limited_plan
from limited.program import (
    drop_page_cache,
    prepare_peer_file,
    run_program,
    show,
    start_limited,
    was_killed,
)
from limited.rows import FEWEST, LEND, Row
from pi2.caches import find_cache_folder
from pi2.fitting.check import load_plan
from pi2.measuring.contestant import BandwidthLimit
from pi2.plan.documents.quantities import approximate_bytes

CHUNK = 64
"""Most tokens of a prompt that both engines take at once."""
PATIENCE_S = 1800.0
"""Seconds in which a server has to be there, and an answer to come."""
MAPPED = """
import runpy, llama_cpp.llama_cpp as library
make = library.llama_model_default_params
def make_mapped():
    settings = make()
    settings.use_extra_bufts = False
    return settings
library.llama_model_default_params = make_mapped
runpy.run_module("llama_cpp.server", run_name="__main__")
"""
"""llama.cpp's server with weights that stay mapped: repacked ones are copies, which a limit below
their size does not hold."""


class ServerEnded(Exception):
    """A server does not start; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is compared, and how often pi2 shall be as fast."""

    name: str
    limit_bytes: int
    """0 is none."""
    goal: float
    plan: Path
    settings: Mapping[str, object]
    peer_tokens: int


def main() -> int:
    """Measure and print."""
    arguments = parse_arguments()
    return run_program(lambda: measure(arguments))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="pi2's server beside llama.cpp's.")
    parser.add_argument("--model", default="bamboo-7b", help="a model document (bamboo-7b)")
    parser.add_argument("--skew", type=float, default=0.26, help="of a store that is made (0.26)")
    parser.add_argument("--cache", type=Path, default=find_cache_folder("peers").parent / "limited")
    parser.add_argument("--store", type=Path, help="a store that is there already")
    parser.add_argument("--share", type=float, default=0.6, help="of the store in memory (0.6)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--questions", type=int, default=2, help="of each client (2)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (48)")
    parser.add_argument("--peer-tokens", type=int, default=4, help="of llama.cpp's, limited (4)")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument(
        "--peer-python", default=sys.executable, help="has llama-cpp-python[server]"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", choices=["in memory", "limited"], help="leave the other case out")
    parser.add_argument("-o", "--output", type=Path, help="append the table to this file")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> None:
    """Prepare, run in turns, print."""
    from pi2.plan.toml.source import parse_assignments

    more = parse_assignments(tuple(arguments.set))
    row = Row(model=arguments.model, limit=arguments.share, goal="")
    store, whole = prepare_store(row, arguments)
    limit = find_limit(row, store, whole)
    resolved = load_plan(whole)
    path = prepare_peer_file(resolved)
    # As many contexts as clients, in the memory of one long one; logits of as many take what
    # shorter pieces of prompts leave.
    batch = {
        "decode.batch": arguments.clients,
        "kv.context": CONTEXT // arguments.clients,
        "prefill.chunk": CHUNK,
        **more,
    }
    cases = [
        Case(
            name="in memory",
            limit_bytes=0,
            goal=1.5,
            plan=whole,
            settings=batch,
            peer_tokens=arguments.tokens,
        ),
        Case(
            name=f"limited to {approximate_bytes(limit)}",
            limit_bytes=limit,
            goal=10.0,
            plan=write_limited_plan(row, store, whole, limit),
            settings={**LEND, **FEWEST, **batch},
            peer_tokens=arguments.peer_tokens,
        ),
    ]
    if arguments.only is not None:
        cases = [case for case in cases if (case.limit_bytes == 0) == (arguments.only != "limited")]
    results: dict[tuple[str, str], list[float]] = {}
    with BandwidthLimit(2) as meter:
        speeds = meter.measure()
        for _ in range(arguments.repetitions):
            for case in cases:
                for engine in ("pi2", "llama.cpp"):
                    speed = results.setdefault((case.name, engine), [])
                    try:
                        speed.append(run_engine(engine, case, path, arguments))
                        told = f"{speed[-1]:.2f} tokens/s"
                    except ServerEnded as reason:
                        told = str(reason)
                    print(f"# {case.name}, {engine}: {told}", file=sys.stderr)
            speeds += meter.measure()
        bandwidth = meter.summarise(speeds)
    lines = list(report(cases, results, arguments, resolved.digest))
    lines.append(
        f"Memory: {bandwidth.bytes_s / 1e9:.1f} GB/s read by {bandwidth.threads} threads. Load "
        f"average at the end {os.getloadavg()[0]:.1f}."
    )
    show(lines, arguments.output)


def report(
    cases: Sequence[Case],
    results: Mapping[tuple[str, str], Sequence[float]],
    arguments: argparse.Namespace,
    digest: str,
) -> Iterator[str]:
    """Lines of the table."""
    yield (
        f"**Servers**: {arguments.model}, {arguments.clients} clients, {arguments.questions} "
        f"questions each, {arguments.repetitions} repetitions. Plan {digest[:12]}."
    )
    yield ""
    yield "| case | pi2, tokens/s | llama.cpp's server, tokens/s | ratio | goal |"
    yield "|---|---|---|---|---|"
    for case in cases:
        speeds = [results[case.name, engine] for engine in ("pi2", "llama.cpp")]
        medians = [statistics.median(found) if found else None for found in speeds]
        cells = ["ended" if median is None else f"{median:.2f}" for median in medians]
        ours, theirs = medians
        ratio = f"{ours / theirs:.2f}" if ours and theirs else "none"
        yield f"| {case.name} | {cells[0]} | {cells[1]} | {ratio} | >= {case.goal:g} |"
    yield ""


def run_engine(engine: str, case: Case, gguf: Path, arguments: argparse.Namespace) -> float:
    """Start a server with an empty page cache and ask it; tokens per second."""
    drop_page_cache()
    if engine == "pi2":
        command = [sys.executable, "-m", "pi2", "serve", str(case.plan), "--port", "0"]
        for key, value in case.settings.items():
            text = json.dumps(value) if isinstance(value, (bool, str)) else value
            command += ["--set", f"{key}={text}"]
        tokens = arguments.tokens
    else:
        port = find_port()
        start = ["-c", MAPPED] if case.limit_bytes else ["-m", "llama_cpp.server"]
        command = [arguments.peer_python, *start, "--model", str(gguf), "--port", str(port)]
        command += ["--n_ctx", str(CONTEXT), "--n_threads", "2", "--n_threads_batch", "2"]
        # Its buffers grow with the batch; prompts are shorter.
        command += ["--n_batch", str(CHUNK), "--n_ubatch", str(CHUNK)]
        # Otherwise a question ends the answer under way.
        command += ["--interrupt_requests", "False", "--verbose", "False"]
        if case.limit_bytes:
            # Weights that are larger than the limit cannot be held.
            command += ["--use_mlock", "False"]
        tokens = case.peer_tokens
    with start_server(command, case.limit_bytes) as address:
        return ask_together(address, arguments.clients, arguments.questions, tokens)


@contextmanager
def start_server(command: Sequence[str], limit_bytes: int) -> Iterator[str]:
    """The address of a server that says on standard error where it listens."""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with start_limited(command, limit_bytes, **streams) as (process, group):
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r" on (http://[\w.]+:\d+)", said)):
            line = process.stderr.readline()
            if not line:
                why = "it was killed for lack of memory" if was_killed(group) else said[-800:]
                raise ServerEnded(f"it does not start: {why}")
            said += line
        drain = threading.Thread(target=process.stderr.read)
        drain.start()
        try:
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            drain.join()


def ask_together(address: str, clients: int, questions: int, tokens: int) -> float:
    """Let clients ask at the same time; all tokens of the answers per second."""
    model = httpx2.get(f"{address}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]

    def ask(number: int) -> int:
        body = {
            "model": model,
            "prompt": f"question {number:03}:",
            "max_tokens": tokens,
            "temperature": 0.0,
        }
        answer = httpx2.post(f"{address}/v1/completions", json=body, timeout=PATIENCE_S)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    ask(999)
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        made = sum(pool.map(ask, range(clients * questions)))
        seconds = time.perf_counter() - start
    return made / seconds


def find_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
