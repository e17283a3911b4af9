"""Pages of all codes: the docstrings of the rules, and ``pi2/diagnostics/pages`` for the others.

A rule's page is its module's docstring.  Codes that are given in passing, such as that of a file
which is not there, have theirs in a TOML file per range of codes: a table per code with the keys
``what``, ``why``, ``example`` and ``fix``, which are Markdown.
"""

from __future__ import annotations

from pathlib import Path

import pi2.diagnostics
from pi2.diagnostics.page import Page, parse_page
from pi2.plan.checking.rules import load_rules

FOLDER = Path(pi2.diagnostics.__path__[0]) / "pages"


def load_pages() -> dict[str, Page]:
    """All pages by code, in the order of the codes."""
    import tomli

    pages = [parse_page(rule.code, rule.documentation) for rule in load_rules()]
    for file in FOLDER.glob("*.toml"):
        tables = tomli.loads(file.read_text(encoding="utf-8"))
        pages += [Page(code=code, **texts) for code, texts in tables.items()]
    return {page.code: page for page in sorted(pages, key=lambda page: page.code)}


def find_page(code: str) -> Page | None:
    """The page about ``code``; None where there is none."""
    return load_pages().get(code)
