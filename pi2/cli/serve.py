"""Serve plans over HTTP, for OpenAI and Anthropic clients."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from pi2.cli.garbage import collect_as_usual
from pi2.cli.named_plans import find_retokenized
from pi2.cli.options import add_set_option, add_tokenizer_option
from pi2.diagnostics import UserError
from pi2.plan.composing.overrides import parse_assignments
from pi2.plan.documents.quantities import parse_size
from pi2.regular_file import show_path

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from pi2.serving.host import ServedPlan
    from pi2.serving.ray_replicas import Scaling

GROUP = "Run"
KEY_VARIABLE = "PI2_API_KEY"


@click.command("serve")
@click.argument("plans", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address; 0.0.0.0 for every network."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: any."
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    metavar="KEY",
    help=f"Key that clients must give; repeatable.  [default: {KEY_VARIABLE}]",
)
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="ORIGIN", help="Allow pages of ORIGIN."
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory of the loaded models together: plans are fitted to it, and take turns in it.",
)
@add_set_option
@add_tokenizer_option
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Sequences that may wait for a place in a model; others get 429.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Longest time for an answer.",
)
@click.option(
    "--max-body", default="8 MiB", show_default=True, metavar="SIZE", help="Largest body."
)
@click.option(
    "--on",
    type=click.Choice(["here", "ray"]),
    default="here",
    show_default=True,
    help="In this process, or in replicas on a Ray cluster.",
)
@click.option("--replicas", type=click.IntRange(min=1), help="Replicas on Ray.  [default: 1]")
@click.option("--autoscale", metavar="MIN:MAX", help="Let Ray choose how many replicas there are.")
def command(
    plans: tuple[Path, ...],
    host: str,
    port: int,
    keys: tuple[str, ...],
    origins: tuple[str, ...],
    memory: str | None,
    settings: tuple[str, ...],
    tokenizer: Path | None,
    max_waiting: int,
    max_seconds: float,
    max_body: str,
    on: str,
    replicas: int | None,
    autoscale: str | None,
) -> None:
    """Serve PLANS over HTTP.

    Clients name a plan by its file's name without `.plan.toml`.  Requests join the sequences under
    way, up to the plan's decode.batch; `pi2 serve` listens on this machine alone unless --host says
    otherwise.

    With --on ray, replicas on the cluster that RAY_ADDRESS names answer, or on one that is started
    on this machine; SIGHUP reads the plans again and replaces the replicas one after the other.
    """
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise UserError.of(
            "P680",
            f"serving needs the extra serve: {error.name} is not installed",
            help="pip install 'pi2[serve]'",
        ) from None
    from pi2.logging import configure_logging
    from pi2.serving.application import Settings, make_application
    from pi2.serving.calls import Limits
    from pi2.serving.connections import TimedConnection
    from pi2.serving.own_names import list_own_names
    from pi2.serving.traces import Traces, make_tracer

    tracer = make_tracer()
    scaling = read_scaling(on, replicas, autoscale)
    configure_logging(1)
    overrides = parse_assignments(settings)
    known = os.environ.get(KEY_VARIABLE, "")
    memory_bytes = None if memory is None else parse_size(memory)
    served = list_plans(plans, overrides, memory_bytes, tokenizer)
    known_keys = keys or ((known,) if known else ())
    chosen = Settings(
        plans=served,
        memory_bytes=memory_bytes,
        keys=known_keys,
        origins=origins,
        names=list_own_names(host, has_keys=bool(known_keys), origins=origins),
        limits=Limits(waiting=max_waiting, time_s=max_seconds),
        body_bytes=parse_size(max_body, "--max-body"),
    )
    application: ASGIApp
    models: Models
    renew = None
    if on == "ray":
        from pi2.serving.front import make_front
        from pi2.serving.ray_replicas import RayReplicas

        models = found = RayReplicas(chosen, scaling)
        application = make_front(chosen, found)

        async def renew() -> None:
            await found.change(list_plans(plans, overrides, memory_bytes, tokenizer))
    else:
        application = make_application(chosen)
        models = application.state.hosts
    config = uvicorn.Config(
        application if tracer is None else Traces(application, tracer),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        http=TimedConnection,
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=10,
        server_header=False,
        lifespan="off",
    )
    names = [plan.name for plan in chosen.plans]
    collect_as_usual()
    run_server(uvicorn.Server(config), models, names, host, port, renew)


class Models(Protocol):
    """What answers: models of this process, or replicas."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def read_scaling(on: str, replicas: int | None, autoscale: str | None) -> Scaling:
    """How many replicas there are; click's UsageError for what does not go together."""
    from pi2.serving.ray_replicas import Scaling

    if on != "ray" and (replicas is not None or autoscale is not None):
        raise click.UsageError("--replicas and --autoscale need --on ray")
    if replicas is not None and autoscale is not None:
        raise click.UsageError("give --replicas or --autoscale")
    if autoscale is None:
        return Scaling(replicas or 1, replicas or 1)
    least, _, most = autoscale.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise click.UsageError("--autoscale takes two numbers, such as 1:4")
    return Scaling(int(least), int(most))


def run_server(
    server: uvicorn.Server,
    models: Models,
    names: Sequence[str],
    host: str,
    port: int,
    renew: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Load the models and serve until somebody interrupts; SIGHUP calls ``renew``.

    UserError P681 if the address cannot be had, or whatever loading raises."""
    import asyncio
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError.of(
                "P681",
                f"cannot listen on {host}, port {port}: {error.strerror or error}",
                help="choose another address or port; --port 0 takes any that is free",
            ) from None
        place = f"[{host}]" if ":" in host else host
        address = f"http://{place}:{listener.getsockname()[1]}"

        async def run() -> None:
            try:
                await models.start()
                if renew is not None:
                    listen_for_changes(renew)
                listener.listen(1024)  # from now on nobody is turned away
                click.echo(f"pi2 serves {', '.join(names)} on {address}", err=True)
                await server.serve(sockets=[listener])
            finally:
                await models.stop()

        asyncio.run(run())


def listen_for_changes(renew: Callable[[], Awaitable[None]]) -> None:
    """Call ``renew`` on SIGHUP; what is wrong then is told, and what runs goes on."""
    import asyncio
    import signal

    changing = asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def change() -> None:
        try:
            async with changing:
                await renew()
            click.echo("pi2 serves the changed plans", err=True)
        except UserError as error:
            click.echo(f"the plans were not changed: {error}", err=True)

    def begin() -> None:
        task = asyncio.ensure_future(change())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, begin)


def list_plans(
    paths: tuple[Path, ...],
    overrides: dict[str, object],
    memory_bytes: int | None = None,
    tokenizer: Path | None = None,
) -> list[ServedPlan]:
    """What is served; a plan that is alone, or has more, is fitted to ``memory_bytes``.  UserError
    for a plan that is not sound or cannot be fitted, or a name that two have."""
    from pi2.refit import read_plan
    from pi2.serving.host import ServedPlan
    from pi2.sharing.resolver import LockedReferences

    found: dict[str, ServedPlan] = {}
    for given in paths:
        path, further = find_retokenized(given, tokenizer, has_files=True)
        values = {**overrides, **further}
        resolver = LockedReferences(path.parent, locked=False)
        read = partial(read_plan, path, resolver=resolver, overrides=values)
        plan = read()
        budget_bytes = plan.resolved.plan.memory.budget
        if memory_bytes is not None and (len(paths) == 1 or budget_bytes > memory_bytes):
            plan = read(memory_bytes=memory_bytes)
        resolved = plan.resolved
        name = show_path(Path(path.name)).removesuffix(".toml").removesuffix(".plan")
        if name in ("default", "plan"):
            name = path.resolve().parent.name
        if name in found:
            raise UserError.of(
                "P682",
                f"two plans are called {name!r}: {found[name].path} and {path}",
                help="rename one of the files",
            )
        found[name] = ServedPlan(
            name=name,
            path=path,
            budget_bytes=resolved.plan.memory.budget,
            places=resolved.plan.decode.batch,
            description=resolved.plan.description,
            overrides=plan.overrides,
        )
        for change in plan.changes:
            click.echo(f"{name}: {change}", err=True)
    return list(found.values())
