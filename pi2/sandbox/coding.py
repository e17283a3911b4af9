"""Texts and tokens of any tokenizer; the library's failures are findings."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pi2.diagnostics import UserError
from pi2.tokens.table_tokenizer import Coder

Result = TypeVar("Result")


class TokenizerRefused(Exception):
    """The tokenizer must not be used; the text says why, and fits after a colon."""


def encode_text(tokenizer: Coder, text: str) -> list[int]:
    """Token ids without special tokens; `UserError` P607 for half a character, P605 on failure."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError.of(
            "P607",
            f"the prompt is not UTF-8: half a character at place {error.start}",
            help="save or give the text as UTF-8",
        ) from None
    try:
        found = call_library(lambda: tokenizer.encode(text, add_special_tokens=False).ids)
    except TokenizerRefused as error:
        raise _describe_failure("encode the text", error) from None
    return list(found)


def list_endings(tokenizer: Coder) -> list[int]:
    whole, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    places = range(len(whole) - len(plain) + 1)
    place = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return list(whole[place + len(plain) :])


def decode_ids(tokenizer: Coder, ids: Sequence[int], *, special: bool = False) -> str:
    """Text of ``ids``, without special tokens unless ``special``; `UserError` P605 on failure."""
    try:
        text: str = call_library(
            lambda: tokenizer.decode(list(ids), skip_special_tokens=not special)
        )
    except TokenizerRefused as error:
        raise _describe_failure("make text of tokens", error) from None
    return text


def call_library(call: Callable[[], Result]) -> Result:
    """Call the tokenizer library; raises `TokenizerRefused` for any error there."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerRefused(" ".join(str(error).split())) from None
    except BaseException as error:
        # A panic is an exception of its own kind, which no module offers.
        if type(error).__name__ != "PanicException":
            raise
        problem = " ".join(str(error).split())[:300]
        raise TokenizerRefused(f"it makes the tokenizer library panic: {problem}") from None


def _describe_failure(work: str, error: TokenizerRefused) -> UserError:
    return UserError.of(
        "P605",
        f"the tokenizer cannot {work}: {error}",
        help="convert the model again with the tokenizer.json of the original checkpoint",
    )
