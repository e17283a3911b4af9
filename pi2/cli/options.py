"""Arguments and options that several commands have."""

from __future__ import annotations

import functools
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from pi2.caches import find_cache_folder, is_gguf
from pi2.cli.main import print_diagnostics
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel
    from pi2.fitting.check import Report
    from pi2.measuring.texts import Passages
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.device import Device
    from pi2.plan.documents.model import Model
    from pi2.plan.toml.source import Kind
    from pi2.progress import Progress
    from pi2.refit import FittedPlan
    from pi2.weights.file_reading import FileFiller


def _list_plans() -> Iterable[str]:
    from pi2.loading import list_names

    return list_names()


def _list_shipped(kind: Kind) -> Iterable[str]:
    from pi2.plan.reading.references import list_shipped

    return list_shipped(kind)


def _suggest(
    list_names: Callable[[], Iterable[str]],
    context: click.Context,
    parameter: click.Parameter,
    word: str,
) -> list[CompletionItem]:
    """A file or a name; the file comes first: shells take it only where no name is left."""
    names = [name for name in list_names() if name.startswith(word)]
    return [CompletionItem(word, type="file"), *map(CompletionItem, names)]


suggest_files = partial(_suggest, tuple)
suggest_plans = partial(_suggest, _list_plans)
suggest_devices = partial(_suggest, partial(_list_shipped, "device"))
suggest_models = partial(_suggest, partial(_list_shipped, "model"))


def suggest_codes(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    from pi2.authoring.explanation import list_keys
    from pi2.fitting.check import load_pages
    from pi2.plan.reading.references import WRITTEN
    from pi2.plan.toml.text import format_path

    found = [CompletionItem(word, type="file")]
    for code, page in load_pages().items():
        if code.startswith(word.upper()):
            found.append(CompletionItem(code, help=page.what))
    keys = {format_path(path) for model in WRITTEN.values() for path in list_keys(model)}
    found += [CompletionItem(key) for key in sorted(keys) if word and key.startswith(word)]
    return found


def suggest_settings(
    context: click.Context, parameter: click.Parameter, word: str
) -> list[CompletionItem]:
    """``KEY=`` for every key of a plan that ``--set`` takes, ``KEY=VALUE`` where values are few."""
    return [CompletionItem(text) for text in _list_settings() if text.startswith(word)]


def _list_settings() -> Iterator[str]:
    from pi2.authoring.explanation import list_keys
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


def check_output(path: Path, kind: Kind | None, force: bool) -> str:
    """Name of the document to write; UserError P009 for a wrong suffix, P027 if the file exists."""
    suffix = "" if kind is None else f".{kind}.toml"
    name = path.name.removesuffix(suffix)
    if not path.name.endswith(suffix) or not name:
        message = f"expected a file name that ends in {suffix}"
        raise UserError.of("P009", message, file=str(path), help=f"my{suffix}, for example")
    if os.path.lexists(path) and not force:
        help_text = "use --force to overwrite it"
        raise UserError.of("P027", "the file exists already", file=str(path), help=help_text)
    return name


def print_found(found: object, text: str, as_json: bool) -> None:
    """Print a result: ``found`` as JSON for programs, or ``text`` for people."""
    click.echo(json.dumps(found, indent=2) if as_json else text)


def read_sound(path: Path) -> Report:
    """A plan, device or model without errors; its warnings are printed."""
    from pi2.weights.file_reading import check_document

    report = check_document(path)
    if report.document is None or not report.is_sound:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    return report


def find_form(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"


def write_file(path: Path, data: bytes) -> None:
    """Write a picture or a report; UserError P631."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError.of("P631", f"cannot write {path}: {error.strerror}") from None


def read_device(reference: str) -> Device:
    """A device by path, short name or reference; UserError with all findings."""
    from pi2.planning.wish import read_document

    return cast("Device", read_document(reference, "device").document)


def read_model(reference: str) -> Model:
    """A model by path, short name or reference; UserError with all findings."""
    from pi2.planning.wish import read_document

    return cast("Model", read_document(reference, "model").document)


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
    """Write a document whole or not at all, if it is sound; ``advice`` is the next step."""
    from pi2.sharing.fetching import write_atomically
    from pi2.weights.file_reading import check_document

    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # references go through it
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise UserError.of("P003", message, file=str(path)) from None
    report = check_document(path, text=text)
    if not report.is_sound:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    write_atomically(path, text.encode())
    click.echo(f"{path}: written; {advice}", err=True)
    return report


Command = TypeVar("Command", bound=Callable[..., object])
Options = TypeVar("Options")

COUNT = click.IntRange(1, 2**31 - 1)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def option(*names: str, **settings: Any) -> Any:
    """A field of an options dataclass with click's ``settings``, and other ``names``."""
    return field(metadata={"names": names, "settings": settings})


def take_options(kind: type[Options]) -> Callable[[Command], Command]:
    """Give a command the options of dataclass ``kind`` as ``given``: bool is a flag, Literal a
    choice, a tuple repeatable; ``options.toml`` has the help of each field."""
    stated = dict(_make_options(kind))

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> object:
            given = kind(**{name: values.pop(name) for name in stated})
            return command(given=given, **values)

        return add_options(list(stated.values()))(call)  # type: ignore[return-value] # what click calls

    return add


def _make_options(kind: type[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
    hints, described = get_type_hints(kind), partial(_DescribedOption, kind=kind)
    return [(item.name, _make_option(item, hints[item.name], described)) for item in fields(kind)]


class _DescribedOption(click.Option):
    """An option that looks its help up when it is shown."""

    def __init__(self, *names: Any, kind: type[Any], **settings: Any) -> None:
        self._kind = kind
        super().__init__(*names, **settings)

    @property
    def help(self) -> str | None:
        assert self.name is not None
        return self._help or read_texts(self._kind).get(self.name)

    @help.setter
    def help(self, text: str | None) -> None:
        self._help = text


@functools.cache
def read_table() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def read_texts(kind: type[Any]) -> dict[str, str]:
    """The help of a dataclass's options, inherited ones first."""
    tables = (read_table().get(base.__name__, {}) for base in reversed(kind.__mro__))
    return {name: text for table in tables for name, text in table.items()}


def _make_option(
    item: Field[Any], hint: Any, described: Callable[..., click.Option]
) -> Callable[[Any], Any]:
    names = item.metadata.get("names") or (f"--{item.name.replace('_', '-')}",)
    settings = dict(item.metadata.get("settings", {}))
    if item.default is not MISSING:
        settings["default"] = item.default
    parts = get_args(hint)
    kind = parts[0] if NoneType in parts else hint
    if "callback" not in settings:
        if get_origin(kind) is tuple:
            kind, settings["multiple"] = get_args(kind)[0], True
        if kind is bool:
            settings["is_flag"] = True
        elif get_origin(kind) is Literal:
            settings.setdefault("type", click.Choice(get_args(kind)))
        else:
            settings.setdefault("type", click.Path(path_type=Path) if kind is Path else kind)
    if settings.get("default") not in (None, (), "") and kind is not bool:
        settings.setdefault("show_default", True)
    return click.option(*names, item.name, cls=described, **settings)  # type: ignore[arg-type]


MIB = 1024 * 1024

add_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
JSON = partial(option, "--json", help="Print one JSON object.")
FORCE = partial(option, "--force", help="Overwrite an existing file.")
LOCKED = partial(option, "--locked", help="Fail if pi2.lock is out of date.")
SET = partial(
    option,
    "--set",
    metavar="KEY=VALUE",
    shell_complete=suggest_settings,
    help="Override a value of the plan; repeatable.",
)
MEMORY = partial(
    option,
    "--memory",
    metavar="SIZE",
    help="Memory budget of the process, such as 3GiB; the plan is fitted to it.",
)
TOKENIZER = partial(
    option,
    "--tokenizer",
    metavar="FILE",
    help="tokenizer.json or tokenizer.model, or a folder that has one, instead of the "
    "checkpoint's own.",
)


DRAFT = partial(
    option,
    "--draft",
    metavar="FILE",
    shell_complete=suggest_files,
    help="GGUF file or plan that drafts: a smaller model with the same tokens, or an MTP head.",
)


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    files: tuple[Path, ...] = option("--text", required=True, metavar="FILE")
    context: int | None = option(type=click.IntRange(min=2))
    windows: int | None = option(type=click.IntRange(min=1))

    def read_passages(self, *, stride: int | None = None, held_out: int | None = None) -> Passages:
        """The texts, to be cut as the options say; UserError P660."""
        from pi2.measuring.texts import Passages, read_texts

        return Passages(
            read_texts(self.files), self.context, self.windows, stride=stride, held_out=held_out
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, if a plan's ``[sampling]`` shall not say it."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        found = {item.name: getattr(self, item.name) for item in fields(SamplingOptions)}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    memory: str | None = MEMORY()
    settings: tuple[str, ...] = SET()
    locked: bool = LOCKED()
    tokenizer: Path | None = TOKENIZER()  # noqa: RUF009  # a field
    draft: Path | None = DRAFT()  # noqa: RUF009  # a field


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that a command is given, with what its options change."""

    given: Path
    """As written: a path or a name."""
    path: Path
    settings: Mapping[str, object]
    """The values of ``--set``."""
    memory_bytes: int | None = None
    locked: bool = False
    files: FileFiller | None = None
    """GGUF files that are open."""

    @cached_property
    def fitted(self) -> FittedPlan:
        """The plan as it was read, with or without errors; lists the fitted values."""
        from pi2.plan.toml.source import display_path
        from pi2.refit import read_plan

        found = read_plan(
            self.path,
            name=display_path(self.path),
            overrides=self.settings,
            memory_bytes=self.memory_bytes,
            locked=self.locked,
            files=self.files,
        )
        if found.report.resolved is not None:
            for change in found.changes:
                label = "fitted" if self.memory_bytes is None else "memory"
                click.echo(f"{label}: {change}", err=True)
        return found

    @property
    def runs_file(self) -> bool:
        """Whether it runs a GGUF file as it is; it may have errors."""
        return self.fitted.report.runs_file

    def refuse_file(self) -> None:
        """UserError P662 for a plan of a GGUF file, which has no neurons to look at."""
        if self.runs_file:
            raise UserError.of(
                "P662",
                f"{self.given} runs a GGUF file as it is, and shows none of its neurons",
                help="`pi2 convert FILE.gguf -o STORE` makes a neuron store: give its plan",
            )

    @property
    def resolved(self) -> ResolvedPlan:
        return self.fitted.resolved

    @property
    def measured(self) -> ResolvedPlan:
        return replace(self.resolved, device=measure_host(self.resolved.device))

    @property
    def overrides(self) -> Mapping[str, object]:
        """Values to load the plan with: ``--set`` and the other options."""
        _ = self.resolved
        return self.fitted.overrides

    def change(self, values: Mapping[str, object]) -> ChosenPlan:
        return replace(self, settings={**self.settings, **values}) if values else self

    def load(self, progress: Progress | None = None) -> LoadedModel:
        from pi2.orchestrator import load

        return load(self.fitted, progress=progress)


def choose_plan(
    given: Path,
    settings: tuple[str, ...] = (),
    memory: str | None = None,
    *,
    locked: bool = False,
    tokenizer: Path | None = None,
    draft: Path | None = None,
) -> ChosenPlan:
    from pi2.cli.documents import find_retokenized
    from pi2.weights.file_reading import FileFiller

    files = FileFiller()
    path, further = find_retokenized(given, tokenizer, files=files)
    values, memory_bytes = parse_changes(settings, memory)
    chosen = {**values, **further, **name_draft(draft)}
    return ChosenPlan(given, path, chosen, memory_bytes, locked=locked, files=files)


def name_draft(draft: Path | None) -> dict[str, object]:
    """Values of a plan for which the model of ``draft`` drafts."""
    from pi2.cli.documents import find_plan_path
    from pi2.importing.gguf_checkpoint import is_head

    if draft is None:
        return {}
    has_head = is_gguf(draft) and is_head(draft)
    path = draft if has_head else find_plan_path(draft)
    kind = "mtp" if has_head else "plan"
    return {"decode.speculation.drafts": kind, "decode.speculation.plan": str(path.absolute())}


def measure_host(device: Device) -> Device:
    """The device; this machine, if it was not probed, with quickly measured rates."""
    if device.id != "host":
        return device
    from pi2.probing.document import has_rates, sketch_device

    if has_rates(device):
        return device
    click.echo("note: memory and disk are measured for 2 s; `pi2 probe` measures more", err=True)
    folder = find_cache_folder("kernels")
    folder.mkdir(parents=True, exist_ok=True)
    return sketch_device(device, folder)


def parse_changes(
    settings: tuple[str, ...], memory: str | None
) -> tuple[Mapping[str, object], int | None]:
    from pi2.plan.documents.quantities import parse_size
    from pi2.plan.toml.source import parse_assignments

    return parse_assignments(settings), None if memory is None else parse_size(memory)


def take_plan(
    *, fitted: bool = True, locked: bool = False, tokenizer: bool = False
) -> Callable[[Command], Command]:
    """Give a command PLAN and ``--set`` as a `ChosenPlan`; flags add ``--memory``, ``--locked``,
    ``--tokenizer`` and ``--draft``."""
    flags = {"memory": fitted, "settings": True, "locked": locked}
    flags |= {"tokenizer": tokenizer, "draft": tokenizer}
    taken = {name: make for name, make in _make_options(PlanOptions) if flags[name]}
    argument = click.argument("plan", type=click.Path(path_type=Path), shell_complete=suggest_plans)

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def call(plan: Path, **others: Any) -> object:
            chosen = choose_plan(plan, **{name: others.pop(name) for name in taken})
            return command(plan=chosen, **others)

        return add_options([argument, *taken.values()])(call)  # type: ignore[return-value] # click

    return add


def add_options(options: list[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        # Decorators nest: the last one stands first.
        for option in reversed(options):
            command = option(command)
        return command

    return add
