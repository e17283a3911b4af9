"""Serve plans over HTTP, for OpenAI and Anthropic clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.named_plans import find_plan_path
from pi2.cli.options import add_set_option
from pi2.diagnostics import UserError
from pi2.plan.composing.overrides import parse_assignments

if TYPE_CHECKING:
    import uvicorn

    from pi2.serving.host import Hosts, ServedPlan

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
    help="Most memory of the loaded models together; others are loaded when they are asked for.",
)
@add_set_option
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
def command(
    plans: tuple[Path, ...],
    host: str,
    port: int,
    keys: tuple[str, ...],
    origins: tuple[str, ...],
    memory: str | None,
    settings: tuple[str, ...],
    max_waiting: int,
    max_seconds: float,
    max_body: str,
) -> None:
    """Serve PLANS over HTTP.

    Clients name a plan by its file's name without `.plan.toml`.  Requests join the sequences under
    way, up to the plan's decode.batch; `pi2 serve` listens on this machine alone unless --host says
    otherwise.
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
    from pi2.refit import parse_budget
    from pi2.serving.application import Settings, make_application
    from pi2.serving.calls import Limits

    configure_logging(1)
    served = list_plans(plans, parse_assignments(settings))
    known = os.environ.get(KEY_VARIABLE, "")
    application = make_application(
        Settings(
            plans=served,
            memory_bytes=None if memory is None else parse_budget(memory),
            keys=keys or ((known,) if known else ()),
            origins=origins,
            limits=Limits(waiting=max_waiting, time_s=max_seconds),
            body_bytes=parse_budget(max_body),
        )
    )
    config = uvicorn.Config(
        application,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        http="h11",
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=10,
        server_header=False,
        lifespan="off",
    )
    run_server(uvicorn.Server(config), application.state.hosts, host, port)


def run_server(server: uvicorn.Server, hosts: Hosts, host: str, port: int) -> None:
    """Load the models and serve until somebody interrupts; UserError P681 if the address cannot be
    had, or whatever loading raises."""
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
                await hosts.start()
                click.echo(f"pi2 serves {', '.join(hosts.hosts)} on {address}", err=True)
                await server.serve(sockets=[listener])
            finally:
                await hosts.stop()

        asyncio.run(run())


def list_plans(paths: tuple[Path, ...], overrides: dict[str, object]) -> list[ServedPlan]:
    """What is served; UserError for a plan that is not sound, or a name that two have."""
    from pi2.plan.resolve import load_plan
    from pi2.serving.host import ServedPlan
    from pi2.sharing.resolver import LockedReferences

    found: dict[str, ServedPlan] = {}
    for given in paths:
        path = find_plan_path(given)
        resolver = LockedReferences(path.parent, locked=False)
        resolved = load_plan(path, resolver=resolver, overrides=overrides)
        name = path.name.removesuffix(".toml").removesuffix(".plan")
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
            description=resolved.plan.description,
            overrides=overrides,
        )
    return list(found.values())
