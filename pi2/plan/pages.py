"""Pages of all codes: the docstrings of the rules."""

from __future__ import annotations

from pi2.diagnostics.page import Page, parse_page
from pi2.plan.rules import load_rules


def load_pages() -> dict[str, Page]:
    """All pages by code, in the order of the codes."""
    return {rule.code: parse_page(rule.code, rule.documentation) for rule in load_rules()}


def find_page(code: str) -> Page | None:
    """The page about ``code``; None where there is none."""
    return load_pages().get(code)
