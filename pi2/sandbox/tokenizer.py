"""Tokenizers that have been tried (`pi2.sandbox.trial`), and what the library does with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pi2.caches import find_cache_folder, replace_file
from pi2.diagnostics import UserError
from pi2.sandbox.child import ChildFailed, Limits, run_child

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.tokens.table_tokenizer import Coder

Result = TypeVar("Result")

_LIMITS, _MEMORY_FACTOR = Limits(cpu_s=5.0, memory_mib=1024), 48
"""Of the process, and memory in addition for the bytes of the tokenizer."""


class TokenizerRefused(Exception):
    """The tokenizer must not be used; the text says why, and fits after a colon."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What a trial has found of a tokenizer that works."""

    size: int
    """Tokens, added ones too."""
    begin: int | None
    """First token of a text that gets its special tokens."""


def try_tokenizer(content: bytes) -> Tried:
    """Try a ``tokenizer.json``; raises `TokenizerRefused`."""
    file = find_cache_folder("tokenizers") / f"{_compute_key(content)}.json"
    known = _read_known(file)
    if known is not None:
        return known
    try:
        answer = run_child("trial", content, _LIMITS.add_input(len(content), _MEMORY_FACTOR))
    except ChildFailed as error:
        raise TokenizerRefused(str(error)) from None
    with suppress(OSError):
        replace_file(file, answer)
    return Tried(**json.loads(answer))


def open_tokenizer(content: bytes) -> Tokenizer:
    """Try and read a ``tokenizer.json``, without truncation or padding, or `TokenizerRefused`."""
    from tokenizers import Tokenizer

    try_tokenizer(content)
    tokenizer = call_library(lambda: Tokenizer.from_buffer(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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


def _compute_key(content: bytes) -> str:
    digest = hashlib.sha256(_describe_trial())
    digest.update(content)
    return digest.hexdigest()


@cache
def _describe_trial() -> bytes:
    trial = Path(__file__).with_name("trial.py").read_bytes()
    from importlib.metadata import version

    return hashlib.sha256(trial + version("tokenizers").encode()).digest()


def _read_known(file: Path) -> Tried | None:
    try:
        return Tried(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
