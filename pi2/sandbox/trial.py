"""Tries a tokenizer in its own process: ``python -m pi2.sandbox.trial``. The library panics on many
files, and short rules can make gigabytes of a word: texts go through it, lengths are counted."""

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from tokenizers import Tokenizer

from pi2.sandbox.child import serve

MAX_GROWTH = 256
"""Characters that a rule may make of one; SentencePiece's table makes up to 18, byte fallback 4."""
_ADDED_PER_TEXT = 1024
_WORDS = 'The quick brown fox, 1234567890 + 98.6% = "jumps" over (the) lazy dog\'s back?!\r\n\t'
TEXTS = (
    "",
    "a",
    " ",
    _WORDS,
    _WORDS.upper(),
    "def f(x):\n    return x ** 2  # twice\n\n\n",
    # Letters that change their length with their case or form, marks apart from theirs.
    "Größe, İstanbul, \ufb01ne, \xbd, \u212b, e\u0301, \u1e9b\u0323, \u03a3\u03c2",
    # Chinese, Korean, Hindi, Thai, Arabic, Hebrew, and marks of the direction.
    "\u6f22\u5b57\uff0c \ud55c\uad6d \u0939\u093f \u0e44\u0e17\u0e22 \u0639 \u05e2 \u202e",
    # Emoji of several characters, and characters beyond the first 65,536.
    "\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f467 \U0001d518 \U0010ffff \ufffd \u2581",
    "".join(map(chr, range(256))),
    "<s></s><unk><pad>[CLS][SEP][MASK]<|im_start|><|endoftext|>",
    "a" * 50 + "b",
    "a" * 4000,
    " " * 4000,
    "\n" * 1000,
    _WORDS * 100,
)


class Refusal(Exception):
    """Why the tokenizer must not be used."""


def try_tokenizer(content: bytes) -> dict[str, Any]:
    """Facts of the tokenizer; raises `Refusal`, or the library's errors."""
    _check_growth(content)
    tokenizer = Tokenizer.from_buffer(content)
    # Prompts are neither cut nor filled up: `pi2.sandbox.tokenizer` does the same.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special_tokens=special).ids
            if len(ids) > MAX_GROWTH * len(text.encode()) + _ADDED_PER_TEXT:
                raise Refusal(f"it makes {len(ids)} tokens of {len(text)} characters")
            back = tokenizer.decode(ids, skip_special_tokens=True)
            if len(back) > MAX_GROWTH * len(text) + _ADDED_PER_TEXT * (len(ids) + 1):
                raise Refusal(f"it makes {len(back)} characters of {len(ids)} tokens")
    size = tokenizer.get_vocab_size()
    for first in range(0, min(size, 4096), 64):
        for token in range(first, min(first + 64, size)):
            tokenizer.decode([token], skip_special_tokens=False)
        tokenizer.decode(list(range(first, min(first + 64, size))))
    begin = tokenizer.encode("a").ids
    return {"size": size, "begin": begin[0] if begin else None}


def _check_growth(content: bytes) -> None:
    rules = json.loads(content, object_pairs_hook=_make_object)
    if not isinstance(rules, dict):
        raise Refusal("it is no JSON object")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growths = [_find_growth(rule) for rule in _list_rules(rules.get(part))]
        if prod(growths) > MAX_GROWTH:
            raise Refusal(f"its {part} can make {prod(growths):.3g} characters of one")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; `Refusal` where the library could read another value than this does."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Refusal("it states a key twice")
    return made


def _list_rules(rule: Any) -> Iterator[dict[str, Any]]:
    waiting = [rule]
    while waiting:
        rule = waiting.pop()
        if isinstance(rule, list):
            waiting += rule
        elif isinstance(rule, dict):
            yield rule
            waiting += [value for value in rule.values() if isinstance(value, list)]


def _find_growth(rule: dict[str, Any]) -> float:
    added = rule.get("content" if rule.get("type") == "Replace" else "prepend")
    if rule.get("type") not in ("Replace", "Prepend") or not isinstance(added, str):
        return 1.0
    pattern = rule.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    replaced = len(literal) if isinstance(literal, str) else 1
    if replaced == 0:
        raise Refusal("it replaces empty text")
    return max(1.0, len(added) / replaced)


def explain(error: BaseException) -> str:
    problem = " ".join(str(error)[:2000].split())[:300] or type(error).__name__
    known = isinstance(error, (Refusal, ValueError, RecursionError))
    if isinstance(error, Exception):
        return problem if known else f"the tokenizer library says: {problem}"
    return f"it makes the tokenizer library panic: {problem}"


def _work(request: bytes) -> bytes:
    return json.dumps(try_tokenizer(request)).encode()


if __name__ == "__main__":
    serve(_work, explain)
