"""One address for several replicas. Requests of a lost one move unless events were sent.

Replicas of a server on a Ray cluster (`pi2 serve --on ray`) are replaced one by one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.ray_cluster import import_ray, start_ray
from pi2.serving.application import Settings, list_middleware, make_application, refuse
from pi2.serving.errors import PING, ApiError, write_stream_error
from pi2.serving.hosts import ServedPlan
from pi2.serving.requests import ClientGone, make_id, note_use, read_body, wait_for_client

_LEAST_TAKEN_BYTES = 16 << 10
"""What a client has to take in each `TimedConnection.reading_s` while an answer waits."""


class TimedConnection(H11Protocol):
    """Closes itself if headers do not arrive in time, or a client does not read its answer."""

    headers_s: ClassVar[float] = 30.0
    """Seconds from the connection, or from the last answer, to the end of a request's headers."""
    reading_s: ClassVar[float] = 30.0
    """Seconds that a client may take for a part of an answer, or for the rest of it."""
    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def on_response_complete(self) -> None:
        """An answer is sent; the next request may come."""
        super().on_response_complete()
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._reading):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client does not read: it is watched until it has."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None and not self.transport.is_closing():
            self._reading.cancel()
            self._reading = None

    def _watch_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        left = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(self.reading_s, self._cut_off, left)

    def _cut_off(self, left_before: int) -> None:
        """End the connection unless the client has read since ``left_before`` bytes were left."""
        left = self.transport.get_write_buffer_size()
        if left and left_before - left < _LEAST_TAKEN_BYTES:
            self.transport.abort()  # closing would wait for the client
        elif left:
            self._watch_reader()

    def _wait_for_headers(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.headers_s, self._close_idle)

    def _close_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
            self._watch_reader()


TRIES = 4
"""Replicas that a request may be given to, one after the other."""
_WAIT_S = 0.25
"""Seconds before the second try; twice as many before each further one."""
_HEALTH_S = 5.0
"""Seconds until a replica must have reported that it runs."""
_PASSED_ON = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server", "asgi"),
)
"""What a replica is told of a request: all that can be sent to another process."""
USE = "pi2.use"
"""Type of the message before an answer's last that says what the access log tells of it."""


class ReplicaLost(Exception):
    """A replica has ended before its answer did."""


class Replicas(Protocol):
    def ask(self, call: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        """ASGI messages of an answer, and one of type `USE`; raises `ReplicaLost` or ApiError."""
        ...


class Front:
    """An ASGI application that lets replicas answer."""

    def __init__(self, replicas: Replicas, *, body_bytes: int) -> None:
        self._replicas = replicas
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "there are no web sockets"
        request = Request(scope, receive)
        try:
            body = await read_body(request, self._body_bytes)
            answer = self._answer(request, body, send)
            if scope["path"] == "/health":
                answer = asyncio.wait_for(answer, _HEALTH_S)
            await wait_for_client(request, answer)
        except ApiError as error:
            await refuse(error, scope["path"])(scope, receive, send)
        except TimeoutError:
            late = ApiError(503, "No replica answers.", retry_after_s=5)
            await refuse(late, scope["path"])(scope, receive, send)
        except ClientGone:
            return

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        """Pass on what a replica sends; ApiError if nothing was sent."""
        passed = _Passed(request, send)
        for attempt in range(TRIES):
            call = {key: value for key, value in request.scope.items() if key in _PASSED_ON}
            try:
                async with aclosing(self._replicas.ask(call, body)) as messages:
                    async for message in messages:
                        await passed.take(message)
                await passed.end()
                return
            except ReplicaLost as error:
                get_logger().warning("replica lost", path=request.url.path, reason=str(error))
                if passed.has_events:
                    break
            await asyncio.sleep(_WAIT_S * 2**attempt)
        if passed.has_begun:
            await passed.break_off()
            return
        raise ApiError(503, "The replicas that were asked have ended.", retry_after_s=5)


class _Passed:
    def __init__(self, request: Request, send: Send) -> None:
        self._request = request
        self._send = send
        self._start: Message | None = None
        self._last: Message | None = None
        self._events = 0
        self.has_begun = False
        """Whether the status was sent."""
        self.has_events = False
        """Whether something of the answer was sent, other than signs of life."""

    async def take(self, message: Message) -> None:
        """Pass a message on: the status with the first part, the last part at the end."""
        if message["type"] == USE:
            note_use(self._request, **message["values"])
        elif message["type"] == "http.response.start":
            if self.has_begun and message["status"] != 200:
                raise ReplicaLost("the answer had begun, and another replica refuses it")
            self._start = message
        elif message.get("more_body", False):
            await self._begin()
            body = message.get("body", b"")
            self.has_events |= body != PING
            self._events += body.count(b"data: ")
            await self._send(message)
        else:
            self._last = message

    async def end(self) -> None:
        assert self._last is not None
        await self._begin()
        await self._send(self._last)

    async def _begin(self) -> None:
        if not self.has_begun:
            assert self._start is not None
            self.has_begun = True
            await self._send(self._start)

    async def break_off(self) -> None:
        """End a stream with an event that says why; of anything else the connection is cut."""
        assert self._start is not None
        kind = dict(self._start["headers"]).get(b"content-type", b"")
        if not kind.startswith((b"text/event-stream", b"application/x-ndjson")):
            raise ConnectionError("the replica has ended in the middle of an answer")
        note_use(self._request, failed=503)
        error = ApiError(503, "The replica that answered has ended; ask again.")
        last = write_stream_error(self._request.url.path, error, self._events)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def make_front(settings: Settings, replicas: Replicas) -> ASGIApp:
    """The application that is served: keys, origins and sizes are looked after here."""
    application: ASGIApp = Front(replicas, body_bytes=settings.body_bytes)
    for layer in reversed(list_middleware(settings)):
        application = layer.cls(application, *layer.args, **layer.kwargs)
    return application


NAME = "pi2"
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class Scaling:
    least: int = 1
    most: int = 1
    """More than ``least`` lets Ray choose, by the requests under way."""


class Replica:
    """A server without a port, which answers what Ray brings."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        self._application = make_application(replace(settings, replica=make_id("")))
        await self._application.state.hosts.start()

    async def answer(self, call: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        scope: dict[str, Any] = {**call, "state": {}}
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._application(scope, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    yield {"type": USE, "values": scope["state"].get("use", {})}
                yield message
            await task
        finally:
            gone.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class RayReplicas:
    """The replicas of this process's Ray Serve application."""

    def __init__(self, settings: Settings, scaling: Scaling) -> None:
        """`UserError` P355 without Ray Serve."""
        self._ray = import_ray()
        try:
            from ray import serve
        except ImportError as error:
            raise UserError.of(
                "P355", f"Ray Serve is not installed: {error}", help="pip install 'pi2[ray]'"
            ) from None
        self._serve = serve
        self._settings = settings
        self._scaling = scaling
        self._handle: Any = None
        self._started = False

    async def start(self) -> None:
        """Start all replicas; `UserError` P355 without a cluster, P685 if they do not start."""
        await asyncio.to_thread(self._start)

    async def change(self, plans: Sequence[ServedPlan]) -> None:
        """Replace the replicas one by one by replicas of ``plans``; `UserError` P685."""
        self._settings = replace(self._settings, plans=plans)
        await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if not self._ray.is_initialized():
            start_ray(self._ray)
            self._started = True
        if self._handle is None:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            self._serve.start(proxy_location="Disabled", logging_config=_QUIET)
        self._check_room()
        inner = replace(self._settings, keys=(), origins=())
        application = self._describe().bind(inner)
        try:
            handle = self._serve.run(
                application, name=NAME, route_prefix=None, logging_config=_QUIET
            )
        except RuntimeError as error:
            raise UserError.of(
                "P685",
                f"the replicas do not start: {str(error).strip().splitlines()[-1]}",
                help="each needs memory for the plans' budgets on one machine of the cluster, and "
                "the plans' files at the same paths; `ray status` and Ray's logs say more",
            ) from None
        self._handle = handle.options(stream=True, method_name="answer")

    @property
    def _need_bytes(self) -> int:
        settings = self._settings
        return settings.memory_bytes or sum(plan.budget_bytes for plan in settings.plans)

    def _check_room(self) -> None:
        """`UserError` P685 if this machine can never hold the replicas; clusters may grow."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        room = sum(
            int(min(node.get("CPU", 0), node.get("memory", 0) // self._need_bytes))
            for node in nodes
        )
        if room >= self._scaling.least:
            return
        if self._started:
            raise UserError.of(
                "P685",
                f"this machine has room for {room} replicas, not for {self._scaling.least}",
                help="each takes a processor and the plans' budgets; ask for fewer with --replicas",
            )
        get_logger().warning("waiting for machines", replicas=self._scaling.least, room=room)

    def _describe(self) -> Any:
        settings, scaling = self._settings, self._scaling
        number: dict[str, Any] = {"num_replicas": scaling.least}
        if scaling.most > scaling.least:
            places = max(plan.places for plan in settings.plans)
            limits = {"min_replicas": scaling.least, "max_replicas": scaling.most}
            number = {"autoscaling_config": {**limits, "target_ongoing_requests": places}}
        return self._serve.deployment(
            Replica,
            name=NAME,
            ray_actor_options={"num_cpus": 1, "memory": self._need_bytes},
            # Replicas have queues of their own, in which clients take turns.
            max_ongoing_requests=settings.limits.waiting + 256,
            graceful_shutdown_timeout_s=settings.limits.time_s,
            health_check_period_s=5.0,
            **number,
        )

    async def ask(self, call: Mapping[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        """The messages of an answer; raises `ReplicaLost`, and ApiError if there is no replica."""
        from ray import exceptions
        from ray.serve.exceptions import BackPressureError, RayServeException

        answer = self._handle.remote(call, body)
        is_whole = False
        try:
            async for message in answer:
                yield message
            is_whole = True
        except BackPressureError:
            raise ApiError(429, "Too many requests are waiting.", retry_after_s=1) from None
        except exceptions.RayTaskError as error:
            is_whole = True
            raise ApiError(500, "the server has failed; its log says why") from error
        except (exceptions.RayError, RayServeException) as error:
            is_whole = True
            raise ReplicaLost(type(error).__name__) from None
        finally:
            if not is_whole:
                answer.cancel()

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        if self._handle is not None:
            self._serve.delete(NAME)
        if self._started:
            self._ray.shutdown()
