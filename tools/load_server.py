"""Load a server with many clients, some of whom misbehave, and see that it keeps its word.

python tools/load_server.py PLAN [--clients 64] [--seconds 600] [--set KEY=VALUE] [-o FILE]

Starts `pi2 serve PLAN`, asks every question once while nobody else does, then lets clients ask
them all at the same time: every answer has to be the one that was given alone.  Where one is not,
the plan is loaded afterwards and the answer gone through token by token: a step of several
sequences adds in another order than one's, and a token may be another one where two are about
equally likely, but only there.  Beside them others read slowly, hang up, and send what is too
large, broken, without a key or with endless headers.  Prints what came of it as JSON; exits with 1
if an answer was lost or is not the model's, a bad request was not refused, memory has grown, or
the server is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt

import pi2
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.sampling import Sampler
from pi2.loading import find_plan
from pi2.plan.toml.source import parse_assignments

KEY = "load"
HEAD = {"Authorization": f"Bearer {KEY}"}
WORDS = (
    *("def", "class", "import", "return", "for", "while", "if", "else"),
    *("print", "open", "list", "dict", "range", "self", "value", "name"),
)
GROWTH_BYTES = 16 << 20
"""What the server's memory may grow by between the first quarter of the time and the last."""
ROUNDING = 3e-3
"""Standard deviation of the noise that stands for another order of additions, in logits."""


@dataclass(slots=True)
class Load:
    """What is asked, and what has come of it."""

    address: str
    model: str
    questions: list[dict[str, Any]]
    expected: list[tuple[int, ...]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    tokens: int = 0
    different: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    """Answers that are not those that were given alone, by question and tokens, and how often."""
    lost: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    not_refused: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)


def make_questions(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, many of which begin like others."""
    generator = random.Random(seed)
    common = " ".join(generator.choices(WORDS, k=150))
    questions = []
    for number in range(count):
        own = " ".join(generator.choices(WORDS, k=generator.choice((3, 20, 60))))
        questions.append(
            {
                "model": model,
                "prompt": f"{common} {own}" if number % 2 else own,
                "max_tokens": generator.choice((4, 16, 48)),
                "temperature": 1.0 if number % 3 else 0.0,
                "seed": number,
                "stream": True,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
    return questions


async def ask(
    client: httpx2.AsyncClient, load: Load, number: int, pause_s: float = 0.0
) -> tuple[tuple[int, ...], float]:
    """The tokens that answer a question, and the seconds to the first of them."""
    start, first_s, ids = time.perf_counter(), 0.0, []
    url = f"{load.address}/v1/completions"
    async with client.stream("POST", url, json=load.questions[number], headers=HEAD) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            first_s = first_s or time.perf_counter() - start
            ids += [token for choice in chunk["choices"] for token in choice.get("token_ids", ())]
            if pause_s:
                await asyncio.sleep(pause_s)
    return tuple(ids), first_s


async def keep_asking(load: Load, until: float, seed: int, pause_s: float = 0.0) -> None:
    """Be a client: one question after the other."""
    generator = random.Random(seed)
    async with httpx2.AsyncClient(timeout=600) as client:
        while time.perf_counter() < until:
            number = generator.randrange(len(load.questions))
            start = time.perf_counter()
            try:
                ids, first_s = await ask(client, load, number, pause_s)
            except httpx2.HTTPStatusError as error:
                if error.response.status_code == 429:
                    load.refused["waiting"] += 1
                    await asyncio.sleep(float(error.response.headers["retry-after"]))
                else:
                    load.lost[f"status {error.response.status_code}"] += 1
                continue
            except (httpx2.TransportError, RuntimeError) as error:
                load.lost[type(error).__name__] += 1
                continue
            if ids != load.expected[number]:
                key = number, ids
                load.different[key] = load.different.get(key, 0) + 1
            if not pause_s:
                load.first_s.append(first_s)
                load.whole_s.append(time.perf_counter() - start)
            load.tokens += load.questions[number]["max_tokens"]


async def keep_hanging_up(load: Load, until: float, seed: int) -> None:
    """Ask and go before the answer is there."""
    generator = random.Random(seed)
    while time.perf_counter() < until:
        async with httpx2.AsyncClient(timeout=600) as client:
            task = asyncio.create_task(ask(client, load, generator.randrange(len(load.questions))))
            await asyncio.sleep(generator.random() * 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def keep_misbehaving(load: Load, until: float) -> None:
    """Send what has to be refused."""
    url = f"{load.address}/v1/completions"
    good = load.questions[0]
    cases: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "too large": ({"content": b"x" * (9 << 20), "headers": HEAD}, (413,)),
        "broken": ({"content": b'{"model": ', "headers": HEAD}, (400,)),
        "no text": ({"content": b"\xff\xfe", "headers": HEAD}, (400,)),
        "deep": ({"content": b"[" * 100_000, "headers": HEAD}, (400,)),
        "unknown key": ({"json": {**good, "surprise": 1}, "headers": HEAD}, (400,)),
        "wrong key": ({"json": good, "headers": {"Authorization": "Bearer no"}}, (401,)),
        "many headers": (
            {"json": good, "headers": HEAD | {f"x-{n}": "y" * 500 for n in range(90)}},
            (400, 431),
        ),
    }
    async with httpx2.AsyncClient(timeout=600) as client:
        while time.perf_counter() < until:
            for name, (options, allowed) in cases.items():
                try:
                    status = (await client.post(url, **options)).status_code
                except httpx2.TransportError:
                    status = allowed[0]  # it was cut off before all of it was sent
                (load.refused if status in allowed else load.not_refused)[name] += 1
            await asyncio.sleep(1.0)


async def watch_memory(load: Load, process: int, until: float) -> None:
    """Note the server's resident memory every second."""
    page = os.sysconf("SC_PAGE_SIZE")
    while time.perf_counter() < until:
        try:
            fields = Path(f"/proc/{process}/statm").read_text("ascii").split()
        except OSError:
            return
        load.rss_bytes.append(int(fields[1]) * page)
        await asyncio.sleep(1.0)


async def run(load: Load, process: int, clients: int, seconds: float) -> None:
    """Ask alone, then together."""
    async with httpx2.AsyncClient(timeout=600) as client:
        for number in range(len(load.questions)):
            load.expected.append((await ask(client, load, number))[0])
    until = time.perf_counter() + seconds
    await asyncio.gather(
        *(keep_asking(load, until, seed) for seed in range(clients)),
        *(keep_asking(load, until, 1000 + seed, pause_s=0.2) for seed in range(2)),
        *(keep_hanging_up(load, until, 2000 + seed) for seed in range(4)),
        keep_misbehaving(load, until),
        watch_memory(load, process, until),
    )


def follow(model: LoadedModel, question: Mapping[str, Any], ids: Sequence[int]) -> bool:
    """Whether a model that does nothing else could have answered so, but for rounding: each token
    has to be the one that is drawn after the same tokens, read in one of three ways, or one that is
    drawn where logits are a little different."""
    if len(ids) != question["max_tokens"]:
        return False
    prompt = model.encode(question["prompt"])
    request = model.describe_request(
        prompt, temperature=question["temperature"], seed=question["seed"]
    )
    sampler, noise = Sampler(request.sampling), np.random.default_rng(0)
    ways = list(read_in_turn(model, prompt, ids))
    for number, token in enumerate(ids):
        seen = np.array([*prompt, *ids[:number]], np.int64)
        before = copy.deepcopy(sampler)
        if sampler.sample(ways[0][number], seen, prompt=len(prompt)) == token:
            continue
        changed = (
            way[number] + noise.normal(0, size, way.shape[1:]).astype(np.float32)
            for way in ways
            for size in (0.0, *[ROUNDING] * 300)
        )
        if not any(
            copy.deepcopy(before).sample(logits, seen, prompt=len(prompt)) == token
            for logits in changed
        ):
            return False
    return True


def read_in_turn(
    model: LoadedModel, prompt: Sequence[int], ids: Sequence[int]
) -> Iterator[npt.NDArray[np.float32]]:
    """Logits [n, vocab] before each of ``ids``: read one by one after a prompt in chunks, all one
    by one, and all in chunks.  Activations of 8 bits round differently in each."""
    forward, rest = model._parts.forward, ids[:-1]
    forward.reset_all()
    logits = [forward.prefill(np.array(prompt, np.int32))[0].copy()]
    yield np.array(logits + [forward.decode(int(token)).copy() for token in rest])
    forward.reset_all()
    steps = [forward.decode(int(token)).copy() for token in [*prompt, *rest]]
    yield np.array(steps[len(prompt) - 1 :])
    forward.reset_all()
    yield forward.prefill(np.array([*prompt, *rest], np.int32), all_logits=True)[len(prompt) - 1 :]


def find_wrong(load: Load, plan: Path, settings: Sequence[str]) -> int:
    """How many of the different answers are not the model's."""
    if not load.different:
        return 0
    with pi2.load(plan, set=parse_assignments(tuple(settings))) as model:
        return sum(
            count
            for (number, ids), count in load.different.items()
            if not follow(model, load.questions[number], ids)
        )


def find_percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of them do not exceed."""
    if not values:
        return None
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 4)


def divide_in_quarters(values: Sequence[int]) -> list[int]:
    """The largest value of each quarter of ``values``; 0 where there is none."""
    ends = [len(values) * number // 4 for number in range(5)]
    return [max(values[first:end], default=0) for first, end in pairwise(ends)]


def describe(
    load: Load, clients: int, seconds: float, *, alive: bool, wrong: int
) -> dict[str, Any]:
    """What came of it."""
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": len(load.whole_s),
        "tokens_s": round(load.tokens / seconds, 1),
        "different_by_rounding": sum(load.different.values()) - wrong,
        "wrong": wrong,
        "lost": dict(load.lost),
        "ttft_p50_s": find_percentile(load.first_s, 0.5),
        "ttft_p99_s": find_percentile(load.first_s, 0.99),
        "whole_p99_s": find_percentile(load.whole_s, 0.99),
        "refused": dict(load.refused),
        "not_refused": dict(load.not_refused),
        "rss_bytes_by_quarter": divide_in_quarters(load.rss_bytes),
        "alive": alive,
    }


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    options.plan = find_plan(options.plan)
    command = [sys.executable, "-m", "pi2", "serve", str(options.plan), "--port", "0"]
    command += [part for setting in options.settings for part in ("--set", setting)]
    environment = {**os.environ, "PI2_API_KEY": KEY}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = ""
        while " on http" not in line:
            line = process.stderr.readline()
            if not line:
                print("the server does not start", file=sys.stderr)
                return 1
        model, _, address = line.strip().removeprefix("pi2 serves ").partition(" on ")
        # Its log would fill the pipe.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        load = Load(address, model, make_questions(model, options.questions, seed=1))
        try:
            asyncio.run(run(load, process.pid, options.clients, options.seconds))
            alive = httpx2.get(f"{address}/health").is_success
        finally:
            process.terminate()
            process.wait(30)
            drain.wait(30)
    wrong = find_wrong(load, options.plan, options.settings)
    found = describe(load, options.clients, options.seconds, alive=alive, wrong=wrong)
    text = json.dumps(found, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", "utf-8")
    grown = found["rss_bytes_by_quarter"][-1] - found["rss_bytes_by_quarter"][0]
    failed = wrong or load.lost or load.not_refused or not alive or grown > GROWTH_BYTES
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
