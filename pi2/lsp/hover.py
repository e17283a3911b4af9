"""What an editor shows of a key or value: its meaning, where it comes from, what it costs."""

from __future__ import annotations

from collections.abc import Iterator

from pi2.diagnostics import Span
from pi2.lsp.checked import Checked
from pi2.plan.arithmetic.costs import list_costs
from pi2.plan.authoring.explanation import write_chain
from pi2.plan.authoring.field_docs import FieldDoc, describe_field
from pi2.plan.composing.history import trace_value
from pi2.plan.reading.kinds import DOCUMENTS
from pi2.plan.toml.paths import KeyPath, format_path


def explain_place(checked: Checked, line: int, column: int) -> tuple[Span, str] | None:
    """Markdown about the key or value at a place, counted from 1, and its span."""
    kind = checked.kind
    found = checked.find_path(line, column)
    if kind is None or found is None:
        return None
    path, span = found
    doc = describe_field(DOCUMENTS[kind], path)
    if doc is None:
        return None
    parts = [f"**`{format_path(path)}`** — {doc.text}", _write_values(doc)]
    origins = list(_write_origins(checked, path))
    if origins:
        parts.append("\n".join(["Set by:", *origins]))
    resolved = checked.report.resolved
    costs = [] if resolved is None else list(list_costs(resolved, path))
    if costs and kind == "plan":
        parts.append("\n".join(f"- {cost.text}" for cost in costs))
    return span, "\n\n".join(parts)


def _write_values(doc: FieldDoc) -> str:
    words = [doc.values]
    if doc.default is not None:
        words.append(f"default `{doc.default}`")
    elif doc.is_required:
        words.append("required")
    if doc.examples:
        words.append("for example " + ", ".join(f"`{item}`" for item in doc.examples))
    return "; ".join(words)


def _write_origins(checked: Checked, path: KeyPath) -> Iterator[str]:
    """Every file that says something about the value, the strongest first."""
    source = checked.source
    if source is None:
        return
    folder = f"{checked.path.parent}/"
    for text in write_chain(trace_value(source, path)):
        yield f"- {text.removeprefix(folder)}"
