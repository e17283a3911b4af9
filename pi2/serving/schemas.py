"""JSON schemas as plain alternatives: references, unions and intersections are worked out."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pi2.serving.literals import Schema, name_type

_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
_UNIONS = ("anyOf", "oneOf")
_JOINED = ("$ref", "allOf", *_UNIONS)
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_NAMED_BY: Mapping[str, Sequence[str]] = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""What says of a schema without a type which one is meant."""
_KINDS: Mapping[type, Sequence[str]] = {
    dict: ("properties", "patternProperties"),
    list: ("required", "enum", "prefixItems", *_JOINED[1:]),
    str: ("$ref", "pattern", "format"),
    int: ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
}
"""What keys of a schema must have."""
_PARTS = frozenset({"type", "enum", *(key for keys in _NAMED_BY.values() for key in keys)})
_MOST_ALTERNATIVES = 256
_MOST_REFERENCES = 32


def list_alternatives(root: Schema, schema: Any) -> list[dict[str, Any]]:
    """What a value of ``schema`` may be: schemas of one ``type`` or an ``enum``, without references
    and unions.  ``root`` is what references are into.  ValueError for what cannot be kept to."""
    found: list[dict[str, Any]] = []
    for node in _expand(root, schema, _MOST_REFERENCES):
        types = _list_types(node)
        if "enum" in node:
            values = [value for value in node["enum"] if _fits(node, types, value)]
            plains: list[dict[str, Any]] = [{"enum": values}] if values else []
            rest = {key: part for key, part in node.items() if key != "enum"}
            for value in node["enum"]:
                if isinstance(value, (list, dict)):
                    both = {"allOf": [rest, _describe_value(value)]}
                    plains += list_alternatives(root, both)
        else:
            plains = [{**node, "type": kind} for kind in types]
        found += [plain for plain in plains if plain not in found]
    return found


def _list_types(node: Schema) -> Sequence[str]:
    stated = node.get("type")
    if stated is None:
        meant = [kind for kind, keys in _NAMED_BY.items() if any(key in node for key in keys)]
        return meant if meant and "enum" not in node else _TYPES
    found = [stated] if isinstance(stated, str) else stated
    for kind in found:
        if kind not in (*_TYPES, "integer"):
            raise ValueError(f"{kind!r} is no type")
    return list(found)


def _expand(root: Schema, schema: Any, depth: int) -> list[dict[str, Any]]:
    """The alternatives of a schema, each without references and unions."""
    if schema is None or isinstance(schema, bool):
        return [{}] if schema is not False else []
    if not isinstance(schema, Mapping):
        raise ValueError(f"a schema is an object, not {schema!r}")
    for key in _UNSUPPORTED:
        if key in schema:
            raise ValueError(f"'{key}' is not supported")
    if depth < 0:
        raise ValueError("references go round in a circle")
    for kind, keys in _KINDS.items():
        for key in schema.keys() & keys:
            if not isinstance(schema[key], kind) or schema[key] is True:
                raise ValueError(f"'{key}' cannot be {schema[key]!r}")
    for key in schema.keys() & _NAMED_BY["number"]:
        if isinstance(schema[key], bool) or not isinstance(schema[key], (int, float)):
            raise ValueError(f"'{key}' cannot be {schema[key]!r}")
    own = {key: value for key, value in schema.items() if key in _PARTS}
    if own.pop("uniqueItems", False) is not False:
        raise ValueError("'uniqueItems' is not supported")
    if "const" in schema:
        own["enum"] = _list_common([schema["const"]], own.get("enum", [schema["const"]]))
    if schema.get("unevaluatedProperties") is False:
        own.setdefault("additionalProperties", False)
    if "patternProperties" in own and not own["patternProperties"]:
        del own["patternProperties"]
    groups = [_expand(root, part, depth - 1) for part in schema.get("allOf") or ()]
    if "$ref" in schema:
        groups.append(_expand(root, find_part(root, schema["$ref"]), depth - 1))
    for key in _UNIONS:
        if schema.get(key):
            groups.append([one for part in schema[key] for one in _expand(root, part, depth - 1)])
    found: list[dict[str, Any]] = [own]
    for group in groups:
        if len(found) * len(group) > _MOST_ALTERNATIVES:
            raise ValueError("its unions have too many combinations")
        both = [_intersect(one, other) for one in found for other in group]
        found = [one for one in both if one is not None]
    if schema.get("nullable") is True:
        found.append({"type": "null"})
    return found


def find_part(root: Schema, reference: Any) -> Any:
    """The part of ``root`` that a ``$ref`` names; ValueError if there is none."""
    place: Any = root
    pointer = str(reference)
    for part in pointer.removeprefix("#").strip("/").split("/") if pointer.strip("#/") else ():
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        elif pointer.startswith("#") and isinstance(place, Mapping) and part in place:
            place = place[part]
        else:
            raise ValueError(f"{reference!r} is no part of it")
    return place


_HIGHER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_LOWER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_NESTED = ("items", "additionalProperties", "propertyNames")


def _intersect(one: Schema, other: Schema) -> dict[str, Any] | None:
    """A schema of the values of both; None if it is known that there are none."""
    found = {**one, **other}
    join: dict[str, Callable[[Any, Any], Any]] = {
        "type": _join_types,
        "enum": _list_common,
        "required": lambda mine, theirs: [*mine, *(name for name in theirs if name not in mine)],
        "patternProperties": lambda mine, theirs: {
            key: _join_schemas(mine.get(key), theirs.get(key)) for key in {**mine, **theirs}
        },
        **dict.fromkeys(_HIGHER, max),
        **dict.fromkeys(_LOWER, min),
        **dict.fromkeys(_NESTED, _join_schemas),
    }
    for key in one.keys() & other.keys() - {"properties"}:
        if one[key] == other[key]:
            continue
        if key not in join:
            raise ValueError(f"two values of '{key}' for one value are not supported")
        found[key] = join[key](one[key], other[key])
    if found.get("type") == [] or found.get("enum") == []:
        return None
    for closed in (one, other):
        if closed.get("additionalProperties") is False and "patternProperties" in found:
            kept = closed.get("patternProperties") or {}
            patterns = found["patternProperties"].items()
            found["patternProperties"] = {key: part for key, part in patterns if key in kept}
    mine, theirs = one.get("properties") or {}, other.get("properties") or {}
    if mine or theirs:
        found["properties"] = {
            key: _join_schemas(
                mine[key] if key in mine else one.get("additionalProperties"),
                theirs[key] if key in theirs else other.get("additionalProperties"),
            )
            for key in {**mine, **theirs}
        }
    return found


def _list_common(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """The values of both lists; 1 is not ``true``."""
    kinds = [(isinstance(value, bool), value) for value in other]
    return [value for value in one if (isinstance(value, bool), value) in kinds]


def _join_types(one: Any, other: Any) -> list[str]:
    mine, theirs = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    found = [kind for kind in mine if kind in theirs]
    if "integer" not in found and {"integer", "number"} <= {*mine, *theirs}:
        found += ["integer"] if "integer" in mine or "integer" in theirs else []
    return found


def _join_schemas(one: Any, other: Any) -> Any:
    parts = [part for part in (one, other) if part is not None and part is not True]
    if any(part is False for part in parts):
        return False
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _fits(node: Schema, types: Sequence[str], value: Any) -> bool:
    """Whether a value that is listed is one of the types, and within stated limits."""
    kind = name_type(value)
    if kind in ("array", "object"):
        return False  # they are described
    if kind not in types and not (kind == "integer" and "number" in types):
        return False
    if kind in ("integer", "number"):
        return (
            node.get("minimum", value) <= value <= node.get("maximum", value)
            and not value <= node.get("exclusiveMinimum", value - 1)
            and not value >= node.get("exclusiveMaximum", value + 1)
        )
    if kind == "string":
        pattern = node.get("pattern")
        is_long = len(value) < node.get("minLength", 0) or len(value) > node.get("maxLength", 1e9)
        return not is_long and (pattern is None or re.search(pattern, value) is not None)
    return True


def _describe_value(value: Any) -> dict[str, Any]:
    """The schema of one list or object."""
    if isinstance(value, list):
        count = len(value)
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
    properties = {key: {"const": item} for key, item in value.items()}
    closed = {"additionalProperties": False, "required": list(value)}
    return {"type": "object", "properties": properties, **closed}


def list_properties(plain: Schema) -> list[tuple[str, Any, bool]]:
    """The properties that an object states: names, schemas, and whether each is needed."""
    stated, required = plain.get("properties") or {}, plain.get("required") or ()
    found = []
    for name in dict.fromkeys([*stated, *required]):
        patterns = (plain.get("patternProperties") or {}).items()
        parts = [part for pattern, part in patterns if re.search(pattern, name) is not None]
        if name in stated or not parts:
            parts.append(stated.get(name, plain.get("additionalProperties", True)))
        found.append((name, {"allOf": parts} if len(parts) > 1 else parts[0], name in required))
    return found


def list_parameter_types(tool: Mapping[str, Any] | None, name: str) -> list[str]:
    """The types that a parameter of ``tool`` (OpenAI's ``function`` object) may have, in the order
    of its schema; empty if it does not say."""
    root = (tool or {}).get("parameters") or {}
    found: dict[str, None] = {}
    try:
        for plain in _list_readable(root, {"type": "object", **root}):
            stated = plain.get("properties") or {}
            own = {key: stated[key] for key in stated if key == name}
            ((_, schema, _),) = list_properties({**plain, "properties": own, "required": [name]})
            kinds: list[str] = []
            for part in _list_readable(root, schema):
                kinds += map(name_type, part["enum"]) if "enum" in part else [part["type"]]
            if not set(kinds) >= set(_TYPES):
                found |= dict.fromkeys(kinds)
    except (ValueError, TypeError, AttributeError, re.error):
        return []  # it is no schema
    return list(found)


def _list_readable(root: Schema, schema: Any) -> list[dict[str, Any]]:
    """`list_alternatives`; a schema that cannot be kept to by its stated types, known or not."""
    try:
        return list_alternatives(root, schema)
    except ValueError:
        stated = schema.get("type", ())
        kinds = [stated] if isinstance(stated, str) else stated
        return [{**schema, "type": kind} for kind in kinds]
