"""Arguments and options that several commands have."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.checking.check import Report
    from pi2.plan.toml.source import Kind
    from pi2.progress import Progress
    from pi2.refit import FittedPlan


def suggest_files(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """Files and folders, as the shell knows them."""
    return [CompletionItem(word, type="file")]


def suggest_plans(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """Plans that come with pi2, models that were pulled or converted, and files."""
    from pi2.cli.named_plans import list_names

    names = [name for name in list_names() if name.startswith(word)]
    return [CompletionItem(word, type="file"), *map(CompletionItem, names)]


def suggest_devices(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """Devices that come with pi2, and files."""
    return _suggest_shipped("device", word)


def suggest_models(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """Models that come with pi2, and files."""
    return _suggest_shipped("model", word)


def _suggest_shipped(kind: Kind, word: str) -> list[CompletionItem]:
    from pi2.plan.reading.references import list_shipped

    # The file comes first: shells take it only where no name is left.
    names = [name for name in list_shipped(kind) if name.startswith(word)]
    return [CompletionItem(word, type="file"), *map(CompletionItem, names)]


def suggest_codes(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """Codes of findings, keys of all kinds of documents, and files."""
    from pi2.plan.authoring.explanation import list_keys
    from pi2.plan.checking.check import load_pages
    from pi2.plan.reading.references import DOCUMENTS
    from pi2.plan.toml.text import format_path

    found = [CompletionItem(word, type="file")]
    for code, page in load_pages().items():
        if code.startswith(word.upper()):
            found.append(CompletionItem(code, help=page.what))
    keys = {format_path(path) for model in DOCUMENTS.values() for path in list_keys(model)}
    found += [CompletionItem(key) for key in sorted(keys) if word and key.startswith(word)]
    return found


def suggest_settings(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """``KEY=`` for every key of a plan that ``--set`` takes, ``KEY=VALUE`` where values are few."""
    return [CompletionItem(text) for text in _list_settings() if text.startswith(word)]


def _list_settings() -> Iterator[str]:
    from typing import Literal

    from pi2.plan.authoring.explanation import list_keys
    from pi2.plan.documents.common import find_type
    from pi2.plan.documents.plan import Plan
    from pi2.plan.toml.text import EVERY_ITEM, EVERY_NAME, format_path

    for path in list_keys(Plan):
        kind = find_type(Plan, path)
        if hasattr(kind, "model_fields") or EVERY_ITEM in path or EVERY_NAME in path:
            continue  # a table: its keys are offered themselves
        key = format_path(path)
        values = get_args(kind) if get_origin(kind) is Literal else ()
        if kind is bool:
            values = ("true", "false")
        yield from (f"{key}={value}" for value in values)
        if not values:
            yield f"{key}="


force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")


def check_output(path: Path, kind: Kind | None, force: bool) -> str:
    """The name of the document that is to be written to ``path``; UserError P009 for another
    suffix than the kind's, P027 for a file that exists."""
    suffix = "" if kind is None else f".{kind}.toml"
    name = path.name.removesuffix(suffix)
    if not path.name.endswith(suffix) or not name:
        message = f"expected a file name that ends in {suffix}"
        raise UserError.of("P009", message, file=str(path), help=f"my{suffix}, for example")
    if os.path.lexists(path) and not force:
        help_text = "use --force to overwrite it"
        raise UserError.of("P027", "the file exists already", file=str(path), help=help_text)
    return name


def refer(reference: str, folder: Path) -> str:
    """A reference to a document as it is written in a file in ``folder``."""
    from pi2.plan.reading.references import has_scheme, is_path

    if has_scheme(reference) or not is_path(reference):
        return reference
    return refer_path(Path(reference), folder)


def refer_path(path: Path, folder: Path) -> str:
    """A path as it is written in a file in ``folder``."""
    return str(path) if path.is_absolute() else Path(os.path.relpath(path, folder)).as_posix()


def write_checked(path: Path, text: str, advice: str) -> Report:
    """Write a document whole or not at all, if it is sound; ``advice`` says what comes next."""
    from pi2.cli.main import print_diagnostics
    from pi2.sharing.fetching import write_atomically
    from pi2.sharing.resolver import LockedReferences
    from pi2.weights.file_reading import check_document

    make_folder(path)
    report = check_document(path, resolver=LockedReferences(path.parent), text=text)
    if not report.is_sound:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    write_atomically(path, text.encode())
    click.echo(f"{path}: written; {advice}", err=True)
    return report


def make_folder(path: Path) -> None:
    """Make the folder of a file: references go through it; UserError P003."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise UserError.of("P003", message, file=str(path)) from None


Command = TypeVar("Command", bound=Callable[..., object])

add_set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=suggest_settings,
    help="Override a value of the plan; repeatable.",
)
"""The option ``--set`` (argument ``settings``)."""

add_memory_option = click.option(
    "--memory",
    metavar="SIZE",
    help="Memory budget of the process, such as 3GiB; the plan is fitted to it.",
)

add_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
"""The option ``--json`` (argument ``as_json``)."""


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that a command is given, with what its options change."""

    given: Path
    """What was written: a path or a name."""
    path: Path
    settings: Mapping[str, object]
    """The values of ``--set``."""
    memory_bytes: int | None = None
    locked: bool = False

    @cached_property
    def fitted(self) -> FittedPlan:
        """The plan as it was read, with or without errors; says what was fitted."""
        from pi2.plan.toml.source import display_path
        from pi2.refit import read_plan
        from pi2.sharing.resolver import LockedReferences

        found = read_plan(
            self.path,
            name=display_path(self.path),
            overrides=self.settings,
            memory_bytes=self.memory_bytes,
            resolver=LockedReferences(self.path.parent, locked=self.locked),
        )
        if found.report.resolved is not None:
            for change in found.changes:
                label = "fitted" if self.memory_bytes is None else "memory"
                click.echo(f"{label}: {change}", err=True)
        return found

    @property
    def resolved(self) -> ResolvedPlan:
        """The plan; UserError if it has errors."""
        return self.fitted.resolved

    @property
    def overrides(self) -> Mapping[str, object]:
        """Values to load the plan with: those of ``--set``, and what follows from the options."""
        _ = self.resolved
        return self.fitted.overrides

    def change(self, values: Mapping[str, object]) -> ChosenPlan:
        """The plan with further values."""
        return replace(self, settings={**self.settings, **values}) if values else self

    def load(self, progress: Progress | None = None) -> LoadedModel:
        import time

        from pi2.orchestrator import build
        from pi2.progress import ignore_progress

        start, resolved = time.perf_counter(), self.resolved
        model = build(resolved, progress=progress or ignore_progress, start=start)
        model.changes = self.fitted.changes
        return model


def choose_plan(
    given: Path,
    settings: tuple[str, ...],
    memory: str | None = None,
    *,
    locked: bool = False,
    tokenizer: Path | None = None,
    has_files: bool = False,
) -> ChosenPlan:
    """The plan that arguments name; ``has_files`` as in `take_plan`."""
    from pi2.cli.named_plans import find_retokenized

    path, further = find_retokenized(given, tokenizer, has_files=has_files)
    values, memory_bytes = parse_changes(settings, memory)
    return ChosenPlan(given, path, {**values, **further}, memory_bytes, locked=locked)


def parse_changes(
    settings: tuple[str, ...], memory: str | None
) -> tuple[Mapping[str, object], int | None]:
    """What ``--set`` and ``--memory`` say: values, and bytes."""
    from pi2.plan.composing.trees import parse_assignments
    from pi2.plan.documents.quantities import parse_size

    return parse_assignments(settings), None if memory is None else parse_size(memory)


def take_plan(
    *, fitted: bool = True, locked: bool = False, tokenizer: bool = False, has_files: bool = False
) -> Callable[[Command], Command]:
    """Give a command the argument PLAN and the option ``--set`` as one `ChosenPlan`; ``fitted``
    adds ``--memory``, ``locked`` adds ``--locked``, ``tokenizer`` adds ``--tokenizer``;
    ``has_files``: GGUF files are not converted for it."""
    options = [
        click.argument("plan", type=click.Path(path_type=Path), shell_complete=suggest_plans),
        *([add_memory_option] if fitted else []),
        add_set_option,
        *([add_locked_option] if locked else []),
        *([add_tokenizer_option] if tokenizer else []),
    ]

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(
            plan: Path,
            settings: tuple[str, ...],
            memory: str | None = None,
            locked: bool = False,
            tokenizer: Path | None = None,
            **others: Any,
        ) -> object:
            chosen = choose_plan(
                plan, settings, memory, locked=locked, tokenizer=tokenizer, has_files=has_files
            )
            return command(plan=chosen, **others)

        return add_options(options)(call)  # type: ignore[return-value] # what click calls

    return add


add_locked_option = click.option("--locked", is_flag=True, help="Fail if pi2.lock is out of date.")
"""The option ``--locked``."""


def add_options(options: list[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """Add several options, in this order."""

    def add(command: Command) -> Command:
        # Decorators nest: the last one stands first.
        for option in reversed(options):
            command = option(command)
        return command

    return add


def add_path_option(
    *names: str, text: str, metavar: str = "FILE", dir_okay: bool = True, **settings: Any
) -> Callable[[Command], Command]:
    """An option that takes the path of a file or a folder; ``text`` is its help."""
    kind = click.Path(path_type=Path, dir_okay=dir_okay)
    return click.option(*names, metavar=metavar, type=kind, help=text, **settings)


add_tokenizer_option = add_path_option(
    "--tokenizer",
    text="tokenizer.json or tokenizer.model, or a folder that has one, instead of the "
    "checkpoint's own.",
)
"""The option ``--tokenizer``."""


def add_text_options(text_help: str) -> Callable[[Command], Command]:
    """Add the options ``--text`` (argument ``files``), ``--context`` and ``--windows``."""
    return add_options(
        [
            add_path_option("--text", "files", required=True, multiple=True, text=text_help),
            click.option(
                "--context",
                type=click.IntRange(min=2),
                help="Window length in tokens; default: kv.context, at most 512.",
            ),
            click.option(
                "--windows",
                type=click.IntRange(min=1),
                help="Number of windows, spread over the text; default: all.",
            ),
        ]
    )
