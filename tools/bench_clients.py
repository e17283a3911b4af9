"""Many clients at once on one GGUF file: pi2's server and llama.cpp's, in turns.

    python tools/bench_clients.py FILE.gguf --peer-server llama-server [--clients 64] [--slots 64]

Both servers have as many slots, each with the same context, and a thread for each core.  Every
client asks its questions one after the other and streams the answers.  Printed are tokens per
second of all answers together, and the seconds to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2

from bench_servers import find_port, start_server

PATIENCE_S = 1800.0
PROMPTS = Path(__file__).parent / "real" / "prompts.txt"


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer, and the seconds that a client waited for the first."""

    tokens: int
    first_token_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peer-server", required=True, help="path of llama-server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64, help="sequences in one step (64)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot (512)")
    parser.add_argument("--questions", type=int, default=2, help="of each client (2)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each engine (3)")
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {"pi2": [], "llama.cpp": []}
    for turn in range(options.turns):
        for engine, found in speeds.items():
            with start_server(make_command(engine, options), 0) as address:
                speed, answers = ask_together(address, options)
            found.append(speed)
            waits = sorted(answer.first_token_s for answer in answers)
            print(
                f"turn {turn + 1}, {engine}: {speed:.1f} tokens/s, {len(answers)} answers, first "
                f"token {statistics.median(waits):.2f} s, worst {waits[-1]:.2f} s",
                flush=True,
            )
    ours, theirs = (statistics.median(found) for found in speeds.values())
    print(
        f"{options.file.name}, {options.clients} clients, {options.slots} slots: pi2 {ours:.1f} "
        f"tokens/s, llama.cpp {theirs:.1f}, ratio {ours / theirs:.2f}; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    return 0


def make_command(engine: str, options: argparse.Namespace) -> list[str]:
    if engine == "pi2":
        settings = {"kv.context": options.context, "decode.batch": options.slots}
        command = [sys.executable, "-m", "pi2", "serve", str(options.file), "--port", "0"]
        return command + [
            part for key, value in settings.items() for part in ("--set", f"{key}={value}")
        ]
    threads, context = str(len(os.sched_getaffinity(0))), str(options.context * options.slots)
    command = [options.peer_server, "-m", str(options.file), "--port", str(find_port())]
    command += ["-np", str(options.slots), "-c", context, "-t", threads, "-tb", threads]
    return command


def ask_together(address: str, options: argparse.Namespace) -> tuple[float, list[Answer]]:
    """Tokens of all answers per second, and the answers."""
    model = httpx2.get(f"{address}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line.strip()]

    def ask_in_turn(client: int) -> list[Answer]:
        numbers = range(client * options.questions, (client + 1) * options.questions)
        return [
            ask(address, model, f"{number}. {prompts[number % len(prompts)]}", options.tokens)
            for number in numbers
        ]

    ask(address, model, "Hello", 2)
    with ThreadPoolExecutor(options.clients) as pool:
        start = time.perf_counter()
        answers = [
            answer for found in pool.map(ask_in_turn, range(options.clients)) for answer in found
        ]
        seconds = time.perf_counter() - start
    return sum(answer.tokens for answer in answers) / seconds, answers


def ask(address: str, model: str, question: str, tokens: int) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, made = time.perf_counter(), None, 0
    url = f"{address}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            made = (event.get("usage") or {}).get("completion_tokens", made)
            if first is None and any(part["delta"].get("content") for part in event["choices"]):
                first = time.perf_counter() - start
    return Answer(made, time.perf_counter() - start if first is None else first)


if __name__ == "__main__":
    sys.exit(main())
