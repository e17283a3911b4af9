"""The server, with clients that go, send slowly, read nothing, or ask too much."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import httpx2
import uvicorn
from starlette.responses import Response, StreamingResponse
from uvicorn.server import ServerState

from pi2.engine.answer import Ticket
from pi2.serving.calls import Answers, Ask, Limits
from pi2.serving.errors import ApiError
from pi2.serving.front import TimedConnection
from pi2.serving.hosts import Hosts
from pi2.serving.metrics import Metrics
from tests.helpers.patience import PATIENCE_S
from tests.helpers.servers import HELLO, TOOLS, describe_plan, get, post, serve, wait_until_idle


def test_an_answered_request_leaves_nothing_behind(address: str) -> None:
    def count_tickets() -> int:
        return sum(type(item) is Ticket for item in gc.get_objects())

    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "stream": True, "n": 3}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "tools": TOOLS}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "stream": True}),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 3}}),
    ]
    wait_until_idle(address)
    gc.collect()
    before = count_tickets()
    gc.disable()  # what two objects keep for each other stays, and is counted
    try:
        for path, body in asked:
            answer = post(f"{address}{path}", json={"model": "tiny", **body})
            assert answer.is_success, answer.text
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 900, "ignore_eos": True}
        with pytest.raises(httpx2.TimeoutException):
            post(f"{address}/v1/completions", json=body, timeout=0.1)
        wait_until_idle(address)
        # The last one goes when its connection does.
        deadline = time.monotonic() + PATIENCE_S
        while count_tickets() > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert count_tickets() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_frees_its_place(address: str, streams: bool) -> None:
    before = wait_until_idle(address)["rounds"]["stepped_tokens"]
    body = json.dumps(
        {"model": "tiny", "prompt": "go on", "max_tokens": 900, "stream": streams, "n": 4}
        | {"ignore_eos": True}
    )
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        while not get(f"{address}/api/state").json()["models"][0]["running"]:
            time.sleep(0.01)
    assert wait_until_idle(address)["rounds"]["stepped_tokens"] - before < 4 * 899


def test_bodies_and_headers_have_limits(plan: Path) -> None:
    settings: dict[str, Any] = {
        "body_bytes": 4096,
        "keys": ["secret"],
        "limits": Limits(waiting=0, time_s=60),
    }
    with serve([describe_plan(plan)], **settings) as address:
        url, head = f"{address}/v1/completions", {"Authorization": "Bearer secret"}
        assert get(f"{address}/health").status_code == 200
        assert get(f"{address}/v1/models").status_code == 401
        assert get(f"{address}/v1/models", headers={"x-api-key": "sec"}).status_code == 401
        assert get(f"{address}/v1/models", headers={"x-api-key": "secret"}).is_success
        assert post(url, headers=head, content=b"x" * 5000).status_code == 413
        assert post(url, headers=head, content=iter([b"x" * 3000] * 3)).status_code == 413
        for broken in (b"", b"{", b"\xff", b"[]", b"1" * 4000, b"[" * 4000):
            answer = post(url, headers=head, content=broken)
            assert answer.status_code == 400, broken[:10]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        flood = {f"x-{number}": "y" * 900 for number in range(90)}
        assert get(f"{address}/health", headers=flood).status_code == 431
        with contextlib.suppress(httpx2.TransportError):
            endless = {f"x-{number}": "y" * 9000 for number in range(900)}
            assert get(f"{address}/health", headers=endless).status_code in (400, 431)
        assert get(f"{address}/nothing", headers=head).status_code == 404
        assert get(url, headers=head).status_code == 405
        # One has the place, and nobody may wait, not even one.
        long = {"model": "tiny", "prompt": "a", "max_tokens": 150, "ignore_eos": True}
        thread = threading.Thread(target=post, args=(url,), kwargs={"headers": head, "json": long})
        thread.start()
        while not get(f"{address}/api/state", headers=head).json()["models"][0]["running"]:
            time.sleep(0.01)
        second = threading.Thread(target=post, args=(url,), kwargs={"headers": head, "json": long})
        second.start()
        refused = None
        deadline = time.monotonic() + PATIENCE_S
        while refused is None and time.monotonic() < deadline:
            answer = post(url, headers=head, json=long)
            refused = answer if answer.status_code == 429 else None
        thread.join()
        second.join()
        assert refused is not None and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"


def test_whoever_does_not_send_headers_in_time_is_cut_off(plan: Path) -> None:
    class Impatient(TimedConnection):
        headers_s = 0.5

    with serve([describe_plan(plan)], connection=Impatient) as address:
        host, port = address.removeprefix("http://").split(":")
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection((host, int(port))) as connection:
                connection.settimeout(PATIENCE_S)
                if before:
                    connection.sendall(before)
                    assert b"200" in connection.recv(4096)
                with contextlib.suppress(ConnectionError):
                    for letter in b"POST /v1/completions HTTP/1.1\r\nX-Slow: " + b"y" * 100:
                        connection.sendall(bytes([letter]))
                        time.sleep(0.02)
                    assert connection.recv(1) == b"", "it is open still"
        # An answer may take longer.
        body = {"model": "tiny", "prompt": "go on", "max_tokens": 150, "ignore_eos": True}
        answer = post(f"{address}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 150


def test_an_answer_that_takes_too_long_is_given_up(plan: Path) -> None:
    body = {"model": "tiny", "prompt": "go on", "max_tokens": 900, "ignore_eos": True}
    for time_s in (0.2, 1.0, 5.0):
        with serve([describe_plan(plan)], limits=Limits(time_s=time_s)) as address:
            url = f"{address}/v1/completions"
            assert post(url, json=body).status_code == 504
            made = wait_until_idle(address)["rounds"]["stepped_tokens"]
            *pieces, last, _ = post(url, json={**body, "stream": True}).text.split("\n\n")
            assert f"took more than {time_s:g} s" in last
            assert wait_until_idle(address)["rounds"]["stepped_tokens"] - made < 899
        if len(pieces) > 1:
            return
    raise AssertionError("a busy machine gets no token out")


def test_an_answer_that_nobody_takes_is_given_up_in_time(plan: Path) -> None:
    async def run() -> None:
        hosts = Hosts([describe_plan(plan)])
        await hosts.start()
        host = hosts.hosts["tiny"]
        ask = Ask(prompt_ids=[1, 2], max_tokens=900, ignore_eos=True)
        for time_s in (0.2, 1.0, 5.0, 25.0):  # a busy machine needs more for the first token
            answers = Answers(host, [ask], Limits(time_s=time_s), Metrics([]))
            with contextlib.suppress(ApiError):
                await answers.take()  # and never again
                break
        deadline = time.monotonic() + PATIENCE_S
        while host.model.scheduler.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not host.model.scheduler.running
        assert host.model.scheduler.rounds.whole.tokens < 899
        with pytest.raises(ApiError, match="took more than"):
            await answers.collect()
        await hosts.stop()

    asyncio.run(run())


@pytest.mark.parametrize("ends", [False, True])
def test_a_client_that_does_not_read_is_cut_off(plan: Path, ends: bool) -> None:
    class Impatient(TimedConnection):
        headers_s = reading_s = 0.3

    over = threading.Event()

    def answer_much(app: Any) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return

            async def write() -> AsyncIterator[bytes]:
                yield b"x" * (20 << 20)  # more than the buffers between take
                while not ends:
                    await asyncio.sleep(0)
                    yield b"x" * 1000

            try:
                await StreamingResponse(write())(scope, receive, send)
            finally:
                over.set()

        return answer

    with serve([describe_plan(plan)], answer_much, Impatient) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert over.wait(PATIENCE_S)
            connection.settimeout(PATIENCE_S)
            taken = 0
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    taken += len(data)
            assert taken < 20 << 20


@pytest.mark.parametrize(
    ("left_bytes", "is_cut_off"),
    [([900_000, 880_000, 30_000, 0], False), ([900_000, 890_000], True), ([900_000] * 2, True)],
)
def test_a_client_that_reads_slowly_gets_all_and_one_that_hardly_reads_does_not(
    left_bytes: list[int], is_cut_off: bool
) -> None:
    class Impatient(TimedConnection):
        reading_s = 0.0

    transport = Mock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    transport.get_write_buffer_size.side_effect = left_bytes

    async def run() -> None:
        connection = Impatient(uvicorn.Config(Response()), ServerState(), {})
        connection.connection_made(transport)
        connection.pause_writing()
        for _ in range(10 * len(left_bytes)):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert transport.get_write_buffer_size.call_count == len(left_bytes)
    assert transport.abort.called == is_cut_off
