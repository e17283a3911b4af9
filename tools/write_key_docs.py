"""Write the pages of keys in docs from the documents' classes.

python tools/write_key_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from pi2.authoring.explanation import FieldDoc, describe_field, find_table, list_keys
from pi2.plan.documents.common import Document, Origin, find_type
from pi2.plan.documents.device import Device
from pi2.plan.documents.family import Family
from pi2.plan.documents.model import WrittenModel
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.text import KeyPath, format_path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN = "<!-- Written by tools/write_key_docs.py: change the docstrings in pi2/plan instead. -->\n"
PAGES: dict[str, tuple[str, type[BaseModel]]] = {
    "reference/plan-keys.md": ("Plan keys", Plan),
    "reference/device-keys.md": ("Device keys", Device),
    "develop/model-keys.md": ("Model keys", WrittenModel),
    "develop/family-keys.md": ("Family keys", Family),
}
COMMON_PAGE = "reference/plan-keys.md"
"""The page that explains the keys of every document."""
COMMON: dict[str, type[BaseModel]] = {
    "Every document": Document,
    "Every figure of a device or model": Origin,
}


def describe_values(root: type[BaseModel], path: KeyPath, doc: FieldDoc) -> str:
    """What may be written, in a cell of a table."""
    kind: Any = find_type(root, path)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a figure" if issubclass(kind, Origin) else "a table"
    entry = find_table(root, path)
    if get_origin(kind) is tuple and entry is not None:
        return "figures" if issubclass(find_type(root, entry), Origin) else "tables"
    if get_origin(kind) is dict and get_args(kind):
        return "a table"
    example = f", such as `{doc.examples[0]}`" if doc.examples else ""
    return doc.values + example


def is_common(root: type[BaseModel], path: KeyPath) -> bool:
    """Whether many tables have this key, so that the page explains it once, in `COMMON`."""
    table: Any = root if len(path) == 1 else find_type(root, path[:-1])
    assert isinstance(table, type), path
    return any(
        issubclass(table, common) and path[-1] in common.model_fields for common in COMMON.values()
    )


def write_section(title: str, root: type[BaseModel]) -> str:
    """The table of a document's keys."""
    rows = []
    tables = find_tables(root)
    for path in list_keys(root):
        if root not in COMMON.values() and is_common(root, path):
            continue
        if any(path[: len(other)] == other != path for other in tables):
            continue
        doc = describe_field(root, path)
        assert doc is not None, path
        if path in tables:
            text = f"As `{format_path(tables[path])}`. {doc.text}"
            rows.append(f"| `{format_path(path)}` | a table |  | {text} |")
            continue
        default = "required" if doc.is_required else f"`{doc.default}`" if doc.default else ""
        cells = (f"`{format_path(path)}`", describe_values(root, path, doc), default, doc.text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    summary = (root.__doc__ or "").strip().partition("\n")[0].replace("``", "`")
    head = "| key | values | default | meaning |\n|---|---|---|---|\n"
    return f"## {title}\n\n{summary}\n\n{head}" + "\n".join(rows) + "\n"


def find_tables(root: type[BaseModel]) -> dict[KeyPath, KeyPath]:
    """Tables with the keys of another table of the document, and the shortest path of that one."""
    groups: dict[type[BaseModel], list[KeyPath]] = {}
    for path in list_keys(root):
        kind = find_type(root, path)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Origin):
            groups.setdefault(kind, []).append(path)
    found: dict[KeyPath, KeyPath] = {}
    for paths in groups.values():
        first, *others = sorted(paths, key=len)
        found |= dict.fromkeys(others, first)
    return found


def make_pages() -> dict[str, str]:
    """Texts of all pages by their paths in docs."""
    pages = {}
    for name, (title, root) in PAGES.items():
        own = {**COMMON, title: root} if name == COMMON_PAGE else {title: root}
        parts = [write_section(head, kind) for head, kind in own.items()]
        intro = f"# {title}\n\n`pi2 explain KEY` explains one key, and where a value comes from.\n"
        pages[name] = "\n".join([BEGIN + intro, *parts])
    return pages


def find_differences() -> list[str]:
    """Pages that are missing or differ."""
    return [
        name
        for name, text in make_pages().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text("utf-8") != text
    ]


def main() -> int:
    """Write or check; the exit code is 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    options = parser.parse_args()
    pages, changed = make_pages(), find_differences()
    for name in changed:
        if not options.check:
            (DOCS / name).write_text(pages[name], encoding="utf-8")
        print(f"{DOCS / name}: {'differs' if options.check else 'written'}")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
