"""What there is to say about a key of a document: its meaning, its values, its default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from pi2.plan.authoring.json_schema import read_docstrings
from pi2.plan.documents.fields import find_type
from pi2.plan.toml.paths import EVERY_ITEM, EVERY_NAME, KeyPath
from pi2.plan.toml.text import write_value


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
    """Yield the path of every key of a document, tables before what is in them; `EVERY_ITEM` stands
    for entries of arrays, `EVERY_NAME` for names of the user's."""
    table = find_type(root, path) if path else root
    assert isinstance(table, type) and issubclass(table, BaseModel), path
    for name in table.model_fields:
        key = (*path, name)
        yield key
        inner = find_table(root, key)
        if inner is not None:
            yield from list_keys(root, inner)


def find_table(root: type[BaseModel], key: KeyPath) -> KeyPath | None:
    """Path of the table in a key, in its entries or under its names; None if there is none."""
    for path in (key, (*key, EVERY_NAME), (*key, EVERY_ITEM)):
        kind: Any = find_type(root, path)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return path
    return None


def describe_field(root: type[BaseModel], path: KeyPath) -> FieldDoc | None:
    """What is known of the key at ``path`` of a document; None where there is no such key."""
    kind = find_type(root, path)
    if kind is None or not path:
        return None
    number = len(path)
    while number > 1 and _find_field(root, path[:number]) is None:
        number -= 1  # an array's entry, or a name of the user's
    field = _find_field(root, path[:number])
    if field is None:
        return None
    table = find_type(root, path[: number - 1])
    text = read_docstrings(table)[str(path[number - 1])]
    whole = number == len(path)
    default = field.get_default() if whole and not field.is_required() else None
    return FieldDoc(
        text=text,
        values=_describe_values(kind, field),
        default=None if default is None or isinstance(default, BaseModel) else write_value(default),
        is_required=whole and field.is_required(),
        examples=tuple(write_value(item) for item in _find_examples(field)) if whole else (),
    )


def _find_field(root: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    table = find_type(root, path[:-1])
    if isinstance(table, type) and issubclass(table, BaseModel):
        return table.model_fields.get(str(path[-1]))
    return None


def _find_examples(field: FieldInfo) -> Iterable[Any]:
    schema = _find_quantity(field)
    if schema is not None:
        return list(schema.get("examples", ()))
    return field.examples or ()


def _find_quantity(field: FieldInfo) -> dict[str, Any] | None:
    """The JSON Schema of a quantity with a unit."""
    found = [*field.metadata]
    for option in get_args(field.annotation):  # Bytes | None
        found += get_args(option)[1:] if get_origin(option) is Annotated else ()
    for item in found:
        if isinstance(item, WithJsonSchema) and item.json_schema is not None:
            return dict(item.json_schema)
    return None


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _describe_values(kind: Any, field: FieldInfo) -> str:
    if _find_quantity(field) is not None:
        return "a quantity with its unit"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(write_value(item) for item in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a table with the keys {', '.join(kind.model_fields)}"
    if get_origin(kind) is tuple:
        return "an array"
    if get_origin(kind) is dict:
        return "a table"
    return _WORDS.get(kind, "a value")
