"""What happens to a text before it becomes tokens: normalisers, and cutting it into words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from pi2.phone.tokenizing.patterns import SPACES, Unsupported, translate

Change = Callable[[str], str]
Cut = Callable[[list[str], bool], list[str]]
"""Takes pieces, and whether the first of them begins the text."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts text into words (Radford et al. 2019)."""
WHITE = "".join(chr(code) for first, last in SPACES for code in range(first, last + 1))
"""What is taken away around a text."""


def map_bytes() -> list[str]:
    """The character that stands for each byte: itself where it can be seen, else one from 256 on
    (Radford et al. 2019)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in seen}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


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
        return _chain([make_change(item) for item in rule["normalizers"]])
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


def _chain(changes: list[Change]) -> Change:
    def change(text: str) -> str:
        for step in changes:
            text = step(text)
        return text

    return change


def make_cut(rule: Mapping[str, Any] | None) -> Cut:
    """Return what cuts pieces into words; raises `Unsupported`."""
    if rule is None:
        return lambda pieces, first: pieces
    kind = rule["type"]
    if kind == "Sequence":
        return _chain_cuts([make_cut(item) for item in rule["pretokenizers"]])
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


def _chain_cuts(cuts: list[Cut]) -> Cut:
    def cut(pieces: list[str], first: bool) -> list[str]:
        for step in cuts:
            pieces = step(pieces, first)
        return pieces

    return cut


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


def _make_metaspace(rule: Mapping[str, Any]) -> Cut:
    mark = str(rule["replacement"])
    scheme = rule.get("prepend_scheme")
    if scheme is None:  # files of older versions
        scheme = "always" if rule.get("add_prefix_space", True) else "never"
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
    """Parts of a text, and whether each is a match."""
    end = 0
    for match in found.finditer(text):
        if match.start() > end:
            yield text[end : match.start()], inverted
        yield match.group(), not inverted
        end = match.end()
    if end < len(text):
        yield text[end:], inverted


def _join(parts: list[tuple[str, bool]], behaviour: str) -> list[str]:
    """Parts as a behaviour wants them."""
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
