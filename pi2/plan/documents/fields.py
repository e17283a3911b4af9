"""Walking the document models' fields by key path: what is known where."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

MAX_COMPARED = 200
"""Names that a misspelt one is compared with: documents have fewer, hostile files may not."""


def strip_annotation(annotation: Any) -> Any:
    """The type itself, without ``Annotated`` and without ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            options = [item for item in get_args(annotation) if item is not type(None)]
            if len(options) != 1:
                return annotation
            annotation = options[0]
        else:
            return annotation


def find_type(root: type[BaseModel], path: Sequence[str | int]) -> Any:
    """Type of the value at ``path`` below ``root``; None where the models have no such path."""
    current: Any = root
    for part in path:
        current = strip_annotation(current)
        origin = get_origin(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            if field is None:
                return None
            current = field.annotation
        elif origin is dict:
            current = get_args(current)[1]
        elif origin is tuple and isinstance(part, int):
            current = get_args(current)[0]
        else:
            return None
    return strip_annotation(current)


def list_known_keys(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Names of the keys that the table at ``path`` may have; empty where any key may stand."""
    found = find_type(root, path)
    if isinstance(found, type) and issubclass(found, BaseModel):
        return list(found.model_fields)
    return []


def suggest(word: str, known: Iterable[str]) -> str | None:
    """The known name nearest to ``word``, if one is near."""
    names = {name.lower(): name for name in islice(known, MAX_COMPARED)}
    cutoff = 0.6 if len(word) > 3 else 0.7  # two letters of three are no likeness: cpu, gpu
    letters = sorted(word.lower())
    turned = [name for name in names if sorted(name) == letters]  # hto, hot
    near = turned or difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=cutoff)
    return names[near[0]] if near else None
