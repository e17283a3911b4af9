"""Talk to a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.garbage import collect_as_usual
from pi2.cli.options import ChosenPlan, take_plan
from pi2.cli.terminal_text import show_controls
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.chatting.session import Session
    from pi2.engine.loaded_model import LoadedModel

GROUP = "Run"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@click.command("chat")
@click.option("--system", metavar="TEXT", help="System message.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
@click.option("--seed", type=int, help="Random seed.")
@click.option("-p", "--prompt", "first", metavar="TEXT", help="First message.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@take_plan(tokenizer=True, has_files=True)
def command(plan: ChosenPlan, system: str | None, first: str | None, **options: Any) -> None:
    """Talk to the model of PLAN.

    Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer and Ctrl-D ends. /help lists
    commands.  What is not read from a terminal is taken line by line.
    """
    from pi2.chatting.session import Session
    from pi2.cli.progress import ProgressBar

    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = make_prompt() if is_terminal else read_line
    with ProgressBar() as progress:
        model = plan.load(progress)
    with model:
        model.keep_prefixes()
        model.keep_template_process()
        check_template(model, plan.given)
        given = {key: value for key, value in options.items() if value is not None}
        session = Session(model, system=system, settings=given)
        if is_terminal:
            click.echo(f"{model.plan.model.id}, {plan.path.name} · /help lists commands", err=True)
        collect_as_usual()
        if first is not None:
            answer(session, first, dim=is_terminal)
        talk(session, read, dim=is_terminal)


def check_template(model: LoadedModel, plan: Path) -> None:
    """Refuse a model without a chat template before anybody has written anything; UserError P609
    names the command that continues texts, with ``plan`` as it was given, P608 if the template
    fails."""
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
            help=f"use `pi2 run {plan} --prompt TEXT`; the chat_template.jinja of a chat model "
            "goes into the folder of its store",
        ) from None


def talk(session: Session, read: Callable[[], str | None], *, dim: bool) -> None:
    """Answer what is read until there is nothing more."""
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


def read_line() -> str | None:
    """The next line of standard input; None at its end."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


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
