"""What shells offer for a word that is being typed: names of documents, codes, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args, get_origin

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from pi2.plan.toml.source import Kind


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
    from pi2.plan.authoring.field_docs import list_keys
    from pi2.plan.checking.pages import load_pages
    from pi2.plan.reading.kinds import DOCUMENTS
    from pi2.plan.toml.paths import format_path

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

    from pi2.plan.authoring.field_docs import list_keys
    from pi2.plan.documents.fields import find_type
    from pi2.plan.documents.plan import Plan
    from pi2.plan.toml.paths import EVERY_ITEM, EVERY_NAME, format_path

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
