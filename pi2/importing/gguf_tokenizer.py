"""Makes tokenizers from GGUF files' metadata: a ``tokenizer.json``, or one with a compact table."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pi2.arrays import F64
from pi2.caches import find_cache_folder, replace_file
from pi2.diagnostics import UserError
from pi2.importing.gguf_tokens import (
    BYTE,
    CONTROL,
    ORDINARY,
    OWN,
    UNKNOWN,
    GgufTokens,
    refuse,
    write_expression,
)
from pi2.sandbox.tokenizer import TokenizerRefused, call_library, open_tokenizer
from pi2.tokens.table_tokenizer import FindMerge, Pairs, TableTokenizer
from pi2.tokens.texts import ListedMerges, ScoredMerges, Texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
_NEVER = frozenset("ÀÁõö÷øùúûüýþÿ")
"""Letters of bytes that no text has in UTF-8."""

_KEPT_MERGES = 1 << 16
MANY_MERGES = 10_000
"""Merges that are kept on disk as a table."""
_NOTHING = "\U0010fffd"
"""Stands for text between marks."""
_Found = TypeVar("_Found")


def make_tokenizer(file: Path, metadata: Mapping[str, Any]) -> bytes:
    """The tokenizer of ``file`` as ``tokenizer.json``; `UserError` P543 if its kind is unknown or
    its lists contradict each other."""
    told = GgufTokens.read(file, metadata)

    def build() -> str:
        frame = told.frame()
        tokenizer = _make_steps(told)
        tokenizer.model = _make_model(told)
        _add_marks(tokenizer, told)
        _frame_texts(tokenizer, told.tokens, *frame)
        return str(tokenizer.to_str())

    return _ask_library(file, build).encode()


def _ask_library(file: Path, work: Callable[[], _Found]) -> _Found:
    """What the library gives; `UserError` P543 says why it refuses."""
    try:
        return call_library(work)
    except TokenizerRefused as error:
        raise refuse(file, str(error)) from None


def make_table(file: Path, metadata: Mapping[str, Any]) -> TableTokenizer | None:
    """The tokenizer of ``file`` with a compact table; None for one that only the library can have.

    `UserError` P543 as `make_tokenizer`."""
    told = GgufTokens.read(file, metadata)
    begin, end = told.frame()
    pairs = _make_table_pairs(told)
    if pairs is None:
        return None

    def make_library() -> Tokenizer:
        return _ask_library(file, lambda: open_tokenizer(make_tokenizer(file, metadata)))

    steps, marks = _ask_library(file, lambda: (_make_steps(told), _make_marks(told)))
    frame = [[] if token is None else [token] for token in (begin, end)]
    return TableTokenizer(pairs, told.tokens, steps, marks, (frame[0], frame[1]), make_library)


def may_have_table(metadata: Mapping[str, Any]) -> bool:
    """Whether pairs are merged, and characters are not replaced by a table first."""
    is_plain = metadata.get("tokenizer.ggml.precompiled_charsmap") is None
    return is_plain and metadata.get("tokenizer.ggml.model") in ("llama", "gpt2", "gemma4")


def _make_table_pairs(told: GgufTokens) -> Pairs | None:
    """What merges pairs; None where a table cannot be exact, or the library could fail."""
    tokens, metadata = told.tokens, told.metadata
    if not may_have_table(metadata) or not len(tokens):
        return None
    if not tokens.are_whole or not tokens.numbers.are_distinct:
        return None
    find: FindMerge
    if told.kind == "llama":
        scores = _read_scores(told)
        if np.isnan(scores).any():
            return None
        find = ScoredMerges(tokens, scores).find
    else:
        merges = metadata.get("tokenizer.ggml.merges")
        listed = read_merges(merges, tokens) if isinstance(merges, Texts) else None
        if listed is None:
            return None
        find = listed.find
    return Pairs(tokens.numbers, lru_cache(_KEPT_MERGES)(find), **_describe_model(told))


def read_merges(merges: Texts, tokens: Texts) -> ListedMerges | None:
    """Read merges as `ListedMerges.read`, or take an equal list's cached ones: many take 0.1 s."""
    if len(merges) < MANY_MERGES:
        return ListedMerges.read(merges, tokens)
    key = hashlib.sha256(b"merges 1")
    for part in (merges.data, merges.sizes, tokens.data, tokens.sizes):
        key.update(part.data)
    file = find_cache_folder("tokenizers") / f"{key.hexdigest()}.merges"
    with suppress(OSError):
        digest, kept = (content := memoryview(file.read_bytes()))[:32], content[32:]
        if len(kept) == 16 * len(merges) and hashlib.sha256(kept).digest() == digest:
            return ListedMerges.join(kept)
    listed = ListedMerges.read(merges, tokens)
    if listed is not None:
        kept = memoryview(b"".join((listed.keys, listed.ranks, listed.tokens)))
        with suppress(OSError):
            replace_file(file, hashlib.sha256(kept).digest() + kept)
    return listed


def _describe_model(told: GgufTokens) -> dict[str, Any]:
    """What a model does with words and characters that it does not know."""
    if told.kind in ("llama", "t5"):
        unknown = np.flatnonzero(told.marks.kinds == UNKNOWN)
        return {
            "unknown": int(unknown[0]) if len(unknown) else None,
            "fuses": True,
            "falls_back": bool((told.marks.kinds == BYTE).any()),
        }
    cut = told.find_cut()
    return {
        "takes_whole": cut.whole_words,
        "falls_back": not cut.bytes_as_letters and _has_bytes(told.tokens),
    }


def _has_bytes(tokens: Texts) -> bool:
    return all(f"<0x{byte:02X}>" in tokens.numbers for byte in range(256))


def _make_marks(told: GgufTokens) -> Tokenizer:
    """A tokenizer of marks only: text between them is the token after all others."""
    from tokenizers import Tokenizer, models

    found = np.flatnonzero(np.isin(told.marks.kinds, (CONTROL, UNKNOWN, OWN)))
    known = {told.tokens[number]: number for number in found.tolist()}
    marks = Tokenizer(models.WordLevel(known | {_NOTHING: len(told.tokens)}, _NOTHING))
    _add_marks(marks, told)
    return marks


def _make_steps(told: GgufTokens) -> Tokenizer:
    """A tokenizer without a vocabulary: what texts go through before and after it."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE())
    if told.kind == "llama":
        _add_pieces(tokenizer, told.metadata)
    elif told.kind == "t5":
        _add_likeliest(tokenizer, told)
    else:
        _add_words(tokenizer, told)
    return tokenizer


def _make_model(told: GgufTokens) -> Any:
    from tokenizers import models

    listed, rules = list(told.tokens), _describe_model(told)
    if told.kind == "t5":
        pieces = list(zip(listed, _read_scores(told).tolist(), strict=True))
        return models.Unigram(pieces, rules["unknown"], byte_fallback=rules["falls_back"])
    numbers = _number_tokens(listed)
    if told.kind == "llama":
        unknown = rules["unknown"]
        return models.BPE(
            vocab=numbers,
            merges=_find_merges(listed, numbers, _read_scores(told).tolist()),
            unk_token=None if unknown is None else listed[unknown],
            fuse_unk=True,
            byte_fallback=rules["falls_back"],
        )
    merges = map(str, told.metadata.get("tokenizer.ggml.merges", []))
    return models.BPE(
        vocab=numbers,
        merges=[(left, right) for left, _, right in (text.partition(" ") for text in merges)],
        ignore_merges=rules["takes_whole"],
        byte_fallback=rules["falls_back"],
    )


def _add_words(tokenizer: Tokenizer, told: GgufTokens) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    def split(expression: str, behavior: str) -> Any:
        return pre_tokenizers.Split(Regex(expression), behavior)

    cut, numbers = told.find_cut(), told.tokens.numbers
    steps = [split(write_expression(expression), "isolated") for expression in cut.expressions]
    if cut.bytes_as_letters:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet()) - _NEVER
        lacking = {letter for letter in alphabet if letter not in numbers}
        if lacking:
            steps.append(split(_write_class(lacking), "removed"))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        if not _has_bytes(told.tokens):
            letters = (token for token in numbers if len(token) == 1)
            steps.append(split(_write_class(letters, "^"), "removed"))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _write_class(letters: Iterable[str], sign: str = "") -> str:
    """An expression for one of ``letters``, or with the sign ``^`` for any other character."""
    return f"[{sign}" + "".join(f"\\x{{{ord(letter):X}}}" for letter in sorted(letters)) + "]"


def _add_pieces(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    from tokenizers import decoders, normalizers

    leads = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    changes = _list_changes(metadata)
    changes += [normalizers.Prepend(_SPACE)] if leads else []
    tokenizer.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", _SPACE)])
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1, right=0)] if leads else steps
    )


def _add_likeliest(tokenizer: Tokenizer, told: GgufTokens) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    metadata = told.metadata
    changes = _list_changes(metadata)
    if changes:
        tokenizer.normalizer = normalizers.Sequence(changes)
    leads = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "always" if leads else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    falls_back = _describe_model(told)["falls_back"]
    steps: list[Any] = [decoders.ByteFallback()] if falls_back else []
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Metaspace(_SPACE, prepend_scheme=scheme)]
    )


def _list_changes(metadata: Mapping[str, Any]) -> list[Any]:
    """First changes of texts: characters are replaced by a table, spaces taken away."""
    from tokenizers import Regex, normalizers

    table = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", b""))
    changes: list[Any] = [normalizers.Precompiled(table)] if table else []
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        changes += [normalizers.Replace(Regex(r"\A +| +\z| +(?= )"), "")]
    return changes


def _read_scores(told: GgufTokens) -> F64:
    scores = told.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(told.tokens):
        raise refuse(told.file, "its pieces have no scores")
    return np.asarray(scores, np.float64)


def _find_merges(
    tokens: Sequence[str], numbers: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number in sorted(numbers.values(), key=lambda number: (-scores[number], number)):
        token = tokens[number]
        pairs = [
            (left, right)
            for cut in range(1, len(token))
            if (left := numbers.get(token[:cut])) is not None
            and (right := numbers.get(token[cut:])) is not None
        ]
        # The texts are those of the list of tokens: no copy of any is kept.
        merges += [(tokens[left], tokens[right]) for left, right in sorted(pairs)]
    return merges


def _number_tokens(tokens: Sequence[str]) -> dict[str, int]:
    """Numbers of tokens; the first counts where a file has a text twice."""
    numbers: dict[str, int] = {}
    for number, token in enumerate(tokens):
        numbers.setdefault(token, number)
    return numbers


def _add_marks(tokenizer: Tokenizer, told: GgufTokens) -> None:
    """Cut control tokens, and tokens that users have added, out of the text unchanged."""
    from tokenizers import AddedToken

    # Phi-3 was taught to swallow what follows its marks.
    name = str(told.metadata.get("general.name", "")).lower()
    takes = "phi-3" in name or "phi3" in name
    keeping = ("<unk>", "<s>", "<|endoftext|>")
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False, rstrip=takes and text not in keeping)
            for text in told.list_kinds(CONTROL, UNKNOWN)
        ]
    )
    own = [text for text in told.list_kinds(OWN) if text]
    tokenizer.add_tokens([AddedToken(text, normalized=False, rstrip=takes) for text in own])


def _frame_texts(
    tokenizer: Tokenizer, tokens: Sequence[str], begin: int | None, end: int | None
) -> None:
    from tokenizers import processors

    framing = [(tokens[number], number) for number in (begin, end) if number is not None]
    if not framing:
        return
    before = [] if begin is None else [tokens[begin]]
    after = [] if end is None else [tokens[end]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=framing,
    )


_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BYTE_PAIRS = 2
"""Kind of a model that merges pairs; 1 is one of which the likeliest division counts."""
_MOST_VARINT_BYTES = 10

Value = int | float | bytes


def convert_sentence_piece(file: Path, content: bytes, config: Mapping[str, Any]) -> bytes:
    """``content`` of ``file`` as ``tokenizer.json``; ``config`` is ``tokenizer_config.json``.

    `UserError` P543 if it is no such file, or of a kind that is unknown."""
    try:
        metadata = _describe(content, config)
    except (ValueError, struct.error, UnicodeDecodeError, IndexError) as error:
        raise UserError.of(
            "P543",
            f"cannot read the tokenizer {file}: {error}",
            help="give the model's tokenizer.json with --tokenizer",
        ) from None
    return make_tokenizer(file, metadata)


def _describe(content: bytes, config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that `make_tokenizer` reads, by the names that GGUF files have for it."""
    pieces, trainer, normalizer = [], {}, {}
    for field, value in _read_fields(content):
        if field == _PIECES:
            pieces.append(dict(_read_fields(_expect_bytes(value))))
        elif field == _TRAINER:
            trainer = dict(_read_fields(_expect_bytes(value)))
        elif field == _NORMALIZER:
            normalizer = dict(_read_fields(_expect_bytes(value)))
    if not pieces or not trainer or not normalizer:
        raise ValueError("it is cut off")
    tokens = [_expect_bytes(piece[1]).decode() for piece in pieces]
    scores = [float(piece.get(2, 0.0)) for piece in pieces]
    kinds = [int(piece.get(3, ORDINARY)) for piece in pieces]
    kind = trainer.get(3, 1)
    if kind not in (1, _BYTE_PAIRS):
        raise ValueError(f"its kind of model, {kind!r}, is unknown")
    for token, special in _list_added(config, len(tokens)):
        tokens.append(token)
        scores.append(0.0)
        kinds.append(CONTROL if special else OWN)
    begin = trainer.get(41, 1)
    return {
        "tokenizer.ggml.model": "llama" if kind == _BYTE_PAIRS else "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.precompiled_charsmap": normalizer.get(2, b""),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "tokenizer.ggml.bos_token_id": begin,
        "tokenizer.ggml.add_bos_token": bool(config.get("add_bos_token", kind == _BYTE_PAIRS)),
    }


def _list_added(config: Mapping[str, Any], count: int) -> Iterator[tuple[str, bool]]:
    """Tokens after the first ``count``, and whether they are special."""
    stated = config.get("added_tokens_decoder")
    added = stated if isinstance(stated, dict) else {}
    while isinstance(token := added.get(str(count)), dict):
        yield str(token.get("content", "")), token.get("special") is True
        count += 1


def _read_fields(content: bytes) -> Iterator[tuple[int, Value]]:
    """Numbers and values of a message's fields; `ValueError` if it is none."""
    place = 0
    while place < len(content):
        key, place = _read_varint(content, place)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, place = _read_varint(content, place)
            yield field, value
            continue
        if kind == 2:
            size, place = _read_varint(content, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is no SentencePiece model")
        part = content[place : place + size]
        if len(part) != size:
            raise ValueError("it is cut off")
        place += size
        yield field, struct.unpack("<f", part)[0] if kind == 5 else part


def _read_varint(content: bytes, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(_MOST_VARINT_BYTES):
        if place >= len(content):
            raise ValueError("it is cut off")
        byte = content[place]
        place += 1
        number |= (byte & 127) << (7 * shift)
        if byte < 128:
            return number, place
    raise ValueError("it is no SentencePiece model")


def _expect_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("it is no SentencePiece model")
    return value


def parse_config(content: bytes | None) -> dict[str, Any]:
    """Values of ``tokenizer_config.json``; empty if it is missing, or broken, as reported
    elsewhere."""
    try:
        values = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
