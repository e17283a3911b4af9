"""The server's routes, and what every request passes through."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.logging import get_logger
from pi2.orchestrator import read_memory
from pi2.serving import ollama
from pi2.serving.calls import Limits
from pi2.serving.errors import ApiError, explain_user_error, find_form
from pi2.serving.hosts import Host, Hosts, ServedPlan
from pi2.serving.metrics import Metrics
from pi2.serving.openai_schema import Strict
from pi2.serving.openapi import OPERATIONS, describe_interface
from pi2.serving.requests import ClientGone, JsonResponse, NotedSend, Service, parse_body

FILE = Path(__file__).with_name("page.html")


@cache
def read_page() -> bytes:
    return FILE.read_bytes()


class BudgetRequest(Strict):
    """``/api/budget``."""

    memory: str
    """A size, or a share of the free memory."""
    model: str | None = None
    """The one whose budget it is; None means all together."""


def describe_state(hosts: Iterable[Host]) -> dict[str, Any]:
    """Counters of all models, as they are now: the page takes differences."""
    return {
        "peak_memory_bytes": read_peak_rss_bytes(),
        "models": [_describe(host) for host in hosts],
    }


_OF_UNITS = ("name", "owned_share", "computed_neurons", "busy_s", "lost")


def _describe(host: Host) -> dict[str, Any]:
    if not host.is_loaded:
        return {"name": host.plan.name, "loaded": False, "waiting": host.waiting}
    model = host.model
    plan, scheduler = model.plan.plan, model.scheduler
    return {
        "name": host.plan.name,
        "loaded": True,
        "plan": model.plan.digest[:12],
        "context": plan.kv.context,
        "places": scheduler.places,
        "running": scheduler.running,
        "waiting": scheduler.waiting + host.waiting,
        "context_use": round(scheduler.measure_context_use(), 4),
        "rounds": scheduler.rounds.describe(),
        "statistics": asdict(model.stats),
        "budget_bytes": plan.memory.budget,
        "bound_by": find_bound(model),
        "segments": dict(plan.memory.segments),
        "units": [{key: getattr(unit, key) for key in _OF_UNITS} for unit in model.units],
        "sparse_unit": model.plan.sparse_unit,
        "io_engine": model.io_engine,
        "sampling": model.chat_sampling,
    }


def find_bound(model: LoadedModel) -> str | None:
    """What takes most of the time of its steps; None before there were any."""
    # The memory's rate is measured when nothing runs.
    shares = model.account.split_time(model.stats, lambda: model.__dict__.get("memory_bytes_s"))
    return max(shares, key=lambda cause: shares[cause], default=None)


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""What this machine is called by itself."""


def list_own_names(
    address: str, *, has_keys: bool, origins: Iterable[str] = ()
) -> frozenset[str] | None:
    """Names allowed in ``Host``; None allows all: for a public server, or one with keys."""
    if has_keys or not is_loopback(address) or "*" in origins:
        return None
    return _LOCAL | {_cut_port(address)} | {_cut_port(item.split("://")[-1]) for item in origins}


def is_loopback(address: str) -> bool:
    if address.lower() == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def is_own_name(host: bytes, names: frozenset[str]) -> bool:
    """Whether the value of a ``Host`` header is one of ``names``, with or without a port."""
    return _cut_port(host.decode("latin-1")) in names


def _cut_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


Endpoint = Callable[[Request, Service], Awaitable[Response]]

MAX_HEADER_BYTES = 32 << 10
"""Most bytes of a request's headers, names and values."""
_PUBLIC = ("/", "/health", "/version")
"""What may be seen without a key."""
_QUIET = ("/health", "/metrics", "/api/state")
"""Frequent requests: the access log leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    plans: Sequence[ServedPlan]
    memory_bytes: int | None = None
    """What the budgets of the models in memory may add up to."""
    keys: Sequence[str] = ()
    """Keys, one of which a client must know; none lets everybody in."""
    origins: Sequence[str] = ()
    """Origins whose pages may send requests (CORS); if empty, other origins are refused."""
    names: frozenset[str] | None = None
    """Names that ``Host`` may have (`list_own_names`); None lets all be."""
    limits: Limits = field(default_factory=Limits)
    body_bytes: int = 8 << 20
    """Most bytes of a request's body."""
    replica: str = ""
    """Which of several servers behind one address it is."""


def make_application(settings: Settings) -> Starlette:
    """The server as an ASGI application; ``application.state.hosts`` are its models."""
    hosts = Hosts(settings.plans, memory_bytes=settings.memory_bytes)
    metrics = Metrics(list(hosts.hosts.values()), replica=settings.replica)
    service = Service(
        hosts=hosts, limits=settings.limits, metrics=metrics, body_bytes=settings.body_bytes
    )

    def route(path: str, endpoint: Endpoint, method: str = "POST") -> Route:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request, service)
            except ClientGone:
                return Response(status_code=499)
            except UserError as error:
                get_logger().error("a request failed", path=path, reason=str(error))
                return refuse(explain_user_error(error), path)

        return Route(path, answer, methods=[method])

    async def show_page(request: Request, service: Service) -> Response:
        return Response(read_page(), media_type="text/html", headers=_PAGE_HEADERS)

    async def list_models(request: Request, service: Service) -> Response:
        found = [_describe_model(host) for host in service.hosts.hosts.values()]
        return JsonResponse(
            {
                "object": "list",
                "data": found,
                "has_more": False,
                "first_id": found[0]["id"],
                "last_id": found[-1]["id"],
            }
        )

    async def show_model(request: Request, service: Service) -> Response:
        host = service.hosts.find(request.path_params["name"])
        return JsonResponse(_describe_model(host))

    async def show_health(request: Request, service: Service) -> Response:
        return JsonResponse({"status": "ok"})

    async def show_metrics(request: Request, service: Service) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(await asyncio.to_thread(metrics.write), headers={"Content-Type": kind})

    async def show_interface(request: Request, service: Service) -> Response:
        return JsonResponse(describe_interface())

    async def change_budget(request: Request, service: Service) -> Response:
        body = await parse_body(request, service, BudgetRequest)
        name = None if body.model is None else service.hosts.find(body.model).plan.name
        memory_bytes = await asyncio.to_thread(read_memory, body.memory)
        await service.hosts.change_budget(memory_bytes, name)
        budgets = {name: host.plan.budget_bytes for name, host in service.hosts.hosts.items()}
        return JsonResponse({"memory_bytes": memory_bytes, "budget_bytes": budgets})

    async def show_state(request: Request, service: Service) -> Response:
        found = await asyncio.to_thread(describe_state, service.hosts.hosts.values())
        return JsonResponse({**found, "replica": settings.replica})

    @asynccontextmanager
    async def live(application: Starlette) -> AsyncIterator[None]:
        await hosts.start()
        try:
            yield
        finally:
            await hosts.stop()

    application = Starlette(
        routes=[
            route("/", show_page, "GET"),
            route("/health", show_health, "GET"),
            route("/metrics", show_metrics, "GET"),
            route("/openapi.json", show_interface, "GET"),
            route("/v1/models", list_models, "GET"),
            route("/v1/models/{name:path}", show_model, "GET"),
            *(route(operation.path, operation) for operation in OPERATIONS),
            route("/api/tags", ollama.list_tags, "GET"),
            route("/api/ps", ollama.list_running, "GET"),
            route("/api/version", ollama.show_version, "GET"),
            *(
                route(f"/api/{change}", ollama.refuse_change)
                for change in ("pull", "push", "create", "copy")
            ),
            route("/api/delete", ollama.refuse_change, "DELETE"),
            route("/api/state", show_state, "GET"),
            route("/api/budget", change_budget),
        ],
        middleware=list_middleware(settings),
        exception_handlers={
            404: _answer_errors(404, "There is nothing at this path."),
            405: _answer_errors(405, "This path does not have this method."),
            ApiError: _answer_errors(),
            Exception: _answer_errors(500, "the server has failed; its log says why"),
        },
        lifespan=live,
    )
    application.state.hosts = hosts
    return application


def list_middleware(settings: Settings) -> list[Middleware]:
    found = [Middleware(AccessLog)]
    if settings.origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    gate = Middleware(Gate, keys=settings.keys, origins=settings.origins, names=settings.names)
    return [*found, gate]


_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _describe_model(host: Host) -> dict[str, Any]:
    return {
        "id": host.plan.name,
        "object": "model",
        "created": host.created,
        "owned_by": "pi2",
        "loaded": host.is_loaded,
        "description": host.plan.description,
    }


def refuse(error: ApiError, path: str) -> Response:
    body = error.describe(find_form(path))
    return JsonResponse(body, status_code=error.status, headers=error.headers)


def _answer_errors(
    status: int = 500, message: str = ""
) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def explain(request: Request, error: Exception) -> Response:
        told = error if isinstance(error, ApiError) else ApiError(status, message)
        answer = refuse(told, request.url.path)
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    return explain


class Gate:
    """Lets in requests with a key, usual headers, an allowed origin and an allowed ``Host``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str],
        origins: Sequence[str],
        names: frozenset[str] | None,
    ) -> None:
        self._app = app
        self._names = names
        self._keys = [key.encode() for key in keys]
        self._origins = {origin.encode() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refuse(scope)) is not None:
            refusal = refuse(error, scope["path"])
            if error.status == 401:
                refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return ApiError(431, f"Headers may have {MAX_HEADER_BYTES} bytes at most.")
        host = headers.get(b"host")
        # Browsers always send it.
        if self._names is not None and host is not None and not is_own_name(host, self._names):
            message = "This server does not have the name in 'Host'; --allow-origin adds one."
            return ApiError(403, message)
        if scope["path"] in _PUBLIC:
            return None
        if self._is_foreign(headers):
            message = "Pages of this origin may not ask; the server's --allow-origin lets them."
            return ApiError(403, message)
        bearer = headers.get(b"authorization", b"")
        given = headers.get(b"x-api-key", b"")
        if bearer[:7].lower() == b"bearer ":
            given = bearer[7:].strip()
        if self._keys and not any(hmac.compare_digest(given, key) for key in self._keys):
            message = "Incorrect API key provided." if given else "No API key provided."
            return ApiError(401, message, code="invalid_api_key")
        return None

    def _is_foreign(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a page of another origin asks: browsers send forms without asking first."""
        origin = headers.get(b"origin")
        if origin is None or origin in self._origins or b"*" in self._origins:
            return False
        # A proxy may have changed the host; pages cannot write this header.
        if headers.get(b"sec-fetch-site") == b"same-origin":
            return False
        return origin.partition(b"://")[2].lower() != headers.get(b"host", b"").lower()


class AccessLog:
    """Writes a line for each request: who, what, how long, how many tokens; no prompts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._log = get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        noted = NotedSend(send)
        scope.setdefault("state", {})
        try:
            await self._app(scope, receive, noted)
        finally:
            client = scope.get("client")
            self._log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=noted.status,
                client=client[0] if client else None,
                seconds=round(time.perf_counter() - start, 4),
                **scope["state"].get("use", {}),
            )
