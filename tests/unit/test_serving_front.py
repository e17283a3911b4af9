"""The address before several replicas of a server: what happens when one is lost."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from starlette.types import Message

from pi2.serving import front
from pi2.serving.application import Settings
from pi2.serving.front import USE, ReplicaLost, make_front
from pi2.serving.metrics import Metrics
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tables import in_table

STREAM = {"type": "http.response.start", "status": 200}
EVENTS: list[Message] = [
    {**STREAM, "headers": [(b"content-type", b"text/event-stream")]},
    {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True},
    {"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True},
    {"type": USE, "values": {"completion_tokens": 2}},
    {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False},
]


class Replicas:
    """Each answers with so many messages of `EVENTS` and is lost then; the last one with all."""

    def __init__(
        self, lost_after: Sequence[int], *, waits: bool = False, events: Sequence[Message] = EVENTS
    ) -> None:
        self.lost_after = list(lost_after)
        self.events = events
        self.waits = waits
        self.bodies: list[bytes] = []
        self.closed = 0

    async def ask(self, call: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        self.bodies.append(body)
        count = self.lost_after.pop(0) if self.lost_after else len(self.events)
        try:
            for message in self.events[:count]:
                yield message
                await asyncio.sleep(0)
            if self.waits:
                await asyncio.sleep(PATIENCE_S)
            if count < len(self.events):
                raise ReplicaLost("killed")
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_WAIT_S", 0.0)


def ask(
    replicas: Replicas, path: str = "/v1/completions", *, body: bytes = b"{}",
    key: bytes = b"secret", hangs_up: bool = False,
) -> list[Message]:  # fmt: skip
    application = make_front(Settings(plans=[], keys=["secret"], body_bytes=100), replicas)
    sent: list[Message] = []
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        if not hangs_up:
            await asyncio.sleep(PATIENCE_S)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": path, "headers": [(b"x-api-key", key)],
            "query_string": b"", "server": ("127.0.0.1", 80), "scheme": "http",
        }  # fmt: skip
        await asyncio.wait_for(application(scope, receive, send), PATIENCE_S)

    asyncio.run(run())
    return sent


def read_text(sent: Sequence[Message]) -> str:
    return b"".join(message.get("body", b"") for message in sent).decode("utf-8")


@pytest.mark.parametrize("lost_after", [[0], [1], [0, 1, 0]])
def test_another_replica_answers_where_nothing_was_sent_yet(lost_after: list[int]) -> None:
    replicas = Replicas(lost_after)
    sent = ask(replicas, body=b'{"a": 1}')
    assert read_text(sent) == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert replicas.bodies == [b'{"a": 1}'] * (len(lost_after) + 1)


def test_signs_of_life_are_no_part_of_an_answer() -> None:
    ping = {"type": "http.response.body", "body": b": ping\n\n", "more_body": True}
    sent = ask(Replicas([2, 2], events=[EVENTS[0], ping, *EVENTS[1:]]))
    assert read_text(sent) == ": ping\n\n" * 3 + "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert [message["type"] for message in sent].count("http.response.start") == 1
    gone = ask(Replicas([2] * 9, events=[EVENTS[0], ping, *EVENTS[1:]]))
    assert "The replica that answered has ended" in read_text(gone)
    assert [message["type"] for message in gone].count("http.response.start") == 1


@in_table
def test_a_stream_that_has_begun_ends_with_an_error_of_its_interface(path: str, last: str) -> None:
    replicas = Replicas([3])
    sent = ask(replicas, path)
    text = read_text(sent)
    assert text.startswith("data: 1\n\ndata: 2\n\n" + last) and "[DONE]" not in text
    assert sent[-1]["more_body"] is False
    assert len(replicas.bodies) == 1, "what was sent cannot be taken back"


def test_a_client_is_told_when_no_replica_stays() -> None:
    replicas = Replicas([0] * 50)
    sent = ask(replicas)
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"5") in sent[0]["headers"]
    assert json.loads(read_text(sent))["error"]["type"] == "overloaded_error"
    assert len(replicas.bodies) == front.TRIES


def test_whoever_hangs_up_gives_the_answer_up() -> None:
    replicas = Replicas([3], waits=True)
    assert "error" not in read_text(ask(replicas, hangs_up=True))
    assert replicas.closed == 1


def test_sizes_and_keys_are_looked_at_before_a_replica_is_asked() -> None:
    replicas = Replicas([])
    assert ask(replicas, body=b"x" * 101)[0]["status"] == 413
    assert ask(replicas, key=b"other")[0]["status"] == 401
    assert replicas.bodies == []


def test_numbers_of_a_replica_say_whose_they_are() -> None:
    metrics = Metrics([], replica="r1")
    metrics.note_abort("tiny")
    samples = [line for line in metrics.write().decode().splitlines() if not line.startswith("#")]
    assert samples
    assert all('replica="r1"' in line for line in samples)
    alone = Metrics([])
    alone.note_abort("tiny")
    assert b"replica" not in alone.write()
