"""Pages of the site that lie outside of docs: the README, CONTRIBUTING.md and CHANGELOG.md.

A hook of MkDocs (``mkdocs.yml`` names it): the site is made of the same files that the repository
shows, with their links changed to where the pages are in the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site by the files that they are made from."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those of docs."""
    for name, page in PAGES.items():
        text = adapt_links((ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def adapt_links(text: str) -> str:
    """Links to docs and to other pages as the site has them; others become plain text."""

    def adapt(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if target.startswith("docs/"):
            return f"{mark}[{label}]({target.removeprefix('docs/')})"
        if target in PAGES:
            return f"[{label}]({PAGES[target]})"
        return label

    return LINK.sub(adapt, text)
