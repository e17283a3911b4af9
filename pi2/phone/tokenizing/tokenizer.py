"""A tokenizer of a ``tokenizer.json``.

Known are: byte-pair encoding and unigram; the normalisers NFC, NFD, NFKC, NFKD, Lowercase, Prepend,
Replace, Strip; the pre-tokenizers Split, Digits, ByteLevel, Metaspace; the decoders ByteLevel,
ByteFallback, Fuse, Metaspace, Replace, Strip; sequences of them; and added tokens.  That is what
Llama, Mistral, Qwen, Gemma, GPT-2, Falcon, OPT and their relatives have.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pi2.phone.tokenizing.decoding import make_decoder
from pi2.phone.tokenizing.models import make_model
from pi2.phone.tokenizing.patterns import Unsupported
from pi2.phone.tokenizing.pieces import WHITE, make_change, make_cut


@dataclass(frozen=True, slots=True)
class _Added:
    """A token that is found in the text before anything else happens."""

    token: int
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    special: bool
    normalized: bool


class Tokenizer:
    """Turns text into tokens and tokens into text."""

    def __init__(self, content: bytes) -> None:
        """Read a ``tokenizer.json``; raises `Unsupported`, or ValueError, KeyError or TypeError if
        it is none."""
        rules = json.loads(content)
        if not isinstance(rules, dict):
            raise Unsupported("a file that is no JSON object")
        _check_beginnings(rules)
        self._change = make_change(rules.get("normalizer"))
        self._cut = make_cut(rules.get("pre_tokenizer"))
        self._model = make_model(rules["model"])
        self._decode = make_decoder(rules.get("decoder"))
        added = [_read_added(item) for item in rules.get("added_tokens", ())]
        self._added = {item.content: item for item in added}
        self._texts = {token: text for text, token in self._model.vocabulary.items()}
        self._texts |= {item.token: item.content for item in added}
        self._special = frozenset(item.token for item in added if item.special)
        self._raw = [item for item in added if not item.normalized]
        self._normal = {self._change(item.content): item for item in added if item.normalized}
        self._find_raw = _compile([item.content for item in self._raw])
        self._find_normal = _compile(list(self._normal))

    def id_to_token(self, token: int) -> str | None:
        """Text of a token; None if there is no such token."""
        return self._texts.get(token)

    def get_vocab_size(self) -> int:
        """Number of tokens, added ones too."""
        return len(self._texts)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones before or after it."""
        tokens: list[int] = []
        first = True
        by_text = {item.content: item for item in self._raw}
        for piece, own in _find_added(text, self._find_raw, by_text):
            if own is not None:
                tokens.append(own.token)
            else:
                changed = self._change(piece)
                for part, other in _find_added(changed, self._find_normal, self._normal):
                    if other is not None:
                        tokens.append(other.token)
                    elif part:
                        for word in self._cut([part], first):
                            tokens += self._model.encode(word)
                    first = False
            first = False
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens, without that of special ones unless ``special``."""
        texts = [
            text
            for token in tokens
            if (special or token not in self._special)
            and (text := self._texts.get(token)) is not None
        ]
        return "".join(self._decode(texts))


def _check_beginnings(rules: dict[str, Any]) -> None:
    """`Unsupported` where the beginning of a text decides, and a normaliser takes it away: places
    in the text as it was are not kept."""
    changes, cuts = json.dumps(rules.get("normalizer")), json.dumps(rules.get("pre_tokenizer"))
    if '"prepend_scheme": "first"' in cuts and ('"Strip"' in changes or '"content": ""' in changes):
        raise Unsupported("the prepend scheme 'first' after a normaliser that takes text away")


def _read_added(item: dict[str, Any]) -> _Added:
    return _Added(
        token=int(item["id"]),
        content=str(item["content"]),
        single_word=bool(item.get("single_word")),
        lstrip=bool(item.get("lstrip")),
        rstrip=bool(item.get("rstrip")),
        special=bool(item.get("special")),
        normalized=bool(item.get("normalized")),
    )


def _compile(contents: list[str]) -> re.Pattern[str] | None:
    """What finds the leftmost of some texts, and the longest there; None of no texts."""
    known = sorted((text for text in contents if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None


def _find_added(
    text: str, found: re.Pattern[str] | None, added: dict[str, _Added]
) -> Iterator[tuple[str, _Added | None]]:
    """Pieces of a text, and the added token that each is, if it is one."""
    end = 0
    for match in () if found is None else found.finditer(text):
        own = added[match.group()]
        start, stop = match.span()
        if own.single_word and (_is_word(text[:start][-1:]) or _is_word(text[stop:][:1])):
            continue
        if own.lstrip:
            start = max(end, len(text[:start].rstrip(WHITE)))
        if own.rstrip:
            stop += len(text[stop:]) - len(text[stop:].lstrip(WHITE))
        if start < end:
            continue
        if start > end:
            yield text[end:start], None
        yield text[start:stop], own
        end = stop
    if end < len(text):
        yield text[end:], None


_CIRCLED = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
"""Symbols that Unicode counts as letters."""


def _is_word(char: str) -> bool:
    """Whether a character, if any, belongs to a word (Unicode's UTS 18, annex C)."""
    if not char:
        return False
    category, code = unicodedata.category(char), ord(char)
    if category[0] in "LM" or category in ("Nd", "Nl", "Pc") or code in (0x200C, 0x200D):
        return True
    return any(first <= code <= last for first, last in _CIRCLED)
