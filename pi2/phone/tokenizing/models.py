"""From words to tokens: byte-pair encoding, and the likeliest division (unigram)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from pi2.phone.tokenizing.patterns import Unsupported

_UNKNOWN_PENALTY = 10.0
"""What an unknown character costs more than the unlikeliest piece (SentencePiece)."""
_KEPT_WORDS = 10_000


class Model(Protocol):
    """Divides words."""

    vocabulary: Mapping[str, int]

    def encode(self, word: str) -> Sequence[int]:
        """Tokens of a word."""


def make_model(rule: Mapping[str, Any]) -> Model:
    """Return a tokenizer's model; raises `Unsupported`."""
    kind = rule.get("type")
    if kind == "BPE" or (kind is None and "merges" in rule):
        return Pairs(rule)
    if kind == "Unigram":
        return Likeliest(rule)
    raise Unsupported(f"the model {kind}")


def _list_byte_tokens(vocabulary: Mapping[str, int]) -> list[int | None]:
    return [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]


def _encode_bytes(text: str, tokens: Sequence[int | None]) -> list[int] | None:
    """Tokens of the bytes of a text; None where one has none."""
    found = [tokens[byte] for byte in text.encode()]
    known = [token for token in found if token is not None]
    return known if len(known) == len(found) else None


class Pairs:
    """Byte-pair encoding: the pair that was learnt first is merged first (Sennrich et al. 2016)."""

    def __init__(self, rule: Mapping[str, Any]) -> None:
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if rule.get(key):
                raise Unsupported(f"byte-pair encoding with {key}")
        self.vocabulary: Mapping[str, int] = rule["vocab"]
        vocabulary = self.vocabulary
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}
        """Rank of a pair, and what it becomes."""
        for rank, merge in enumerate(rule["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair = (vocabulary[left], vocabulary[right])
            self._merges[pair] = (rank, vocabulary[left + right])
        self._unknown = vocabulary.get(rule["unk_token"]) if rule.get("unk_token") else None
        self._fuses = bool(rule.get("fuse_unk"))
        self._takes_whole = bool(rule.get("ignore_merges"))
        self._bytes = _list_byte_tokens(vocabulary) if rule.get("byte_fallback") else None
        self._known: dict[str, Sequence[int]] = {}

    def encode(self, word: str) -> Sequence[int]:
        """Tokens of a word."""
        found = self._known.get(word)
        if found is None:
            found = self._merge(self._list_symbols(word))
            if self._takes_whole and word in self.vocabulary:
                found = (self.vocabulary[word],)
            if len(self._known) < _KEPT_WORDS:
                self._known[word] = found
        return found

    def _list_symbols(self, word: str) -> list[int]:
        """Tokens of single characters, or of their bytes; unknown ones are one, or none."""
        symbols: list[int] = []
        was_unknown = False
        for char in word:
            token = self.vocabulary.get(char)
            if token is not None:
                symbols.append(token)
                was_unknown = False
                continue
            own = None if self._bytes is None else _encode_bytes(char, self._bytes)
            if own is not None:
                symbols += own
            elif self._unknown is not None and not (was_unknown and self._fuses):
                symbols.append(self._unknown)
                was_unknown = True
        return symbols

    def _merge(self, symbols: list[int]) -> Sequence[int]:
        """Merge pairs until none is left: the best first, of equal ones the leftmost."""
        merges, count = self._merges, len(symbols)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        alive = [True] * count
        waiting = []
        for place in range(count - 1):
            merge = merges.get((symbols[place], symbols[place + 1]))
            if merge is not None:
                waiting.append((merge[0], place, merge[1]))
        heapify(waiting)
        while waiting:
            _, place, token = heappop(waiting)
            right = after[place]
            if not alive[place] or right >= count:
                continue
            merge = merges.get((symbols[place], symbols[right]))
            if merge is None or merge[1] != token:
                continue
            symbols[place], alive[right] = token, False
            after[place] = after[right]
            if after[right] < count:
                before[after[right]] = place
            for left in (before[place], place):
                if left >= 0 and after[left] < count:
                    merge = merges.get((symbols[left], symbols[after[left]]))
                    if merge is not None:
                        heappush(waiting, (merge[0], left, merge[1]))
        return tuple(token for token, lives in zip(symbols, alive, strict=True) if lives)


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
        self._bytes = _list_byte_tokens(self.vocabulary) if rule.get("byte_fallback") else None

    def encode(self, word: str) -> Sequence[int]:
        """Tokens of a word."""
        found: list[int] = []
        for piece in self._divide(word):
            token = self.vocabulary.get(piece)
            own = None if self._bytes is None else _encode_bytes(piece, self._bytes)
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
