"""Explains values of documents, and writes their JSON Schemas in editors' part of draft 7."""

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from pi2.authoring.writing import list_costs
from pi2.diagnostics import UserError
from pi2.fitting.check import Report
from pi2.plan.documents.common import (
    Document,
    find_field,
    find_type,
    is_table,
    list_known_keys,
    suggest,
)
from pi2.plan.documents.plan import DERIVED, Plan
from pi2.plan.documents.quantities import find_quantity
from pi2.plan.reading.compose import Step, trace_value
from pi2.plan.reading.references import DOCUMENTS, WRITTEN
from pi2.plan.toml.source import Kind
from pi2.plan.toml.text import EVERY_ITEM, EVERY_NAME, KeyPath, format_path, look_up, write_value

_DRAFT = "http://json-schema.org/draft-07/schema#"


def make_schemas() -> dict[str, str]:
    return {
        f"{kind}.schema.json": json.dumps(make_schema(document), indent=2, ensure_ascii=False)
        + "\n"
        for kind, document in WRITTEN.items()
    }


def make_schema(document: type[Document]) -> dict[str, Any]:
    raw = document.model_json_schema(ref_template="#/definitions/{model}")
    tables = {kind.__name__: kind for kind in _collect_tables(document)}
    entries = {kind.__name__ for table in tables.values() for kind in _list_entries(table)}
    definitions = {
        name: _describe_table(tables[name], _simplify(schema))
        for name, schema in sorted(raw.pop("$defs", {}).items())
    }
    for name in definitions.keys() - entries:
        definitions[name].pop("required", None)
    body = _describe_table(document, _simplify(raw))
    body["properties"]["schema_version"]["type"] = "integer"
    derived = {"schema_version", *(DERIVED if document is Plan else ())}
    own = [name for name in body["required"] if name not in derived]
    others = ["extends", *(["weights"] if document is Plan else [])]
    body["required"] = ["schema_version"]
    body["anyOf"] = [*({"required": [name]} for name in others), {"required": own}]
    return {"$schema": _DRAFT, **body, "definitions": definitions}


def _collect_tables(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield table
    for name in table.model_fields:
        inner = find_table(table, (name,))
        if inner is not None:
            yield from _collect_tables(find_type(table, inner))


def _list_entries(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    arrays = (name for name in table.model_fields if get_origin(find_type(table, (name,))) is tuple)
    yield from filter(is_table, (find_type(table, (name, 0)) for name in arrays))


def _simplify(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_simplify(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _simplify(value) for key, value in schema.items()}
    options = result.get("anyOf")
    if isinstance(options, list) and {"type": "null"} in options:
        options.remove({"type": "null"})
        if len(options) == 1:
            del result["anyOf"]
            result = {**options[0], **result}
    if "default" in result and result["default"] is None:
        del result["default"]
    if "patternProperties" in result:
        result["additionalProperties"] = False
    return result


def _wrap_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """Draft 7 ignores everything next to a ``$ref``."""
    if "$ref" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "default")}
    return {"allOf": [{"$ref": schema["$ref"]}], **rest}


def _describe_table(table: type[BaseModel], schema: dict[str, Any]) -> dict[str, Any]:
    schema["description"] = _clean(inspect.getdoc(table) or "")
    texts = read_docstrings(table)
    for name, item in schema.get("properties", {}).items():
        item["description"] = texts[name]
        item.setdefault("title", name.replace("_", " ").title())
        examples = _find_examples(item)
        if examples:
            item["examples"] = examples
        schema["properties"][name] = _wrap_reference(item)
    return schema


def _find_examples(schema: Mapping[str, Any]) -> list[Any]:
    for key in ("examples", "enum"):
        if key in schema:
            return list(schema[key])
    for key in ("default", "const"):
        if key in schema:
            return [schema[key]]
    return [True] if schema.get("type") == "boolean" else []


@cache
def read_docstrings(table: type[BaseModel]) -> Mapping[str, str]:
    """Docstrings of a table's fields, as Markdown; a field without one is a bug."""
    texts: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if kind is not BaseModel and issubclass(kind, BaseModel):
            texts.update(list_field_docs(kind))
    missing = [name for name in table.model_fields if name not in texts]
    assert not missing, f"{table.__name__}: no docstring for {missing}"
    return texts


def list_field_docs(table: type) -> Iterator[tuple[str, str]]:
    if "TEXTS" in vars(table):
        yield from ((key, _clean(text)) for key, text in vars(table)["TEXTS"].items())
        return
    body = ast.parse(inspect.getsource(table)).body[0]
    assert isinstance(body, ast.ClassDef)
    for item, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            yield item.target.id, _clean(following.value.value)


def _clean(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """What the reference and the editors say of a key."""

    text: str
    """The meaning of the key, in Markdown."""
    values: str
    """The values that may be written, such as ``a whole number``."""
    default: str | None
    """The default as TOML; None where there is none."""
    is_required: bool
    examples: tuple[str, ...]
    """Values as TOML."""


def list_keys(root: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys, tables first, with `EVERY_ITEM` and `EVERY_NAME` for items and names."""
    for name in list_known_keys(root, path):
        key = (*path, name)
        yield key
        inner = find_table(root, key)
        if inner is not None:
            yield from list_keys(root, inner)


def find_table(root: type[BaseModel], key: KeyPath) -> KeyPath | None:
    """The path of the table at ``key``, or of every one in it; None if there is none."""
    paths = (key, (*key, EVERY_NAME), (*key, EVERY_ITEM))
    return next((path for path in paths if is_table(find_type(root, path))), None)


def describe_field(root: type[BaseModel], path: KeyPath) -> FieldDoc | None:
    """Facts about the key at ``path`` of a document; None if there is no such key."""
    kind = find_type(root, path)
    if kind is None or not path:
        return None
    number = len(path)
    while number > 1 and find_field(root, path[:number]) is None:
        number -= 1  # an array's entry, or a name of the user's
    field = find_field(root, path[:number])
    if field is None:
        return None
    table = find_type(root, path[: number - 1])
    text = read_docstrings(table)[str(path[number - 1])]
    quantity = find_quantity(field)
    examples = field.examples or () if quantity is None else quantity["examples"]
    whole = number == len(path)
    is_derived = root is Plan and format_path(path) in DERIVED
    default = field.get_default() if whole and not field.is_required() else None
    return FieldDoc(
        text=f"{text} Derived if it is not stated." if is_derived else text,
        values=_describe_values(kind) if quantity is None else "a quantity with its unit",
        default=None if default is None or isinstance(default, BaseModel) else write_value(default),
        is_required=whole and field.is_required() and not is_derived,
        examples=tuple(map(write_value, examples)) if whole else (),
    )


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _describe_values(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(write_value(item) for item in get_args(kind))
    if is_table(kind):
        return f"a table with the keys {', '.join(kind.model_fields)}"
    if get_origin(kind) is tuple:
        return "an array"
    if get_origin(kind) is dict:
        return "a table"
    return _WORDS.get(kind, "a value")


_PART = re.compile(
    r"""\.?(?:(?P<plain>[\w-]+|\*)|"(?P<quoted>[^"]*)"|\[(?P<index>\d{1,9}|\*)?\])"""
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    path: KeyPath
    kind: Kind
    """The document that the value belongs to."""
    value: Any
    """Plain value as in TOML; None where the documents say nothing and there is no default."""
    steps: tuple[Step, ...]
    """The places that state the value, the weakest first; empty for a default."""
    doc: FieldDoc | None
    costs: tuple[str, ...] = ()


def parse_path(text: str) -> KeyPath:
    """Split ``layers.overrides[0].hot`` or ``units."a.b"``; ``[]`` and ``*`` mean every one."""
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
    return name is not None and any(name in model.model_fields for model in WRITTEN.values())


def describe_path(text: str) -> list[Explanation]:
    """What the key ``text`` means, in every kind of document that has it."""
    path = parse_path(text)
    found = []
    for kind in DOCUMENTS:
        owner, own = _find_document(kind, path)
        doc = describe_field(WRITTEN[owner], own)
        if doc is not None:
            found.append(Explanation(path=own, kind=owner, value=None, steps=(), doc=doc))
    if not found:
        raise _report_unknown(text, path, "plan")
    return found


def _find_document(kind: Kind, path: KeyPath) -> tuple[Kind, KeyPath]:
    if kind == "plan" and len(path) > 1 and path[0] in ("device", "model"):
        other: Kind = "device" if path[0] == "device" else "model"
        return other, path[1:]
    if kind == "plan" and len(path) > 1 and path[0] == "layers" and isinstance(path[1], int):
        return kind, (path[0], *path[2:])
    return kind, path


def explain_values(report: Report, kind: Kind, text: str) -> list[Explanation]:
    """Explain the values at ``text``, else the key; UserError P019 for unknown keys."""
    path = parse_path(text)
    owner, own = _find_document(kind, path)
    if EVERY_ITEM not in own and EVERY_NAME not in own:
        return [explain_value(report, kind, path)]
    source = report.files.get(owner)
    before = path[: len(path) - len(own)]
    values = None if source is None else _dump(report, owner, source.values)
    items = [explain_value(report, kind, (*before, *item)) for item in _expand_path(values, own)]
    return items or describe_path(text)


def _expand_path(values: Any, path: KeyPath) -> Iterator[KeyPath]:
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
    owner, own = _find_document(kind, path)
    resolved = report.resolved
    if owner == "plan" and len(path) > 1 and path[0] == "layers" and isinstance(path[1], int):
        own = _find_layer(report, path) if resolved is not None else own
    doc = describe_field(WRITTEN[owner], own)
    if doc is None:
        raise _report_unknown(format_path(path), own, owner)
    source = report.files.get(owner)
    value = None if source is None else look_up(_dump(report, owner, source.values), own)
    costs: tuple[str, ...] = ()
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
    document: Document | None = report.document
    if report.resolved is not None:
        document = getattr(report.resolved, kind)
    if not isinstance(document, DOCUMENTS[kind]):
        return values
    return document.model_dump(mode="json", exclude_none=True)


def _find_layer(report: Report, path: KeyPath) -> KeyPath:
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
        known = list_known_keys(WRITTEN[kind], path[: end - 1])
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
    for step in reversed(steps):
        shown = write_value(step.value)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        yield f"{step.place}: {step.verb} {shown}"
