"""Makes a ``tokenizer.json`` from a GGUF file's metadata.

Four kinds are known: ``gpt2``, byte-level pairs that are merged in a listed order; ``llama``,
SentencePiece pieces, of which the best-scored pair is merged first and what no piece covers falls
apart into bytes; ``gemma4``, such pieces that are merged in a listed order; ``t5``, such pieces of
which the likeliest division of a text counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.sandbox.tokenizer import TokenizerRefused, call_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN, _CONTROL, _OWN, _BYTE = 2, 3, 4, 6
"""Kinds of tokens; 1 is an ordinary piece, 5 an unused one."""
_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen cut text; they differ in how many digits stay together."""
_CUTS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _WORDS % "{1,3}",
    "llama-v3": _WORDS % "{1,3}",
    "llama3": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "deepseek-r1-qwen": _WORDS % "",
}
"""Expression of ``tokenizer.ggml.pre``; None for GPT-2's own, which the library has."""
_DIGITS_APART = frozenset({"starcoder", "refact", "command-r", "smollm", "codeshell"})
"""GPT-2's cut, after digits were taken apart."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama-v3", "llama3"})
"""Words that are tokens are taken as they are, whatever the merges say."""

_MOST_CHARACTERS = 4096
"""In a token: every place where it could be divided is looked at."""

_HELP = "give the tokenizer.json of the original checkpoint with --tokenizer"


def make_tokenizer(file: Path, metadata: Mapping[str, Any]) -> bytes:
    """The tokenizer of ``file`` as ``tokenizer.json``; `UserError` P543 if its kind is unknown or
    its lists contradict each other."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or tokens is None:
        raise _refuse(file, "it has no tokenizer")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _refuse(file, "tokenizer.ggml.tokens is not a list of texts")
    kinds = metadata.get("tokenizer.ggml.token_type")
    try:
        kinds = [1] * len(tokens) if kinds is None else [int(number) for number in kinds]
        if len(kinds) != len(tokens):
            raise _refuse(file, f"{len(tokens)} tokens have {len(kinds)} types")
    except (TypeError, ValueError, OverflowError) as error:
        raise _refuse(file, str(error)) from None
    longest = max((len(token) for token in tokens), default=0)
    if longest > _MOST_CHARACTERS:
        raise _refuse(file, f"a token has {longest} characters")

    def build() -> str:
        tokenizer = _build(file, metadata, tokens, kinds)
        _add_marks(tokenizer, tokens, kinds)
        _begin_texts(tokenizer, metadata, tokens, str(kind))
        return str(tokenizer.to_str())

    try:
        return call_library(build).encode()
    except TokenizerRefused as error:
        raise _refuse(file, str(error)) from None


def _build(
    file: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    """The tokenizer without marks and begin token."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _make_byte_level(file, metadata, tokens)
    if kind == "llama":
        merges = _find_merges(tokens, _read_scores(file, metadata, tokens), kinds)
        return _make_sentence_piece(metadata, tokens, kinds, merges)
    if kind == "gemma4":
        return _make_sentence_piece(metadata, tokens, kinds, _read_merges(metadata))
    if kind == "t5":
        return _make_unigram(file, metadata, tokens, kinds)
    raise _refuse(file, f"tokenizers of the kind {kind!r} are unknown")


def read_chat_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The chat template and the special tokens that it may name, as a Hugging Face folder has
    them: ``chat_template.jinja`` and ``tokenizer_config.json``."""
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        return {}
    listed = metadata.get("tokenizer.ggml.tokens")
    # What is no text is refused where the tokenizer is made.
    texts = isinstance(listed, list) and all(isinstance(token, str) for token in listed)
    tokens = listed if texts and isinstance(listed, list) else []
    special = {}
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            special[f"{name}_token"] = tokens[number]
    return {
        "chat_template.jinja": template.encode(),
        "tokenizer_config.json": json.dumps(special, ensure_ascii=False).encode(),
    }


def read_named_templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Further chat templates by their names."""
    names = metadata.get("tokenizer.chat_templates")
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in listed}
    return {
        name: text.encode()
        for name, text in found.items()
        if isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
    }


def _make_byte_level(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _CUTS and pre not in _DIGITS_APART:
        raise _refuse(file, f"how {pre!r} cuts text into words is unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_number_tokens(tokens),
            merges=_read_merges(metadata),
            ignore_merges=pre in _WHOLE_WORDS,
        )
    )
    expression = _CUTS.get(pre)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    if pre in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    elif expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cut])
    else:
        tokenizer.pre_tokenizer = cut
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_sentence_piece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    kinds: Sequence[int],
    merges: list[tuple[str, str]],
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == 2), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_number_tokens(tokens),
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    leads = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    changes = _list_changes(metadata)
    changes += [normalizers.Prepend(_SPACE)] if leads else []
    tokenizer.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1, right=0)] if leads else steps
    )
    return tokenizer


def _make_unigram(
    file: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    scores = _read_scores(file, metadata, tokens)
    unknown = next((place for place, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    pieces = list(zip(tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=_BYTE in kinds))
    changes = _list_changes(metadata)
    if changes:
        tokenizer.normalizer = normalizers.Sequence(changes)
    leads = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "always" if leads else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    steps: list[Any] = [decoders.ByteFallback()] if _BYTE in kinds else []
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Metaspace(_SPACE, prepend_scheme=scheme)]
    )
    return tokenizer


def _list_changes(metadata: Mapping[str, Any]) -> list[Any]:
    """Changes that are made to texts first: characters are replaced by a table, spaces taken
    away."""
    from tokenizers import Regex, normalizers

    table = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", b""))
    changes: list[Any] = [normalizers.Precompiled(table)] if table else []
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        changes += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return changes


def _read_scores(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise _refuse(file, "its pieces have no scores")
    return [float(score) for score in scores]


def _find_merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Pairs that make a piece, those of the best-scored piece first."""
    numbers = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    merges = []
    for token, number in numbers.items():
        pairs = [
            (numbers[token[:cut]], numbers[token[cut:]], token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in numbers and token[cut:] in numbers
        ]
        merges += [(scores[number], left, right) for _, _, left, right in sorted(pairs)]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs that are merged, in this order."""
    pairs = []
    for merge in metadata.get("tokenizer.ggml.merges", []):
        left, _, right = str(merge).partition(" ")
        pairs.append((left, right))
    return pairs


def _number_tokens(tokens: Sequence[str]) -> dict[str, int]:
    """Numbers of tokens; the first counts where a file has a text twice."""
    numbers: dict[str, int] = {}
    for number, token in enumerate(tokens):
        numbers.setdefault(token, number)
    return numbers


def _add_marks(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Take control tokens, and those that users have added, as they are out of the text."""
    from tokenizers import AddedToken

    pairs = list(zip(tokens, kinds, strict=True))
    controls = [token for token, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    own = [token for token, kind in pairs if kind == _OWN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in controls]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own if token])


def _begin_texts(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], kind: str
) -> None:
    """Put the begin token before texts, where the model wants it."""
    from tokenizers import processors

    number = metadata.get("tokenizer.ggml.bos_token_id")
    usual = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    wanted = metadata.get("tokenizer.ggml.add_bos_token", usual)
    if not wanted or type(number) is not int or not 0 <= number < len(tokens):
        return
    begin = tokens[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A"],
        pair=[begin, "$A", begin, "$B"],
        special_tokens=[(begin, number)],
    )


def _refuse(file: Path, problem: str) -> UserError:
    return UserError.of(
        "P543", f"no tokenizer can be made from {file}: {problem}", help=_HELP, file=str(file)
    )
