"""JSON Schemas of the three documents, for editors: draft 7, and of it what all editors know.

No ``prefixItems``, no keyword beside ``$ref``, no null (TOML has none); every key has a title, a
description (its docstring in the model) and examples.  A document that extends others may leave out
anything but its version, also inside of tables, so only entries of arrays have required keys there;
`pi2 validate` misses what is missing.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel

from pi2.plan.documents.common import Document
from pi2.plan.documents.device import Device
from pi2.plan.documents.fields import find_type
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan

_DRAFT = "http://json-schema.org/draft-07/schema#"
_KINDS: Mapping[str, type[Document]] = {"plan": Plan, "device": Device, "model": Model}


def make_schemas() -> dict[str, str]:
    """Texts of the schema files by file name."""
    return {
        f"{kind}.schema.json": json.dumps(make_schema(document), indent=2, ensure_ascii=False)
        + "\n"
        for kind, document in _KINDS.items()
    }


def make_schema(document: type[Document]) -> dict[str, Any]:
    """The schema of one document."""
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
    own = [name for name in body["required"] if name != "schema_version"]
    body["required"] = ["schema_version"]
    body["anyOf"] = [{"required": ["extends"]}, {"required": own}]
    return {"$schema": _DRAFT, **body, "definitions": definitions}


def _collect_tables(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The table and every table below it."""
    yield table
    for name in table.model_fields:
        kind = find_type(table, (name,))
        if get_origin(kind) is dict:
            kind = find_type(table, (name, ""))
        elif get_origin(kind) is tuple:
            kind = find_type(table, (name, 0))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _collect_tables(kind)


def _list_entries(table: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Tables that are entries of the table's arrays."""
    for name in table.model_fields:
        if get_origin(find_type(table, (name,))) is tuple:
            kind = find_type(table, (name, 0))
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield kind


def _simplify(schema: Any) -> Any:
    """Leave out null, and keys that no pattern allows."""
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
    """Draft 7 ignores whatever stands beside a ``$ref``."""
    if "$ref" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "default")}
    return {"allOf": [{"$ref": schema["$ref"]}], **rest}


def _describe_table(table: type[BaseModel], schema: dict[str, Any]) -> dict[str, Any]:
    """Add descriptions from docstrings, and examples."""
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
    """Names and docstrings, as Markdown, of the fields that a class itself declares."""
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
    """One paragraph, with Markdown's backticks and emphasis."""
    return " ".join(text.split()).replace("``", "`")
