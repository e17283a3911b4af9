"""`pi2 serve --on ray`: two replicas on this machine, one of which is killed under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("ray.serve", reason="needs the extra ray", exc_type=ImportError)

from tests.helpers.patience import PATIENCE_S
from tests.helpers.servers import make_chat_plan

pytestmark = pytest.mark.slow
PROMPTS = ("one", "two", "three", "four")


@dataclass(frozen=True)
class Server:
    address: str
    process: subprocess.Popen[str]
    mark: str
    """What its replicas have in their environment."""
    plan: Path

    def list_replicas(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                name = (folder / "cmdline").read_bytes()
                if b"ServeReplica" in name and self.mark in (folder / "environ").read_text():
                    found.append(int(folder.name))
            except (OSError, ValueError):
                continue
        return found

    def ask(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": self.plan.parent.name, "prompt": prompt, "max_tokens": 24, "seed": 1}
        body |= {"ignore_eos": True, "temperature": 1, **more}
        answer = httpx2.post(f"{self.address}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def start(folder: Path, *options: str) -> Iterator[Server]:
    mark = f"pi2-test-{uuid.uuid4().hex}"
    plan = make_chat_plan(folder / "tiny", {"decode": {"batch": 2}})
    named = plan.rename(plan.with_name("default.plan.toml"))
    command = [sys.executable, "-m", "pi2", "serve", str(named), "--on", "ray", "--port", "0"]
    environment = {**os.environ, "PI2_TEST_MARK": mark}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not (found := re.search(r" on (http://127\.0\.0\.1:\d+)", "".join(lines))):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        told: list[str] = []
        reading = threading.Thread(target=lambda: told.extend(process.stderr or ()))
        reading.start()
        try:
            yield Server(found[1], process, mark, named)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
            reading.join()
    assert "Traceback" not in "".join(told)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("ray"), "--replicas", "2") as server:
        yield server


class Load:
    """Clients that ask until they are told to end: half of them read streams."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.alone = {prompt: self.read_stream(prompt) for prompt in PROMPTS}
        self.came: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self.keep_asking, args=[n]) for n in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, kind: str, count: int) -> None:
        wanted, deadline = self.came[kind] + count, time.monotonic() + PATIENCE_S
        while self.came[kind] < wanted:
            assert time.monotonic() < deadline, self.came
            time.sleep(0.02)

    def read_stream(self, prompt: str) -> str:
        """The text of a stream; RuntimeError for one that ends with an error event."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "seed": 1, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        url, text, ended = f"{self.server.address}/v1/completions", "", False
        with httpx2.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    text += event["choices"][0]["text"]
        assert ended, "the stream was cut off"
        return text

    def keep_asking(self, number: int) -> None:
        while not self._ends.is_set():
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                if number % 2:
                    text, kind = self.read_stream(prompt), "stream"
                else:
                    answer = self.server.ask(prompt, temperature=0)
                    text, kind = answer["choices"][0]["text"], "whole"
            except RuntimeError as error:
                self.came["broken off" if "has ended" in str(error) else str(error)] += 1
                continue
            except Exception as error:
                self.wrong.append(repr(error))
                return
            self.came[kind] += 1
            if text != self.alone[prompt]:
                self.came["otherwise"] += 1


def test_a_killed_replica_costs_no_answer_that_can_be_had_again(server: Server) -> None:
    replicas = server.list_replicas()
    assert len(replicas) == 2
    with Load(server) as load:
        load.wait_for("whole", 2)
        load.wait_for("stream", 2)
        os.kill(replicas[0], signal.SIGKILL)
        load.wait_for("whole", 4)
        load.wait_for("stream", 4)
    assert load.wrong == []
    # A stream that had begun ends with an error that says so; there is nothing else.
    assert set(load.came) <= {"whole", "stream", "broken off"}, load.came
    assert load.came["broken off"] <= 2, "one stream of each client at most"
    deadline = time.monotonic() + PATIENCE_S
    while len(server.list_replicas()) < 2:
        assert time.monotonic() < deadline, "the lost replica does not come back"
        time.sleep(0.2)


def test_a_changed_plan_takes_the_place_of_the_other_without_a_lost_answer(server: Server) -> None:
    before = server.ask("x")["system_fingerprint"]
    text = server.plan.read_text("utf-8")
    with Load(server) as load:
        load.wait_for("whole", 2)
        server.plan.write_text(text + "\n[sampling]\ntop_p = 0.5\n", "utf-8")
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_S
        while {server.ask("x", max_tokens=1)["system_fingerprint"] for _ in range(4)} & {before}:
            assert time.monotonic() < deadline, "the old plan is still served"
        load.wait_for("whole", 4)
    assert load.wrong == []
    assert set(load.came) <= {"whole", "stream"}, load.came


def test_a_plan_that_is_not_sound_changes_nothing(server: Server) -> None:
    text = server.plan.read_text("utf-8")
    server.plan.write_text(text + "\n[nonsense]\n", "utf-8")
    try:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert server.ask("x")["usage"]["completion_tokens"] == 24
    finally:
        server.plan.write_text(text, "utf-8")


def test_more_replicas_than_the_machine_holds_are_refused(server: Server) -> None:
    command = [sys.executable, "-m", "pi2", "serve", str(server.plan), "--on", "ray", "--port", "0"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--replicas", "1000"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "P685" in done.stderr and "not for 1000" in done.stderr
