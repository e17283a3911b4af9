"""Tokenizers of a bundle, read in Python or by the `tokenizers` library if installed and needed."""

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from pi2.diagnostics import UserError
from pi2.phone.runtime.pieces import Unsupported
from pi2.phone.runtime.tokenizer import Tokenizer
from pi2.tokens.table_tokenizer import Encoded


class TokenizerRefused(Exception):
    """The tokenizer must not be used; the text says why, and fits after a colon."""


class Reader(Protocol):
    """What the engine needs of a tokenizer, as the tokenizers library has it."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoded:
        """Tokens of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens."""

    def id_to_token(self, id: int) -> str | None:
        """Text of a token."""


def open_tokenizer(content: bytes) -> Reader:
    """Read a ``tokenizer.json``; raises `TokenizerRefused`."""
    try:
        return Tokenizer(content)
    except Unsupported as error:
        if importlib.util.find_spec("tokenizers") is None:
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
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def list_endings(tokenizer: Reader) -> list[int]:
    """Tokens after a whole text: none, since phones make no embeddings."""
    del tokenizer
    return []


def decode_ids(tokenizer: Reader, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of ``ids``, without special tokens unless ``special``."""
    return tokenizer.decode(list(ids), skip_special_tokens=not special)
