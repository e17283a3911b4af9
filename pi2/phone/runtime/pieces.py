"""What happens to a text before it becomes tokens: normalisers, and cutting it into words."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import pairwise
from typing import Any, TypeVar, cast

from pi2.tokens.table_tokenizer import map_bytes


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
"""Places of letters, marks, numbers, punctuation, symbols and separators."""
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}


_GROUP = re.compile(r"\((\?(:|i:|=|!|>|<=|<!))?(?!\?)")
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
            found = _GROUP.match(expression, place)
            if found is None:
                raise Unsupported(f"the group at character {place} of {expression!r}")
            out.append(found.group())
            place = found.end()
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
    """Characters of a Unicode category such as ``L`` or ``Nd``; raises `Unsupported`."""
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
    if not ranges:
        raise Unsupported("a class of no characters")
    parts = []
    for first, last in ranges:
        parts.append(f"\\U{first:08x}" if first == last else f"\\U{first:08x}-\\U{last:08x}")
    return "".join(parts)


Value = TypeVar("Value")
Change = Callable[[str], str]
Cut = Callable[[list[str], bool], list[str]]
"""Takes pieces, and whether the first of them begins the text."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts text into words (Radford et al. 2019)."""
WHITE = "".join(chr(code) for first, last in SPACES for code in range(first, last + 1))
"""Characters to strip around a text."""


def read_pattern(pattern: Mapping[str, str]) -> re.Pattern[str]:
    """Return what ``{"String": ...}`` or ``{"Regex": ...}`` finds."""
    if "String" in pattern:
        return re.compile(re.escape(pattern["String"]))
    return translate(pattern["Regex"])


def make_change(rule: Mapping[str, Any] | None) -> Change:
    """Return a normaliser; raises `Unsupported`."""
    if rule is None:
        return lambda text: text
    kind = rule["type"]
    if kind == "Sequence":
        return chain([make_change(item) for item in rule["normalizers"]])
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        form = cast("Any", kind)
        return lambda text: unicodedata.normalize(form, text)
    if kind == "Lowercase":
        return lambda text: "".join(char.lower() for char in text)
    if kind == "Prepend":
        start = str(rule["prepend"])
        return lambda text: start + text if text else text
    if kind == "Replace":
        found, content = read_pattern(rule["pattern"]), str(rule["content"])
        return lambda text: found.sub(lambda _: content, text)
    if kind == "Strip":
        left, right = rule["strip_left"], rule["strip_right"]
        return lambda text: _strip(text, left, right)
    raise Unsupported(f"the normaliser {kind}")


def _strip(text: str, left: bool, right: bool) -> str:
    text = text.lstrip(WHITE) if left else text
    return text.rstrip(WHITE) if right else text


def chain(steps: Sequence[Callable[[Value], Value]]) -> Callable[[Value], Value]:
    """Return what takes one step after the other."""
    return lambda value: reduce(lambda found, step: step(found), steps, value)


def make_cut(rule: Mapping[str, Any] | None) -> Cut:
    """Return what cuts pieces into words; raises `Unsupported`."""
    if rule is None:
        return lambda pieces, first: pieces
    kind = rule["type"]
    if kind == "Sequence":
        cuts = [make_cut(item) for item in rule["pretokenizers"]]
        return lambda pieces, first: reduce(lambda found, cut: cut(found, first), cuts, pieces)
    if kind == "Split":
        found = read_pattern(rule["pattern"])
        behaviour, inverted = str(rule["behavior"]), bool(rule.get("invert"))
        if behaviour not in _BEHAVIOURS:
            raise Unsupported(f"the behaviour {behaviour} of a split")
        return lambda pieces, first: _split_all(pieces, found, behaviour, inverted)
    if kind == "Digits":
        found = translate(r"\p{N}")
        behaviour = "Isolated" if rule["individual_digits"] else "Contiguous"
        return lambda pieces, first: _split_all(pieces, found, behaviour, False)
    if kind == "ByteLevel":
        return _make_byte_level(rule)
    if kind == "Metaspace":
        return _make_metaspace(rule)
    raise Unsupported(f"the pre-tokenizer {kind}")


def _make_byte_level(rule: Mapping[str, Any]) -> Cut:
    spaced = bool(rule.get("add_prefix_space"))
    words = translate(_GPT2) if rule.get("use_regex", True) else None
    characters = map_bytes()

    def cut(pieces: list[str], first: bool) -> list[str]:
        del first
        if spaced:
            pieces = [piece if piece.startswith(" ") else f" {piece}" for piece in pieces]
        if words is not None:
            pieces = _split_all(pieces, words, "Isolated", False)
        return ["".join([characters[byte] for byte in piece.encode()]) for piece in pieces]

    return cut


def find_scheme(rule: Mapping[str, Any]) -> str:
    """When a mark is put before a piece: ``always``, ``first`` or ``never``."""
    usual = "always" if rule.get("add_prefix_space", True) else "never"  # of older versions
    return str(rule.get("prepend_scheme") or usual)


def _make_metaspace(rule: Mapping[str, Any]) -> Cut:
    mark, scheme = str(rule["replacement"]), find_scheme(rule)
    splits = bool(rule.get("split", True))
    found = re.compile(re.escape(mark))

    def cut(pieces: list[str], first: bool) -> list[str]:
        made = []
        for place, piece in enumerate(pieces):
            marked = piece.replace(" ", mark)
            leads = scheme == "always" or (scheme == "first" and first and place == 0)
            if leads and not marked.startswith(mark):
                marked = mark + marked
            made.append(marked)
        return _split_all(made, found, "MergedWithNext", False) if splits else made

    return cut


_BEHAVIOURS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")


def _split_all(
    pieces: list[str], found: re.Pattern[str], behaviour: str, inverted: bool
) -> list[str]:
    return [
        part
        for piece in pieces
        for part in _join(list(_divide(piece, found, inverted)), behaviour)
        if part
    ]


def _divide(text: str, found: re.Pattern[str], inverted: bool) -> Iterator[tuple[str, bool]]:
    end = 0
    for match in found.finditer(text):
        if match.start() > end:
            yield text[end : match.start()], inverted
        yield match.group(), not inverted
        end = match.end()
    if end < len(text):
        yield text[end:], inverted


def _join(parts: list[tuple[str, bool]], behaviour: str) -> list[str]:
    if behaviour == "Isolated":
        return [text for text, _ in parts]
    if behaviour == "Removed":
        return [text for text, matches in parts if not matches]
    joined: list[str] = []
    before = False
    if behaviour == "Contiguous":
        for place, (text, matches) in enumerate(parts):
            if place and matches == before:
                joined[-1] += text
            else:
                joined.append(text)
            before = matches
        return joined
    backwards = behaviour == "MergedWithNext"
    for text, matches in reversed(parts) if backwards else parts:
        if matches and joined and not before:
            joined[-1] = text + joined[-1] if backwards else joined[-1] + text
        else:
            joined.append(text)
        before = matches
    return joined[::-1] if backwards else joined
