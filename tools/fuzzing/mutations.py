"""Spoils bytes, JSON documents and texts at random."""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    31,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e-9,
    -1.5,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "a",
    "0",
    "\0",
    "\ud800",
    "../../etc/passwd",
    "x" * 5000,
    [],
    {},
    [0],
    [[]],
    [1, "a", None],
    {"a": {}},
)
"""Values that somebody may not have thought of."""
_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**48, 2**63, 2**64 - 1)


def spoil_bytes(random: Random, data: bytes, *, first: int = 0, last: int | None = None) -> bytes:
    """``data`` with one to four changes between ``first`` and ``last``."""
    result = bytearray(data)
    end = len(data) if last is None else last
    for _ in range(random.randint(1, 4)):
        place = random.randint(first, max(first, min(end, len(result)) - 1))
        kind = random.randrange(6)
        if kind == 0 and place < len(result):
            result[place] ^= 1 << random.randrange(8)
        elif kind == 1 and place < len(result):
            result[place] = random.randrange(256)
        elif kind == 2:
            form = random.choice(("<I", "<Q"))
            number = random.choice(_NUMBERS) & ((1 << 8 * struct.calcsize(form)) - 1)
            piece = struct.pack(form, number)
            result[place : place + len(piece)] = piece
        elif kind == 3:
            del result[place : place + random.randint(1, 40)]
        elif kind == 4:
            result[place:place] = result[place : place + random.randint(1, 40)]
        elif random.randrange(4) == 0:
            del result[place:]
    return bytes(result)


def list_places(value: object, before: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of everything in a JSON document."""
    items: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:20]))
    found = [before] if before else []
    for key, item in items:
        found += list_places(item, (*before, key))
    return found


def spoil_document(random: Random, document: Any, more: Sequence[Any] = ()) -> Any:
    """A copy of a JSON document in which one to three values are others: nasty ones, those of
    ``more``, or values from another place; or are gone."""
    result: Any = copy.deepcopy(document)
    for _ in range(random.randint(1, 3)):
        places = list_places(result)
        if not places:
            return result
        *path, last = random.choice(places)
        holder: Any = result
        for key in path:
            holder = holder[key]
        kind = random.randrange(10)
        if kind == 0:
            del holder[last]
        elif kind == 1:
            source: Any = result
            for step in random.choice(places):
                if isinstance(source, dict):
                    source = source[step]
                elif isinstance(source, list):
                    source = source[int(step)]
            holder[last] = copy.deepcopy(source)
        elif kind <= 3 and more:
            holder[last] = copy.deepcopy(random.choice(more))
        elif kind == 4 and isinstance(holder[last], (int, float)) and abs(holder[last]) < 1e300:
            factor = random.choice((-1, 2, 0.5, 1024, 1 / 3))
            holder[last] = type(holder[last])(holder[last] * factor)
        else:
            holder[last] = copy.deepcopy(random.choice(NASTY))
    return result


def spoil_text(random: Random, text: str, pieces: Sequence[str]) -> str:
    """``text`` with one to five changes: ``pieces`` put in, stretches removed or moved."""
    for _ in range(random.randint(1, 5)):
        place = random.randint(0, len(text))
        kind = random.randrange(3)
        if kind == 0:
            text = text[:place] + random.choice(pieces) + text[place:]
        elif kind == 1:
            text = text[:place] + text[place + random.randint(1, 30) :]
        else:
            start = random.randint(0, len(text))
            text = text[:place] + text[start : start + random.randint(1, 60)] + text[place:]
    return text
