"""Write docs/reference/findings, an index and a page per hundred codes, from the codes' pages.

``python tools/write_rule_docs.py`` writes the files and removes those that no code belongs to;
``--check`` writes nothing and fails if something would change.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pi2.diagnostics.texts import Page, begin_sentence
from pi2.fitting.check import load_pages

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference" / "findings"
INDEX = "README.md"
RANGES = {
    "P0": "Reading files, and the command line",
    "P1": "Keys and values",
    "P2": "The plan as a whole",
    "P3": "This machine",
    "P4": "Origins of figures",
    "P5": "Neuron stores and checkpoints",
    "P6": "Running and measuring",
    "P7": "Sharing, and editors",
    "P9": "Mistakes of pi2",
}
NOTICE = "<!-- Written by tools/write_rule_docs.py: change pi2/diagnostics/pages instead. -->\n\n"


def make_files() -> dict[str, str]:
    """Texts of all files by their names."""
    pages = load_pages()
    assert {code[:2] for code in pages} <= RANGES.keys(), "a code lies outside of all ranges"
    files = {name_page(prefix): NOTICE + write_page(pages, prefix) for prefix in RANGES}
    return {INDEX: NOTICE + write_index(pages), **files}


def name_page(prefix: str) -> str:
    """File name of the page that has all codes of a hundred: ``P2xx.md``."""
    return f"{prefix}xx.md"


def write_page(pages: Mapping[str, Page], prefix: str) -> str:
    """One hundred of codes, a section each."""
    own = [write_entry(page) for code, page in sorted(pages.items()) if code.startswith(prefix)]
    return "\n".join([f"# {prefix}xx: {RANGES[prefix]}\n", *own])


def write_entry(page: Page) -> str:
    """Title and remedy of a code; `pi2 explain` has reason and example."""
    return f"## {page.code}\n\n{page.what}\n\n{begin_sentence(page.fix)}\n"


def write_index(pages: Mapping[str, Page]) -> str:
    """List of the codes in their ranges."""
    parts = ["# Findings\n", "`pi2 explain CODE` gives the reason and an example.\n"]
    for prefix, title in RANGES.items():
        own = [page for code, page in pages.items() if code.startswith(prefix)]
        if own:
            link = name_page(prefix) + "#"
            rows = "".join(
                f"| [{page.code}]({link}{page.code.lower()}) | {page.what} |\n" for page in own
            )
            parts.append(f"## {title}\n\n| code | what is right |\n|---|---|\n{rows}")
    return "\n".join(parts)


def find_differences(folder: Path) -> list[str]:
    """Names of files that are missing, that differ, or that belong to no code."""
    files = make_files()
    present = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in files.keys() | present if files.get(name) != present.get(name))


def write_files(folder: Path) -> list[str]:
    """Bring the folder up to date; return the names of the files that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = make_files()
    changed = find_differences(folder)
    for name in changed:
        if name in files:
            (folder / name).write_text(files[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return changed


def main() -> int:
    """Write or check; the exit code is 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    changed = find_differences(options.folder) if options.check else write_files(options.folder)
    for name in changed:
        print(f"{options.folder / name}: {'differs' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
