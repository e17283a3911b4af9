"""A tokenizer of a ``tokenizer.json`` in plain Python; unknown rules raise `Unsupported`."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from pi2.phone.runtime.pieces import (
    WHITE,
    Unsupported,
    chain,
    find_scheme,
    make_change,
    make_cut,
    read_pattern,
)
from pi2.sandbox.coding import TokenizerRefused as TokenizerRefused
from pi2.tokens.table_tokenizer import (
    Coder,
    Encoded,
    Ids,
    Merge,
    Pairs,
    encode_bytes,
    list_byte_tokens,
    map_bytes,
)

Decode = Callable[[list[str]], list[str]]
"""Takes the texts of tokens; the returned texts are joined at the end."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def make_decoder(rule: Mapping[str, Any] | None) -> Decode:
    if rule is None:
        return lambda texts: [" ".join(texts)]
    kind = rule["type"]
    if kind == "Sequence":
        return chain([make_decoder(item) for item in rule["decoders"]])
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
        mark, first = str(rule["replacement"]), " " if find_scheme(rule) == "never" else ""
        return lambda texts: [
            text.replace(mark, " " if place else first) for place, text in enumerate(texts)
        ]
    raise Unsupported(f"the decoder {kind}")


def _join_bytes(texts: list[str], bytes_of: Mapping[str, int]) -> str:
    """Text of tokens whose characters stand for bytes; others count as they are."""
    found = bytearray()
    for text in texts:
        codes = [bytes_of.get(char) for char in text]
        known = [code for code in codes if code is not None]
        found += bytes(known) if len(known) == len(codes) else text.encode()
    return found.decode("utf-8", "replace")


def _read_bytes(texts: list[str]) -> list[str]:
    """Characters of tokens that are bytes; each invalid byte becomes U+FFFD."""
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


_UNKNOWN_PENALTY = 10.0
"""What an unknown character costs more than the unlikeliest piece (SentencePiece)."""


class Model(Protocol):
    """Divides words."""

    vocabulary: Mapping[str, int]

    def encode(self, word: str) -> Sequence[int]:
        """Tokens of a word."""


def make_model(rule: Mapping[str, Any]) -> Model:
    """Return a tokenizer's model; raises `Unsupported`."""
    kind = rule.get("type")
    if kind == "BPE" or (kind is None and "merges" in rule):
        return _make_pairs(rule)
    if kind == "Unigram":
        return Likeliest(rule)
    raise Unsupported(f"the model {kind}")


def _make_pairs(rule: Mapping[str, Any]) -> Pairs:
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if rule.get(key):
            raise Unsupported(f"byte-pair encoding with {key}")
    vocabulary: Mapping[str, int] = rule["vocab"]
    merges: dict[tuple[int, int], Merge] = {}
    for rank, merge in enumerate(rule["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merges[vocabulary[left], vocabulary[right]] = (rank, vocabulary[left + right])
    return Pairs(
        vocabulary,
        lambda left, right: merges.get((left, right)),
        unknown=vocabulary.get(rule["unk_token"]) if rule.get("unk_token") else None,
        fuses=bool(rule.get("fuse_unk")),
        takes_whole=bool(rule.get("ignore_merges")),
        falls_back=bool(rule.get("byte_fallback")),
    )


class Likeliest:
    """The division of a word whose pieces' scores have the greatest sum (Kudo 2018)."""

    def __init__(self, rule: Mapping[str, Any]) -> None:
        pieces = [(str(text), float(score)) for text, score in rule["vocab"]]
        self.vocabulary: Mapping[str, int] = {text: token for token, (text, _) in enumerate(pieces)}
        self._scores = dict(pieces)
        self._longest = max((len(text) for text, _ in pieces), default=1)
        lowest = min((score for _, score in pieces), default=0.0)
        self._unknown_score = lowest - _UNKNOWN_PENALTY
        self._unknown: int | None = rule.get("unk_id")
        self._bytes = list_byte_tokens(self.vocabulary) if rule.get("byte_fallback") else None

    def encode(self, word: str) -> Sequence[int]:
        found: list[int] = []
        for piece in self._divide(word):
            token = self.vocabulary.get(piece)
            own = None if self._bytes is None else encode_bytes(piece, self._bytes)
            if token is not None:
                found.append(token)
            elif own is not None:
                found += own
            elif self._unknown is not None:
                found.append(self._unknown)
        return found

    def _divide(self, word: str) -> list[str]:
        """The best division; unknown characters that follow each other are one piece."""
        size, scores = len(word), self._scores
        best: list[tuple[float, int, bool] | None] = [None] * (size + 1)
        best[0] = (0.0, 0, False)
        for start in range(size):
            here = best[start]
            assert here is not None  # every character is a step
            for end in range(start + 1, min(size, start + self._longest) + 1):
                score = scores.get(word[start:end])
                if score is not None:
                    self._improve(best, end, (here[0] + score, start, False))
            if word[start] not in scores:
                self._improve(best, start + 1, (here[0] + self._unknown_score, start, True))
        pieces: list[str] = []
        end, was_unknown = size, False
        while end > 0:
            node = best[end]
            assert node is not None
            _, start, unknown = node
            if unknown and was_unknown:
                pieces[-1] = word[start:end] + pieces[-1]
            else:
                pieces.append(word[start:end])
            end, was_unknown = start, unknown
        return pieces[::-1]

    @staticmethod
    def _improve(
        best: list[tuple[float, int, bool] | None], end: int, candidate: tuple[float, int, bool]
    ) -> None:
        current = best[end]
        if current is None or candidate[0] > current[0]:
            best[end] = candidate


@dataclass(frozen=True, slots=True)
class _Added:
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
        """Read a ``tokenizer.json``; raises `Unsupported`, ValueError, KeyError or TypeError."""
        rules = json.loads(content)
        if not isinstance(rules, dict):
            raise Unsupported("a file that is no JSON object")
        _check_beginnings(rules)
        self._change = make_change(rules.get("normalizer"))
        self._cut = make_cut(rules.get("pre_tokenizer"))
        self._model = make_model(rules["model"])
        self._decode = make_decoder(rules.get("decoder"))
        added = [_read_added(item) for item in rules.get("added_tokens", ())]
        self._added = {item.token: item for item in added}
        self._texts = {token: text for text, token in self._model.vocabulary.items()}
        self._texts |= {item.token: item.content for item in added}
        self._special = frozenset(item.token for item in added if item.special)
        self._raw = {item.content: item for item in added if not item.normalized}
        self._normal = {self._change(item.content): item for item in added if item.normalized}
        self._find_raw = _compile(list(self._raw))
        self._find_normal = _compile(list(self._normal))

    def id_to_token(self, id: int) -> str | None:
        """Text of a token; None if there is no such token."""
        return self._texts.get(id)

    def token_to_id(self, token: str) -> int | None:
        """The token of a text; None if there is none."""
        own = (id for id, item in self._added.items() if item.content == token)
        return next(own, self._model.vocabulary.get(token))

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        return self._added

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoded:
        """Tokens of a text; none are put before or after it, since phones make no embeddings."""
        del add_special_tokens
        tokens: list[int] = []
        first = True
        for piece, own in _find_added(sequence, self._find_raw, self._raw):
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
        return Ids(tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        hidden = self._special if skip_special_tokens else ()
        texts = [self._texts[id] for id in ids if id in self._texts and id not in hidden]
        return "".join(self._decode(texts))


def _check_beginnings(rules: dict[str, Any]) -> None:
    """`Unsupported` if the start of a text matters and a normaliser removes it."""
    changes, cuts = json.dumps(rules.get("normalizer")), json.dumps(rules.get("pre_tokenizer"))
    if '"prepend_scheme": "first"' in cuts and ('"Strip"' in changes or '"content": ""' in changes):
        raise Unsupported("the prepend scheme 'first' after a normaliser that takes text away")


def _read_added(item: dict[str, Any]) -> _Added:
    names = ("single_word", "lstrip", "rstrip", "special", "normalized")
    return _Added(int(item["id"]), str(item["content"]), *(bool(item.get(name)) for name in names))


def _compile(contents: list[str]) -> re.Pattern[str] | None:
    """What finds the leftmost of some texts, and the longest there; None of no texts."""
    known = sorted((text for text in contents if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None


def _find_added(
    text: str, found: re.Pattern[str] | None, added: dict[str, _Added]
) -> Iterator[tuple[str, _Added | None]]:
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


def open_tokenizer(content: bytes) -> Coder:
    """Read a ``tokenizer.json``, by the `tokenizers` library if it is needed and installed; raises
    `TokenizerRefused`."""
    try:
        return Tokenizer(content)
    except Unsupported as error:
        if find_spec("tokenizers") is None:
            raise TokenizerRefused(
                f"{error} is known to the tokenizers library only, which is not installed here"
            ) from None
        import tokenizers

        found = tokenizers.Tokenizer.from_buffer(content)
        found.no_truncation()
        found.no_padding()
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerRefused(f"it is damaged: {error!r}") from None
