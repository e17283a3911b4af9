"""Explain a finding's code, or a key: meaning, origin and cost."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.main import print_diagnostics, wants_colour
from pi2.cli.named_plans import find_document_path
from pi2.cli.options import (
    ChosenPlan,
    add_memory_option,
    add_set_option,
    choose_plan,
    parse_changes,
)
from pi2.cli.suggestions import suggest_codes, suggest_plans
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.diagnostics.page import Page
    from pi2.plan.authoring.explanation import Explanation

GROUP = "Author"

COLUMNS = 88
"""Width of pages that are not written to a terminal."""


@click.command("explain")
@click.argument("what", required=False, metavar="[CODE|KEY]", shell_complete=suggest_codes)
@click.argument("file", required=False, metavar="[FILE]", shell_complete=suggest_plans)
@add_memory_option
@add_set_option
@click.option(
    "--cost", is_flag=True, help=("Show a plan's predicted time per token, layer by layer.")
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --cost, also write a plot (needs the extra `plot`).",
)
def command(
    what: str | None,
    file: str | None,
    memory: str | None,
    settings: tuple[str, ...],
    cost: bool,
    plot: Path | None,
) -> None:
    """Explain a CODE such as P210, or a KEY such as kv.context.

    With FILE, a plan, device or model, it shows the key's value in that file, where it comes from
    and what it costs.  In a plan, layers.3.hot is a setting of the fourth layer;
    device.memory.capacity and model.shape.ffn refer to its device and model.
    layers.overrides[].hot and device.units.*.kind are those of every item or name.  Without
    arguments, it lists all codes.  `pi2 explain PLAN --cost` shows the time of a token by term:
    predicted, not measured.
    """
    from pi2.plan.checking.pages import load_pages

    if cost or plot is not None:
        if what is None or file is not None or not cost:
            raise click.UsageError("--cost and --plot go with a plan: pi2 explain PLAN --cost")
        _explain_cost(choose_plan(Path(what), settings, memory), plot)
        return
    if what is not None and file is not None:
        click.echo(_explain_value(what, Path(file), settings, memory), nl=False)
        return
    pages = load_pages()
    if what is None:
        click.echo("".join(f"{page.code}  {page.what}\n" for page in pages.values()), nl=False)
        return
    page = pages.get(what.upper())
    if page is None:
        from pi2.plan.authoring.explanation import describe_path, is_known_path

        if not is_known_path(what):
            raise _report_unknown(what, pages)
        found = describe_path(what)
        click.echo("\n".join(write_explanation(item) for item in found), nl=False)
    elif wants_colour(sys.stdout):
        _print_in_colour(page)
    else:
        click.echo(write_page(page), nl=False)


def _explain_cost(plan: ChosenPlan, plot: Path | None) -> None:
    """Print the terms of a plan's cost; UserError P351 where its device lacks figures."""
    from pi2.costs.cost import cost_plan
    from pi2.planning.table import draw_cost, write_cost
    from pi2.sharing.files import write_atomically

    resolved = plan.resolved
    cost = cost_plan(resolved)
    click.echo("\n".join(write_cost(cost)))
    if plot is not None:
        model, device = resolved.model, resolved.device
        title = f"{model.name or model.id} on {device.name or device.id}"
        write_atomically(plot, draw_cost(cost, plot.suffix.lstrip(".") or "png", title))


def _explain_value(key: str, file: Path, settings: tuple[str, ...], memory: str | None) -> str:
    from pi2.plan.authoring.explanation import explain_values
    from pi2.plan.toml.source import display_path
    from pi2.sharing.resolver import LockedReferences
    from pi2.weights.file_reading import check_document, find_kind

    path = find_document_path(file)
    kind = find_kind(path)
    if kind == "plan":
        report = ChosenPlan(file, path, *parse_changes(settings, memory)).fitted.report
    else:
        resolver = LockedReferences(path.parent)
        report = check_document(path, name=display_path(path), resolver=resolver)
    if kind is None or kind not in report.files:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    found = explain_values(report, kind, key)
    return "\n".join(write_explanation(item) for item in found)


def write_explanation(item: Explanation) -> str:
    """What is known of a value, as plain text."""
    from pi2.plan.authoring.explanation import write_chain
    from pi2.plan.toml.paths import format_path
    from pi2.plan.toml.text import write_value

    shown = format_path(item.path)
    lines = [f"{shown} (of a {item.kind})"]
    if item.value is not None:
        lines = [f"{shown} = {write_value(item.value)}"]
    if item.doc is not None:
        lines += [_indent(item.doc.text), _indent(f"type: {item.doc.values}")]
        if item.doc.default is not None:
            lines.append(_indent(f"default: {item.doc.default}"))
        elif item.doc.is_required:
            lines.append(_indent("required"))
        if item.doc.examples and item.value is None:
            lines.append(_indent(f"example: {', '.join(item.doc.examples)}"))
    if item.steps:
        lines += [f"  from: {line}" for line in write_chain(item.steps)]
    elif item.value is not None:
        lines.append("  from: the default")
    lines += [_indent(f"costs: {cost.text}") for cost in item.costs]
    return "\n".join(lines) + "\n"


def _indent(text: str) -> str:
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_page(page: Page) -> str:
    """The page as plain text, with a blank line between its parts."""
    parts = [f"{page.code}: {page.what}"]
    parts += [f"{heading}: {text}" for heading, text in page.sections]
    return "\n\n".join(_wrap(part) for part in parts) + "\n"


def _wrap(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)


def _print_in_colour(page: Page) -> None:
    # Rich takes a tenth of a second to import.
    from rich.console import Console
    from rich.markdown import Markdown

    parts = [f"**{page.code}: {page.what}**"]
    parts += [f"**{heading}:** {text}" for heading, text in page.sections]
    console = Console()
    for part in parts:
        console.print(Markdown(part), width=min(console.width, COLUMNS))
        console.print()


def _report_unknown(code: str, pages: Mapping[str, Page]) -> UserError:
    near = find_near(code, pages)
    listed = " or ".join(f'{item} ("{pages[item].what}")' for item in near)
    return UserError.of(
        "P018",
        f"there is no code {code!r}",
        help=f"did you mean {listed}?" if near else "`pi2 explain` lists all codes",
    )


def find_near(code: str, pages: Mapping[str, Page]) -> list[str]:
    """Up to three codes that are spelt nearly so, or whose first sentence has the word."""
    import difflib

    text = code.upper()
    if text.removeprefix("P").isdigit():
        text = f"P{text.removeprefix('P')}"
        return difflib.get_close_matches(text, pages, n=3, cutoff=0.7)
    word = code.casefold()
    return [item for item, page in pages.items() if word and word in page.what.casefold()][:3]
