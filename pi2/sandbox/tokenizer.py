"""Tokenizers that have been tried (`pi2.sandbox.trial`)."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.caches import find_cache_folder, replace_file
from pi2.sandbox.child import ChildFailed, Limits, run_child
from pi2.sandbox.coding import TokenizerRefused as TokenizerRefused
from pi2.sandbox.coding import call_library as call_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LIMITS, _MEMORY_FACTOR = Limits(cpu_s=5.0, memory_mib=1024), 48
"""Of the process, and memory in addition for the bytes of the tokenizer."""


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
