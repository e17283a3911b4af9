"""A tokenizer whose vocabulary is a compact table: the library cuts text into words and joins the
texts of tokens, and only pairs are merged here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.tokens.merging import Pairs
    from pi2.tokens.texts import Texts


class Encoded(Protocol):
    """Tokens of a text."""

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
class _Ids:
    ids: list[int]


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

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoded:
        """Tokens of a text."""
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
        return _Ids([*before, *tokens, *after])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""
        hidden = self._special if skip_special_tokens else ()
        known = range(len(self._texts))
        texts = [self._texts[id] for id in ids if id in known and id not in hidden]
        return str(self._join.decode(texts))

    def id_to_token(self, id: int) -> str | None:
        """Text of a token; None if there is no such token."""
        return self._texts[id] if 0 <= id < len(self._texts) else None

    def token_to_id(self, token: str) -> int | None:
        """The token of a text; None if there is none."""
        return self._texts.numbers.get(token)

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Marks by their tokens."""
        return self._marks.get_added_tokens_decoder()
