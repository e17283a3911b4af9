"""Serve plans over HTTP, and talk to one in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import click

from pi2.caches import show_path
from pi2.cli import collect_as_usual
from pi2.cli.documents import find_retokenized
from pi2.cli.options import (
    DRAFT,
    SET,
    TOKENIZER,
    ChosenPlan,
    SamplingOptions,
    name_draft,
    option,
    take_options,
    take_plan,
)
from pi2.cli.run import show_controls
from pi2.diagnostics import UserError
from pi2.found_models import OLLAMA
from pi2.model_folders import find_title
from pi2.plan.documents.quantities import parse_size
from pi2.plan.toml.source import parse_assignments
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from pi2.chatting import Session
    from pi2.engine.loaded_model import LoadedModel
    from pi2.serving.front import Scaling
    from pi2.serving.hosts import ServedPlan
    from pi2.serving.presets import Preset


_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions):
    system: str | None = option(metavar="TEXT")
    first: str | None = option("-p", "--prompt", metavar="TEXT")
    max_tokens: int | None = option("-n", "--max-tokens", type=click.IntRange(min=1))


@click.command("chat")
@take_options(ChatOptions)
@take_plan(tokenizer=True)
def chat_command(plan: ChosenPlan, given: ChatOptions) -> None:
    """Talk to the model of PLAN.

    Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer and Ctrl-D ends. /help lists
    commands.  Without a terminal, input is read line by line."""
    from pi2.chatting import Session

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    lines = (line.rstrip("\n") for line in sys.stdin)
    read = make_prompt() if is_terminal else lambda: next(lines, None)
    with ProgressBar() as progress:
        model = plan.load(progress)
    with model:
        model.keep_prefixes()
        model.keep_template_process()
        check_template(model, plan.given)
        most = {} if given.max_tokens is None else {"max_tokens": given.max_tokens}
        session = Session(model, system=given.system, settings={**given.sampling, **most})
        if is_terminal:
            click.echo(f"{model.plan.model.id}, {plan.path.name} · /help lists commands", err=True)
        collect_as_usual()
        if given.first is not None:
            answer(session, given.first, dim=is_terminal)
        talk(session, read, dim=is_terminal)


def check_template(model: LoadedModel, plan: Path) -> None:
    """Refuse a model without a working chat template: UserError P609 or P608."""
    try:
        model.render_chat([{"role": "user", "content": "."}])
    except UserError as error:
        (finding,) = error.diagnostics
        if finding.code != "P609":
            raise
        raise UserError.of(
            finding.code,
            f"{model.plan.model.id} is a base model: it has no chat template",
            file=None if finding.span is None else finding.span.file,
            help=f"use `pi2 run {plan} --prompt TEXT`{model.texts.advice}",
        ) from None


def talk(session: Session, read: Callable[[], str | None], *, dim: bool) -> None:
    """Answer requests until there are no more."""
    while (line := read()) is not None:
        if not line.strip():
            continue
        if line.strip() in ("/exit", "/quit", "/bye"):
            return
        try:
            if line.lstrip().startswith("/"):
                click.echo(session.run_command(line), err=True)
            else:
                answer(session, line, dim=dim)
        except UserError as error:
            if not dim:
                raise
            click.echo(str(error), err=True)


def answer(session: Session, text: str, *, dim: bool) -> None:
    """Show the answer as it comes; Ctrl-C stops it."""
    fragments = session.ask(text)
    part = "content"
    try:
        for fragment in fragments:
            if fragment.part != part:
                part = fragment.part
                mark = _DIM if part == "reasoning" else _PLAIN
                sys.stdout.write(mark if dim else "\n")
            sys.stdout.write(show_controls(fragment.text) if dim else fragment.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not dim:
            raise
    finally:
        fragments.close()  # type: ignore[attr-defined]
        sys.stdout.write(f"{_PLAIN if dim else ''}\n")
        sys.stdout.flush()
    if session.turn is not None:
        line = session.turn.describe()
        click.echo(f"{_DIM}{line}{_PLAIN}" if dim else line, err=True)


def make_prompt() -> Callable[[], str | None]:
    """What reads a message from the terminal, with history and several lines; None at the end."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    from pi2.caches import find_cache_folder

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history = None
    folder = find_cache_folder("history")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        history = FileHistory(str(folder / "chat"))
    except OSError:
        pass
    session: PromptSession[str] = PromptSession(
        history=history, multiline=True, key_bindings=keys, prompt_continuation="  "
    )

    def read() -> str | None:
        while True:
            try:
                return session.prompt("> ")
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    return read


KEY_VARIABLE = "PI2_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = option(type=click.IntRange(0, 65535), default=8000)
    keys: tuple[str, ...] = option("--api-key", metavar="KEY")
    origins: tuple[str, ...] = option("--allow-origin", metavar="ORIGIN")
    memory: str | None = option(metavar="SIZE")
    presets: Path | None = option("--models-preset", metavar="FILE")
    settings: tuple[str, ...] = SET()
    tokenizer: Path | None = TOKENIZER()
    draft: Path | None = DRAFT()  # noqa: RUF009  # a field
    max_waiting: int = option(type=click.IntRange(min=0), default=256)
    max_seconds: float = option(type=click.FloatRange(min=0, min_open=True), default=600.0)
    max_body: str = option(default="8 MiB", metavar="SIZE")
    on: Literal["here", "ray"] = "here"
    replicas: int | None = option(type=click.IntRange(min=1))
    autoscale: str | None = option(metavar="MIN:MAX")


@click.command("serve")
@click.argument("plans", type=click.Path(path_type=Path), nargs=-1)
@take_options(ServeOptions)
def serve_command(plans: tuple[Path, ...], given: ServeOptions) -> None:
    """Serve PLANS over HTTP.

    Clients name a plan by its file's name without `.plan.toml`.  Requests join the sequences under
    way, up to the plan's decode.batch; `pi2 serve` listens on this machine only, unless --host
    names another address.

    SIGHUP and `POST /api/budget` change the memory of models while they answer: SIGHUP measures a
    share of the free memory again, or takes the budgets that changed plans state.

    With --on ray, replicas on the cluster that RAY_ADDRESS names answer, or on one that is started
    on this machine; SIGHUP reads the plans again and replaces the replicas one after the other."""
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
    import asyncio

    from pi2.logging import configure_logging
    from pi2.orchestrator import give_memory_back, read_memory
    from pi2.serving.application import Settings, list_own_names, make_application
    from pi2.serving.calls import Limits
    from pi2.serving.front import TimedConnection
    from pi2.serving.openapi import Traces, make_tracer
    from pi2.serving.presets import read_presets

    tracer = make_tracer()
    scaling = read_scaling(given.on, given.replicas, given.autoscale)
    configure_logging(1)
    overrides = {**parse_assignments(given.settings), **name_draft(given.draft)}
    known = os.environ.get(KEY_VARIABLE, "")
    memory_bytes = None if given.memory is None else read_memory(given.memory)
    presets = [] if given.presets is None else read_presets(given.presets)
    for preset in presets:
        if preset.ignored:
            click.echo(f"{preset.name}: left out {', '.join(preset.ignored)}", err=True)
    if not plans and not presets:
        raise click.UsageError("give PLANS or --models-preset")
    listed = partial(list_plans, plans, overrides, tokenizer=given.tokenizer, presets=presets)
    known_keys = given.keys or ((known,) if known else ())
    chosen = Settings(
        plans=listed(memory_bytes),
        memory_bytes=memory_bytes,
        keys=known_keys,
        origins=given.origins,
        names=list_own_names(given.host, has_keys=bool(known_keys), origins=given.origins),
        limits=Limits(waiting=given.max_waiting, time_s=given.max_seconds),
        body_bytes=parse_size(given.max_body, "--max-body"),
    )
    application: ASGIApp
    models: Models
    if given.on == "ray":
        from pi2.serving.front import RayReplicas, make_front

        models = found = RayReplicas(chosen, scaling)
        application = make_front(chosen, found)

        async def renew() -> None:
            await found.change(listed(memory_bytes))
    else:
        application = make_application(chosen)
        models = hosts = application.state.hosts

        async def renew() -> None:
            if given.memory is not None:
                await hosts.change_budget(await asyncio.to_thread(read_memory, given.memory))
                return
            for plan in await asyncio.to_thread(listed, None):
                await hosts.change_budget(plan.budget_bytes, plan.name)

    config = uvicorn.Config(
        application if tracer is None else Traces(application, tracer),
        host=given.host,
        port=given.port,
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
    give_memory_back()  # files were read to fit plans, and are read again when they are loaded
    run_server(uvicorn.Server(config), models, names, renew)


class Models(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def read_scaling(on: str, replicas: int | None, autoscale: str | None) -> Scaling:
    """How many replicas there are; click's UsageError for what does not go together."""
    from pi2.serving.front import Scaling

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
    renew: Callable[[], Awaitable[None]],
) -> None:
    """Load the models and serve until interrupted; SIGHUP calls ``renew``. UserError P681 if the
    address is taken."""
    import asyncio
    import socket

    host, port = server.config.host, server.config.port
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
                listen_for_changes(renew)
                listener.listen(1024)  # from now on nobody is turned away
                click.echo(f"pi2 serves {', '.join(names)} on {address}", err=True)
                await server.serve(sockets=[listener])
            finally:
                await models.stop()

        asyncio.run(run())


def listen_for_changes(renew: Callable[[], Awaitable[None]]) -> None:
    """Call ``renew`` on SIGHUP; an error is printed, and running plans go on."""
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
    presets: Sequence[Preset] = (),
) -> list[ServedPlan]:
    """Plans to serve, fitted to ``memory_bytes``; UserError for bad plans or equal names."""
    from pi2.engine.file_loading import list_resident
    from pi2.refit import read_plan
    from pi2.serving.hosts import ServedPlan
    from pi2.weights.file_reading import FileFiller

    found: dict[str, ServedPlan] = {}
    wanted: list[tuple[Path, Preset | None]] = [(path, None) for path in paths]
    wanted += [(preset.path, preset) for preset in presets]
    for given, preset in wanted:
        files = FileFiller()
        path, further = find_retokenized(given, None if preset else tokenizer, files=files)
        values = {**overrides, **further, **({} if preset is None else preset.overrides)}
        read = partial(read_plan, path, overrides=values, files=files)
        plan = read(memory_bytes=memory_bytes if len(wanted) == 1 else None)
        if memory_bytes is not None and plan.resolved.plan.memory.budget > memory_bytes:
            plan = read(memory_bytes=memory_bytes)
        resolved = plan.resolved
        name = show_path(Path(find_title(path))).removesuffix(".toml").removesuffix(".plan")
        if name in ("default", "plan"):
            name = path.resolve().parent.name
        if str(given).startswith(OLLAMA):
            name = str(given).removeprefix(OLLAMA)
        if preset is not None:
            name = preset.name
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
            idle_s=resolved.plan.serve.idle,
            is_pinned=resolved.plan.serve.pin,
            load=resolved.plan.serve.load,
            yields=resolved.plan.memory.pressure == "yield",
            matrices=list_resident(resolved),
        )
        for change in plan.changes:
            click.echo(f"{name}: {change}", err=True)
    return list(found.values())
