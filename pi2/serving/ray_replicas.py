"""Replicas of a server on a Ray cluster (`pi2 serve --on ray`), replaced one by one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message

from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.ray_cluster import import_ray, start_ray
from pi2.serving.application import Settings, make_application
from pi2.serving.errors import ApiError
from pi2.serving.front import USE, ReplicaLost
from pi2.serving.hosts import ServedPlan
from pi2.serving.requests import make_id

NAME = "pi2"
_QUIET = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many replicas there are."""

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
