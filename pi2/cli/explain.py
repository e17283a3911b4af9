"""Explain a finding's code: what it means, why it matters, how to fix it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from pi2.cli.main import wants_colour
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.diagnostics.page import Page

COLUMNS = 88
"""Width of pages that are not written to a terminal."""


@click.command("explain")
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Explain the finding CODE, such as P210; without it, list all codes."""
    from pi2.plan.pages import load_pages

    pages = load_pages()
    if code is None:
        click.echo("".join(f"{page.code}  {page.what}\n" for page in pages.values()), nl=False)
        return
    page = pages.get(code.upper())
    if page is None:
        raise _report_unknown(code, pages)
    if wants_colour(sys.stdout):
        _print_in_colour(page)
    else:
        click.echo(write_page(page), nl=False)


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
