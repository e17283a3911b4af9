"""Tokenizers of a bundle, read in Python or by the `tokenizers` library if installed and needed."""

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from pi2.diagnostics import UserError
from pi2.phone.tokenizing.pieces import Unsupported
from pi2.phone.tokenizing.tokenizer import Tokenizer


class TokenizerRefused(Exception):
    """The tokenizer must not be used; the text says why, and fits after a colon."""


class Reader(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones around it."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of tokens; special ones are left out unless ``special``."""

    def id_to_token(self, token: int) -> str | None:
        """Text of a token."""


class _Library:
    def __init__(self, content: bytes) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def id_to_token(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)


def open_tokenizer(content: bytes) -> Reader:
    """Read a ``tokenizer.json``; raises `TokenizerRefused`."""
    try:
        return Tokenizer(content)
    except Unsupported as error:
        if importlib.util.find_spec("tokenizers") is not None:
            return _Library(content)
        raise TokenizerRefused(
            f"{error} is known to the tokenizers library only, which is not installed here"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerRefused(f"it is damaged: {error!r}") from None


def encode_text(tokenizer: Reader, text: str) -> list[int]:
    """Token ids of ``text``, without special tokens; `UserError` P607 if it is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: half a character at place {error.start}",
            help="save or give the text as UTF-8",
        ) from None
    return tokenizer.encode(text)


def list_endings(tokenizer: Reader) -> list[int]:
    """Tokens after a whole text: none, since phones make no embeddings."""
    del tokenizer
    return []


def decode_ids(tokenizer: Reader, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of ``ids``, without special tokens unless ``special``."""
    return tokenizer.decode(ids, special=special)
