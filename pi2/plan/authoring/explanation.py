"""Explaining one value of a document: what it is, where it comes from, what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.costs import Cost, list_costs
from pi2.plan.authoring.field_docs import FieldDoc, describe_field
from pi2.plan.checking.check import Report
from pi2.plan.composing.history import Step, look_up, trace_value
from pi2.plan.documents.common import Document
from pi2.plan.documents.fields import list_known_keys, suggest
from pi2.plan.reading.kinds import DOCUMENTS
from pi2.plan.toml.paths import EVERY_ITEM, EVERY_NAME, KeyPath, format_path
from pi2.plan.toml.source import Kind

_PART = re.compile(
    r"""\.?(?:(?P<plain>[\w-]+|\*)|"(?P<quoted>[^"]*)"|\[(?P<index>\d{1,9}|\*)?\])"""
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known of one value."""

    path: KeyPath
    kind: Kind
    """The document that the value belongs to."""
    value: Any
    """Plain value as in TOML; None where the documents say nothing and there is no default."""
    steps: tuple[Step, ...]
    """The places that state the value, the weakest first; empty for a default."""
    doc: FieldDoc | None
    costs: tuple[Cost, ...] = ()


def parse_path(text: str) -> KeyPath:
    """Take a key path apart: ``layers.overrides[0].hot``, ``layers.3.hot``, ``units."a.b"``.

    ``layers.overrides[].hot`` and ``units.*.kind`` mean those of every item and of every name.
    """
    parts: list[str | int] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise _refuse(text, "write names with dots between them: kv.context")
        position = match.end()
        name = match["plain"] if match["plain"] is not None else match["quoted"]
        if name is None and match["index"] in (None, "*"):
            parts.append(EVERY_ITEM)
            continue
        index = match["index"] if match["index"] is not None else name
        parts.append(int(index) if index.isdecimal() and len(index) <= 9 else name)
    if not parts:
        raise _refuse(text, "write names with dots between them: kv.context")
    return tuple(parts)


def _refuse(text: str, help: str | None) -> UserError:
    return UserError.of("P019", f"no key is called `{text}`", help=help)


def is_known_path(text: str) -> bool:
    """Whether ``text`` begins with a key of some document."""
    match = _PART.match(text)
    name = match["plain"] if match is not None else None
    return name is not None and any(name in model.model_fields for model in DOCUMENTS.values())


def describe_path(text: str) -> list[Explanation]:
    """What the key ``text`` means, in every kind of document that has it."""
    path = parse_path(text)
    found = []
    for kind in DOCUMENTS:
        own = _find_document(kind, path)
        if own is not None:
            doc = describe_field(DOCUMENTS[own[0]], own[1])
            if doc is not None:
                found.append(Explanation(path=own[1], kind=own[0], value=None, steps=(), doc=doc))
    if not found:
        raise _report_unknown(text, path, "plan")
    return found


def _find_document(kind: Kind, path: KeyPath) -> tuple[Kind, KeyPath] | None:
    """Document and path that ``path`` means in a document of ``kind``."""
    if kind == "plan" and len(path) > 1 and path[0] in ("device", "model"):
        other: Kind = "device" if path[0] == "device" else "model"
        return other, path[1:]
    if kind == "plan" and len(path) > 1 and path[0] == "layers" and isinstance(path[1], int):
        return kind, (path[0], *path[2:])
    return kind, path


def explain_values(report: Report, kind: Kind, text: str) -> list[Explanation]:
    """Explain the value at ``text`` of a document that was checked as ``report``, or the values
    where ``text`` means those of every item or name; what the key means where there are none.

    In a plan, ``layers.3`` means the settings of the fourth layer, and ``device.…`` and ``model.…``
    go on in those documents.  Raises `UserError` P019 where there is no such key.
    """
    path = parse_path(text)
    found = _find_document(kind, path)
    assert found is not None
    owner, own = found
    if EVERY_ITEM not in own and EVERY_NAME not in own:
        return [explain_value(report, kind, path)]
    source = report.files.get(owner)
    before = path[: len(path) - len(own)]
    values = None if source is None else _dump(report, owner, source.values)
    items = [explain_value(report, kind, (*before, *item)) for item in _expand_path(values, own)]
    return items or describe_path(text)


def _expand_path(values: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Paths of all values that ``path`` means in ``values``."""
    if not path:
        yield ()
        return
    part, rest = path[0], path[1:]
    found: list[tuple[str | int, Any]]
    if isinstance(values, list):
        found = [(key, item) for key, item in enumerate(values) if part in (EVERY_ITEM, key)]
    elif isinstance(values, dict):
        found = [(key, item) for key, item in values.items() if part in (EVERY_NAME, key)]
    else:
        return
    for key, item in found:
        yield from ((key, *inner) for inner in _expand_path(item, rest))


def explain_value(report: Report, kind: Kind, path: KeyPath) -> Explanation:
    """Explain the value at ``path``, as `explain_values` does."""
    found = _find_document(kind, path)
    assert found is not None
    owner, own = found
    resolved = report.resolved
    if owner == "plan" and len(path) > 1 and path[0] == "layers" and isinstance(path[1], int):
        own = _find_layer(report, path) if resolved is not None else own
    doc = describe_field(DOCUMENTS[owner], own)
    if doc is None:
        raise _report_unknown(format_path(path), own, owner)
    source = report.files.get(owner)
    value = None if source is None else look_up(_dump(report, owner, source.values), own)
    costs: tuple[Cost, ...] = ()
    if resolved is not None and kind == "plan":
        costs = tuple(list_costs(resolved, (owner, *own) if owner != "plan" else path))
    return Explanation(
        path=own,
        kind=owner,
        value=value,
        steps=() if source is None else trace_value(source, own),
        doc=doc,
        costs=costs,
    )


def _dump(report: Report, kind: Kind, values: dict[str, Any]) -> Any:
    """Values with defaults, where the document is sound."""
    document: Document | None = report.document
    if report.resolved is not None:
        documents: dict[Kind, Document] = {
            "plan": report.resolved.plan,
            "device": report.resolved.device,
            "model": report.resolved.model,
        }
        document = documents[kind]
    elif not isinstance(document, DOCUMENTS[kind]):
        return values
    assert document is not None
    return document.model_dump(mode="json", exclude_none=True)


def _find_layer(report: Report, path: KeyPath) -> KeyPath:
    """Where a layer's setting stands in the plan."""
    resolved = report.resolved
    assert resolved is not None
    number = path[1]
    assert isinstance(number, int)
    count = len(resolved.layers)
    if number >= count:
        raise UserError.of("P019", f"no layer {number}: the model has the layers 0 to {count - 1}")
    layer = resolved.layers[number]
    if path[2:3] == ("split",):
        return (*layer.split_path, *path[3:])
    if path[2:3] == ("hot",):
        return layer.hot_path
    return ("layers", *path[2:])


def _report_unknown(text: str, path: KeyPath, kind: Kind) -> UserError:
    for end in range(1, len(path) + 1):
        known = list_known_keys(DOCUMENTS[kind], path[: end - 1])
        name = str(path[end - 1])
        if known and name not in known:
            near = suggest(name, known)
            help_text = f"known keys: {', '.join(known)}"
            if near is not None:
                help_text = f"did you mean `{format_path((*path[: end - 1], near))}`?"
            return _refuse(text, help_text)
    return _refuse(text, None)


def write_chain(steps: tuple[Step, ...]) -> Iterator[str]:
    """The history, the strongest step first, one line each."""
    from pi2.plan.toml.text import write_value

    for step in reversed(steps):
        shown = write_value(step.value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        yield f"{step.place}: {step.verb} {shown}"
