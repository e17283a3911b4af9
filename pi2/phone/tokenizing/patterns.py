"""Regular expressions of tokenizers (Oniguruma's syntax) as Python's `re` takes them.

Classes of characters are written out: `re` knows no ``\\p{L}``, and calls a few control characters
spaces that Unicode does not.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import pairwise


class Unsupported(ValueError):
    """A tokenizer uses what this reader does not know; the text says what."""


Ranges = tuple[tuple[int, int], ...]
"""Characters: first and last of each range, ascending."""

SPACES: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680)),
    *((0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
"""Unicode's White_Space."""
_LAST = 0x10FFFF
_PLANES = (range(0x40000), range(0xE0000, 0xE1000))
"""Where there are letters, marks, numbers, punctuation, symbols and separators."""
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}


_ANCHORS = {r"\A": r"\A", r"\z": r"\Z"}
"""Beginning and end of a text, and what `re` calls them."""


def translate(expression: str) -> re.Pattern[str]:
    """Return the same expression for `re`; raises `Unsupported`."""
    out, place = [], 0
    while place < len(expression):
        char = expression[place]
        if expression[place : place + 2] in _ANCHORS:
            out.append(_ANCHORS[expression[place : place + 2]])
            place += 2
        elif char == "\\":
            ranges, place = _read_escape(expression, place)
            out.append(f"[{_write(ranges)}]")
        elif char == "[":
            ranges, place = _read_class(expression, place)
            out.append(f"[{_write(ranges)}]")
        elif char == "(":
            end = _find_group(expression, place)
            out.append(expression[place:end])
            place = end
        elif char == "}" and expression[place + 1 : place + 2] == "+":
            raise Unsupported(f"the repetition at character {place} of {expression!r}")
        elif char in ".^$":
            raise Unsupported(f"{char!r} in the expression {expression!r}")
        else:
            out.append(char)
            place += 1
    try:
        return re.compile("".join(out))
    except re.error as error:
        raise Unsupported(f"the expression {expression!r}: {error}") from None


_GROUP = re.compile(r"\((\?(:|i:|=|!|>|<=|<!))?(?!\?)")


def _find_group(expression: str, place: int) -> int:
    """Where the beginning of a group ends."""
    found = _GROUP.match(expression, place)
    if found is None:
        raise Unsupported(f"the group at character {place} of {expression!r}")
    return found.end()


def _read_class(expression: str, place: int) -> tuple[Ranges, int]:
    """Characters of ``[...]``, and where it ends."""
    begin, place = place, place + 1
    negated = expression[place : place + 1] == "^"
    place += negated
    parts: list[tuple[int, int]] = []
    limit: Ranges = ((0, _LAST),)
    while place < len(expression):
        char = expression[place]
        if char == "]" and place > begin + 1 + negated:
            ranges = _intersect(limit, _unite(parts))
            return (_invert(ranges) if negated else ranges), place + 1
        if expression[place : place + 2] == "&&":
            limit, parts, place = _intersect(limit, _unite(parts)), [], place + 2
            continue
        if char == "[":
            if expression[place + 1 : place + 2] == ":":
                raise Unsupported(f"a named class in {expression!r}")
            ranges, place = _read_class(expression, place)
            parts += ranges
            continue
        if char == "\\":
            ranges, place = _read_escape(expression, place)
        else:
            ranges, place = ((ord(char), ord(char)),), place + 1
        single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        after = expression[place : place + 2]
        if single and after[:1] == "-" and after != "-]" and len(after) == 2:
            if after[1] == "\\":
                last, place = _read_escape(expression, place + 1)
            else:
                last, place = ((ord(after[1]), ord(after[1])),), place + 2
            if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < ranges[0][0]:
                raise Unsupported(f"a range in {expression!r}")
            ranges = ((ranges[0][0], last[0][0]),)
        parts += ranges
    raise Unsupported(f"a class without an end in {expression!r}")


_CATEGORY = re.compile(r"\\([pP])\{(\^?)([A-Z][a-z]?)\}")
_NUMBER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\x\{([0-9A-Fa-f]{1,6})\}|\\u([0-9A-Fa-f]{4})")


def _read_escape(expression: str, place: int) -> tuple[Ranges, int]:
    """Characters of ``\\...``, and where it ends."""
    found = _CATEGORY.match(expression, place)
    if found is not None:
        ranges = find_category(found[3])
        negated = (found[1] == "P") != bool(found[2])
        return (_invert(ranges) if negated else ranges), found.end()
    found = _NUMBER.match(expression, place)
    if found is not None:
        code = int(found[1] or found[2] or found[3], 16)
        return ((code, code),), found.end()
    char = expression[place + 1 : place + 2]
    if char in ("s", "S"):
        return (SPACES if char == "s" else _invert(SPACES)), place + 2
    if char in ("d", "D"):
        digits = find_category("Nd")
        return (digits if char == "d" else _invert(digits)), place + 2
    if char in _PLAIN_ESCAPES:
        char = _PLAIN_ESCAPES[char]
    elif not char or char.isalnum():
        raise Unsupported(f"\\{char} in the expression {expression!r}")
    return ((ord(char), ord(char)),), place + 2


@cache
def find_category(name: str) -> Ranges:
    """Characters of a general category of Unicode, such as ``L`` or ``Nd``, as Python's version of
    Unicode has them; raises `Unsupported`."""
    if name[0] not in "LMNPSZ":
        raise Unsupported(f"the category {name!r}")
    category, found = unicodedata.category, list[tuple[int, int]]()
    for plane in _PLANES:
        codes = [code for code in plane if category(chr(code)).startswith(name)]
        bounds = [place for place, (a, b) in enumerate(pairwise(codes), 1) if b > a + 1]
        for start, stop in pairwise([0, *bounds, len(codes)]) if codes else ():
            found.append((codes[start], codes[stop - 1]))
    return tuple(found)


def _unite(parts: list[tuple[int, int]]) -> Ranges:
    united: list[tuple[int, int]] = []
    for first, last in sorted(parts):
        if united and first <= united[-1][1] + 1:
            united[-1] = (united[-1][0], max(last, united[-1][1]))
        else:
            united.append((first, last))
    return tuple(united)


def _invert(ranges: Ranges) -> Ranges:
    gaps = []
    begin = 0
    for first, last in ranges:
        if first > begin:
            gaps.append((begin, first - 1))
        begin = last + 1
    return (*gaps, (begin, _LAST)) if begin <= _LAST else tuple(gaps)


def _intersect(ranges: Ranges, others: Ranges) -> Ranges:
    return _invert(_unite([*_invert(ranges), *_invert(others)]))


def _write(ranges: Ranges) -> str:
    """The inside of a class for `re`."""
    if not ranges:
        raise Unsupported("a class of no characters")
    parts = []
    for first, last in ranges:
        parts.append(f"\\U{first:08x}" if first == last else f"\\U{first:08x}-\\U{last:08x}")
    return "".join(parts)
