"""The site has every document; `.ci/run` builds it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
OUTSIDE = {"index.md", "contributing.md", "security.md", "changelog.md", "reference/cli.md"}
"""Pages that tools/site_pages.py makes."""


def list_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from list_pages(item)


def test_the_site_has_every_document_once() -> None:
    pages = sorted(list_pages(SETTINGS["nav"]))
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages == sorted(documents | OUTSIDE), "add the page to nav in mkdocs.yml"


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    assert SETTINGS["theme"]["font"] is False and "extra_javascript" not in SETTINGS
    assert all((ROOT / "docs" / path).is_file() for path in SETTINGS["extra_css"])
