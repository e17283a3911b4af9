"""Write the reference of keys at the end of docs/plan-language.md from the documents' classes.

python tools/write_key_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from pi2.plan.authoring.explanation import FieldDoc, describe_field, find_table, list_keys
from pi2.plan.documents.common import Document, Origin, find_type
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import WrittenModel
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.text import KeyPath, format_path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan-language.md"
BEGIN = "<!-- Written by tools/write_key_docs.py: change the docstrings in pi2/plan instead. -->\n"
DOCUMENTS: dict[str, type[BaseModel]] = {
    "A plan": Plan,
    "A device": Device,
    "A model": WrittenModel,
}
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
    for path in list_keys(root):
        if root not in COMMON.values() and is_common(root, path):
            continue
        doc = describe_field(root, path)
        assert doc is not None, path
        default = "required" if doc.is_required else f"`{doc.default}`" if doc.default else ""
        cells = (f"`{format_path(path)}`", describe_values(root, path, doc), default, doc.text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    summary = (root.__doc__ or "").strip().partition("\n")[0].replace("``", "`")
    head = "| key | values | default | meaning |\n|---|---|---|---|\n"
    return f"### {title}\n\n{summary}\n\n{head}" + "\n".join(rows) + "\n"


def write_reference() -> str:
    """Everything from `BEGIN` on."""
    parts = [write_section(title, root) for title, root in {**COMMON, **DOCUMENTS}.items()]
    return (
        "## Every key\n\n`pi2 explain KEY` explains one key, and where a file's value comes "
        "from.\n\n" + "\n".join(parts)
    )


def make_page(text: str) -> str:
    """The page's text with its reference as it is to be."""
    kept = text.partition(BEGIN)[0].rstrip("\n")
    return f"{kept}\n\n{BEGIN}\n{write_reference()}"


def main() -> int:
    """Write or check; the exit code is 1 if the check finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    options = parser.parse_args()
    text = PAGE.read_text("utf-8")
    page = make_page(text)
    if page == text:
        return 0
    if options.check:
        print(f"{PAGE}: differs")
        return 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"{PAGE}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
