"""Write the reference docs/reference/python-api.md from the docstrings of the Python interface.

python tools/write_api_docs.py [--check]
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, is_typeddict

import pi2
from pi2.authoring.explanation import list_field_docs
from pi2.diagnostics import Diagnostic, Span
from pi2.engine.answer import GenerationOptions, SequenceResult
from pi2.engine.generation import AsyncGeneration, BatchGeneration, BatchResult

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "python-api.md"
BEGIN = "<!-- Written by tools/write_api_docs.py: change the docstrings instead. -->\n"
FIRST = ("load", "LoadedModel")
"""Names that come first; the others follow in their order."""
RETURNED = (
    GenerationOptions,
    AsyncGeneration,
    BatchGeneration,
    BatchResult,
    SequenceResult,
    Diagnostic,
    Span,
)
"""Types that are not names of `pi2`, and that its functions take, return or raise."""
COLUMNS = 88


def write_reference() -> str:
    """Everything from `BEGIN` on."""
    names = [*FIRST, *(name for name in pi2.__all__ if name not in (*FIRST, "__version__"))]
    parts = ["Everything here is found in `pi2`; types without `pi2.` are taken or returned.\n"]
    for name in names:
        parts.append(write_object(f"pi2.{name}", getattr(pi2, name)))
    parts += [write_object(kind.__name__, kind) for kind in RETURNED]
    return "\n".join(parts)


def write_object(name: str, value: Any) -> str:
    """The section of a function or class."""
    if not inspect.isclass(value):
        return f"## {name}\n\n{write_code(write_signature(name, value))}\n{write_text(value)}\n"
    parts = [f"## {name}\n\n{write_text(value)}\n"]
    fields = list(list_fields(value))
    if fields:
        rows = [f"| `{field}` | `{kind}` | {text} |" for field, kind, text in fields]
        head = "| field | type | meaning |\n|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    for member, item in list_members(value):
        if isinstance(item, property):
            kind = inspect.signature(item.fget).return_annotation if item.fget else ""
            parts.append(f"### {member}: {kind}\n\n{write_text(item)}\n".replace(": \n", "\n"))
        else:
            code = write_code(write_signature(member, item))
            parts.append(f"### {member}()\n\n{code}\n{write_text(item)}\n")
    return "\n".join(parts)


def list_fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Fields of a dataclass with their types and docstrings, inherited ones first."""
    if not is_dataclass(kind) and not is_typeddict(kind):
        return
    for base in reversed(kind.__mro__):
        if not is_dataclass(base) and not is_typeddict(base):
            continue
        texts = dict(list_field_docs(base))
        for name, annotation in inspect.get_annotations(base).items():
            yield name, str(annotation).replace("|", "\\|"), texts.get(name, "").replace("|", "\\|")


def list_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class itself has, or a private one that it derives from,
    in the order of the source."""
    own = (base for base in kind.__mro__ if base is kind or base.__name__.startswith("_"))
    for name, item in (pair for base in own for pair in vars(base).items()):
        plain = item.__func__ if isinstance(item, classmethod | staticmethod) else item
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(plain, property)):
            yield name, plain


def write_signature(name: str, function: Any) -> str:
    """``name(argument, ...) -> type``, on several lines where it is long."""
    signature = inspect.signature(function)
    arguments: list[str] = []
    for item in signature.parameters.values():
        if item.name in ("self", "cls"):
            continue
        if item.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        stars = "**" if item.kind is inspect.Parameter.VAR_KEYWORD else ""
        arguments.append(stars + write_argument(item))
    result = signature.return_annotation
    tail = "" if result is inspect.Signature.empty else f" -> {result}"
    line = f"{name}({', '.join(arguments)}){tail}"
    if len(line) <= COLUMNS:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}){tail}"


def write_argument(item: inspect.Parameter) -> str:
    """``name: type = default``; a default that is a function is shown as ``...``."""
    text = f"{item.name}: {item.annotation}"
    if item.default is inspect.Parameter.empty:
        return text
    return f"{text} = {'...' if callable(item.default) else repr(item.default)}"


def write_code(text: str) -> str:
    """A block of Python."""
    return f"```python\n{text}\n```\n"


def write_text(value: Any) -> str:
    """A docstring as Markdown; one that is missing is a mistake."""
    text = inspect.getdoc(value)
    assert text, f"{value} has no docstring"
    return text.replace("``", "`")


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
