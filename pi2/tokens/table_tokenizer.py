"""A tokenizer whose vocabulary is a compact table: the library cuts text into words and joins the
texts of tokens, and only pairs are merged here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.tokens.texts import Texts


Merge = tuple[int, int]
"""Rank of a pair, the lowest of which is merged first, and the token that it becomes."""
FindMerge = Callable[[int, int], Merge | None]
_KEPT_WORDS, _KEPT_CHARACTERS, _KEPT_TEXTS = 10_000, 64, 1024


def map_bytes() -> list[str]:
    """The visible character for each byte (Radford et al. 2019)."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in seen}
    others = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def list_byte_tokens(vocabulary: Mapping[str, int]) -> list[int | None]:
    """Tokens of single bytes, ``<0x00>`` to ``<0xFF>``."""
    return [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]


def encode_bytes(text: str, tokens: Sequence[int | None]) -> list[int] | None:
    """Tokens of the bytes of a text; None where one has none."""
    found = [tokens[byte] for byte in text.encode()]
    known = [token for token in found if token is not None]
    return known if len(known) == len(found) else None


class Pairs:
    """Divides words by merging pairs of tokens, single characters at first."""

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        find_merge: FindMerge,
        *,
        unknown: int | None = None,
        fuses: bool = False,
        takes_whole: bool = False,
        falls_back: bool = False,
    ) -> None:
        """``fuses``: unknown characters that follow each other are one; ``takes_whole``: a word
        that is a token is not divided; ``falls_back``: unknown characters become bytes."""
        self.vocabulary = vocabulary
        self._find_merge = find_merge
        self._unknown, self._fuses, self._takes_whole = unknown, fuses, takes_whole
        self._bytes = list_byte_tokens(vocabulary) if falls_back else None
        self._known: dict[str, Sequence[int]] = {}
        self._letters: dict[str, int | None] = {}

    def encode(self, word: str) -> Sequence[int]:
        found = self._known.get(word)
        if found is None:
            whole = self.vocabulary.get(word) if self._takes_whole else None
            found = self._merge(self._list_symbols(word)) if whole is None else (whole,)
            if len(self._known) < _KEPT_WORDS and len(word) <= _KEPT_CHARACTERS:
                self._known[word] = found
        return found

    def _list_symbols(self, word: str) -> list[int]:
        """Tokens of single characters, or of their bytes; unknown ones are one, or none."""
        symbols: list[int] = []
        was_unknown, letters = False, self._letters
        for char in word:
            if char not in letters:
                letters[char] = self.vocabulary.get(char)
            token = letters[char]
            if token is not None:
                symbols.append(token)
                was_unknown = False
                continue
            own = None if self._bytes is None else encode_bytes(char, self._bytes)
            if own is not None:
                symbols += own
            elif self._unknown is not None and not (was_unknown and self._fuses):
                symbols.append(self._unknown)
                was_unknown = True
        return symbols

    def _merge(self, symbols: list[int]) -> Sequence[int]:
        find, count = self._find_merge, len(symbols)
        after, before = list(range(1, count + 1)), list(range(-1, count - 1))
        alive = [True] * count
        waiting = []
        for place in range(count - 1):
            merge = find(symbols[place], symbols[place + 1])
            if merge is not None:
                waiting.append((merge[0], place, merge[1]))
        heapify(waiting)
        while waiting:
            _, place, token = heappop(waiting)
            right = after[place]
            if not alive[place] or right >= count:
                continue
            merge = find(symbols[place], symbols[right])
            if merge is None or merge[1] != token:
                continue
            symbols[place], alive[right] = token, False
            after[place] = after[right]
            if after[right] < count:
                before[after[right]] = place
            for left in (before[place], place):
                if left >= 0 and after[left] < count:
                    merge = find(symbols[left], symbols[after[left]])
                    if merge is not None:
                        heappush(waiting, (merge[0], left, merge[1]))
        return tuple(token for token, lives in zip(symbols, alive, strict=True) if lives)


class Encoded(Protocol):
    @property
    def ids(self) -> list[int]:
        """Their numbers."""


class Coder(Protocol):
    """What runs need of a tokenizer, as the tokenizers library has it."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoded:
        """Tokens of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""

    def id_to_token(self, id: int) -> str | None:
        """Text of a token."""

    def token_to_id(self, token: str) -> int | None:
        """The token of a text."""

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Marks by their tokens."""


@dataclass(frozen=True, slots=True)
class Ids:
    ids: list[int]


def take_library(coder: Coder) -> Tokenizer:
    return coder.library if isinstance(coder, TableTokenizer) else cast("Tokenizer", coder)


class TableTokenizer:
    """A `Coder` of the same tokens as the library's tokenizer, which it makes only when asked."""

    def __init__(
        self,
        pairs: Pairs,
        texts: Texts,
        steps: Tokenizer,
        marks: Tokenizer,
        frame: tuple[Sequence[int], Sequence[int]],
        make_library: Callable[[], Tokenizer],
    ) -> None:
        """``steps`` has what a text goes through before and after ``pairs``, ``marks`` knows only
        tokens that are taken out of texts as they are, and ``frame`` is put around a text."""
        self._pairs, self._texts = pairs, texts
        self._known, self._read = range(len(texts)), lru_cache(_KEPT_TEXTS)(texts.__getitem__)
        self._change, self._cut = steps.normalizer, steps.pre_tokenizer
        self._join = steps.decoder
        self._marks, self._frame = marks, frame
        added = marks.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._make_library = make_library

    @cached_property
    def library(self) -> Tokenizer:
        """The same as the library has it; `UserError` P543 if it refuses the file."""
        return self._make_library()

    def has_tokens_of(self, other: TableTokenizer) -> bool:
        """Whether both have the same tokens under the same numbers."""
        return self._texts == other._texts

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoded:
        tokens: list[int] = []
        found = self._marks.encode(sequence, add_special_tokens=False)
        for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if token < len(self._texts):
                tokens.append(token)
                continue
            piece = sequence[start:stop]
            if self._change is not None:
                piece = self._change.normalize_str(piece)
            words = [piece]
            if self._cut is not None:
                words = [word for word, _ in self._cut.pre_tokenize_str(piece)]
            for word in words:
                tokens += self._pairs.encode(word)
        before, after = self._frame if add_special_tokens else ((), ())
        return Ids([*before, *tokens, *after])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self._special if skip_special_tokens else ()
        known, read = self._known, self._read
        texts = [read(id) for id in ids if id in known and id not in hidden]
        return str(self._join.decode(texts))

    def id_to_token(self, id: int) -> str | None:
        """Text of a token; None if there is no such token."""
        return self._texts[id] if 0 <= id < len(self._texts) else None

    def token_to_id(self, token: str) -> int | None:
        """The token of a text; None if there is none."""
        return self._texts.numbers.get(token)

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        return self._marks.get_added_tokens_decoder()
