"""A server in a thread of the test, on a port of its own."""

import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from pi2.fitting.check import load_plan
from pi2.serving.application import Settings, make_application
from pi2.serving.front import TimedConnection
from pi2.serving.hosts import ServedPlan
from tests.helpers.models import make_tiny
from tests.helpers.patience import PATIENCE_S
from tests.helpers.plans import write_plan

TEMPLATES = Path(__file__).resolve().parents[1] / "golden" / "chat"

_CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For servers that speak plain HTTP: a context of its own takes 30 ms of every request."""
get = partial(httpx2.get, verify=_CONTEXT, timeout=PATIENCE_S)
post = partial(httpx2.post, verify=_CONTEXT, timeout=PATIENCE_S)
options = partial(httpx2.options, verify=_CONTEXT, timeout=PATIENCE_S)

PLAIN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "end_repeats": False}
"""Sampling as in runs that are no chats."""
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]


def make_chat_plan(
    folder: Path, changes: Mapping[str, Any] | None = None, *, template: str | None = "chatml",
    context: int = 1024,
) -> Path:  # fmt: skip
    """A plan of a tiny random model with a chat template: a golden one or given lines."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny = make_tiny(folder, {"shape": {"context": context}})
    if template is not None:
        target = tiny.store / "chat_template.jinja"
        if "\n" in template:
            target.write_text(template, "utf-8")
        else:
            shutil.copy(TEMPLATES / f"{template}.jinja", target)
    own = {"backends": {"cpu": "cpu"}, "kv": {"context": context}, "sampling": PLAIN}
    return write_plan(folder, tiny, {**own, **(changes or {})})


def describe_plan(
    path: Path, name: str = "tiny", overrides: Mapping[str, object] | None = None
) -> ServedPlan:
    plain = {f"sampling.{key}": value for key, value in PLAIN.items()}
    overrides = {**plain, **(overrides or {})}
    budget = load_plan(path, overrides=overrides).plan.memory.budget
    return ServedPlan(name=name, path=path, budget_bytes=budget, overrides=overrides)


@contextmanager
def serve(
    plans: Sequence[ServedPlan],
    wrap: Callable[[Any], Any] = lambda app: app,
    connection: type[TimedConnection] = TimedConnection,
    **settings: Any,
) -> Iterator[str]:
    """The address of a server that runs meanwhile; ``wrap`` is what requests go through first."""
    config = uvicorn.Config(
        wrap(make_application(Settings(plans=plans, **settings))), port=0, log_level="warning",
        access_log=False, http=connection, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until_idle(address: str) -> dict[str, Any]:
    """The state of the model, when nothing is under way."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        (state,) = get(f"{address}/api/state").json()["models"]
        if not state["running"] and not state["waiting"]:
            return dict(state)
        time.sleep(0.01)
    raise AssertionError("it does not end")
