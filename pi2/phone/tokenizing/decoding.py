"""From the texts of tokens to text: decoders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pi2.phone.tokenizing.patterns import Unsupported
from pi2.phone.tokenizing.pieces import map_bytes, read_pattern

Decode = Callable[[list[str]], list[str]]
"""Takes the texts of tokens; what it returns is joined at the end."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def make_decoder(rule: Mapping[str, Any] | None) -> Decode:
    """Return a decoder; raises `Unsupported`."""
    if rule is None:
        return lambda texts: [" ".join(texts)]
    kind = rule["type"]
    if kind == "Sequence":
        return _chain([make_decoder(item) for item in rule["decoders"]])
    if kind == "ByteLevel":
        bytes_of = {char: byte for byte, char in enumerate(map_bytes())}
        return lambda texts: [_join_bytes(texts, bytes_of)]
    if kind == "Replace":
        found, content = read_pattern(rule["pattern"]), str(rule["content"])
        return lambda texts: [found.sub(lambda _: content, text) for text in texts]
    if kind == "ByteFallback":
        return _read_bytes
    if kind == "Fuse":
        return lambda texts: ["".join(texts)]
    if kind == "Strip":
        content, start, stop = str(rule["content"]), int(rule["start"]), int(rule["stop"])
        return lambda texts: [_strip(text, content, start, stop) for text in texts]
    if kind == "Metaspace":
        mark, scheme = str(rule["replacement"]), rule.get("prepend_scheme")
        if scheme is None:
            scheme = "always" if rule.get("add_prefix_space", True) else "never"
        first = " " if scheme == "never" else ""
        return lambda texts: [
            text.replace(mark, " " if place else first) for place, text in enumerate(texts)
        ]
    raise Unsupported(f"the decoder {kind}")


def _chain(steps: list[Decode]) -> Decode:
    def decode(texts: list[str]) -> list[str]:
        for step in steps:
            texts = step(texts)
        return texts

    return decode


def _join_bytes(texts: list[str], bytes_of: Mapping[str, int]) -> str:
    """Text of tokens whose characters stand for bytes; others count as they are."""
    found = bytearray()
    for text in texts:
        codes = [bytes_of.get(char) for char in text]
        known = [code for code in codes if code is not None]
        found += bytes(known) if len(known) == len(codes) else text.encode()
    return found.decode("utf-8", "replace")


def _read_bytes(texts: list[str]) -> list[str]:
    """Characters of tokens that are bytes; each byte of what is no character is U+FFFD."""
    made: list[str] = []
    held = bytearray()

    def flush() -> None:
        if held:
            try:
                made.append(held.decode("utf-8"))
            except UnicodeDecodeError:
                made.extend("\N{REPLACEMENT CHARACTER}" * len(held))
            held.clear()

    for text in texts:
        byte = _BYTE.fullmatch(text)
        if byte is None:
            flush()
            made.append(text)
        else:
            held.append(int(byte[1], 16))
    flush()
    return made


def _strip(text: str, content: str, start: int, stop: int) -> str:
    """Take up to ``start`` of ``content`` from the beginning, and ``stop`` from the end."""
    first = 0
    while first < min(start, len(text)) and text[first] == content:
        first += 1
    last = len(text)
    while last > max(first, len(text) - stop) and text[last - 1] == content:
        last -= 1
    return text[first:last]
