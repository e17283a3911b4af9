"""Makes a ``tokenizer.json`` from a GGUF file's metadata."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.diagnostics import UserError
from pi2.importing.text_cuts import CUTS, Cut, write_expression
from pi2.sandbox.tokenizer import TokenizerRefused, call_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ORDINARY, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens: ``tokenizer.ggml.token_type``."""

_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
"""Texts of tokens that end an answer."""
_ROLES: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens of code that is filled in, by their keys in a file; a key goes before a text."""
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_DEFAULTS = {"llama": {"bos": 1, "eos": 2}, "t5": {"eos": 1}}
"""Begin and end tokens where a file names none, by its kind of tokenizer."""


@dataclass(frozen=True, slots=True)
class TokenMarks:
    """What the tokens of a file are for."""

    kinds: tuple[int, ...]
    begin: int | None
    ends: tuple[int, ...]
    """Tokens after which an answer is over, the file's own end token first."""


def read_marks(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> TokenMarks:
    """The marks among ``tokens`` of the ``kinds`` that the file states."""
    numbers = {text: number for number, text in enumerate(tokens)}
    found = list(kinds)

    def read(role: str) -> int | None:
        default = _DEFAULTS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(role)
        for name in (role, _OLD_KEYS.get(role, role)):
            number = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
            if type(number) is int and 0 <= number < len(tokens):
                return number
        return None

    named = [read(role) for role in ("eos", "eot", "eom")]
    ends = {number: None for number in named if number is not None}
    for role, texts in _ROLES.items():
        number = read(role)
        if number is None:
            number = next((numbers[text] for text in texts if text in numbers), None)
            if number is not None:
                found[number] = CONTROL
        if number is not None and role in ("fim_pad", "fim_rep", "fim_sep"):
            ends[number] = None
    for number in sorted(numbers[text] for text in _ENDS & numbers.keys()):
        found[number] = CONTROL
        ends[number] = None
    known = {tokens[number] for number in ends}
    calls = known & {"<|call|>", "<|calls|>"}
    if "<|end|>" in known and calls and known & {"<|return|>", "<|flush|>"}:
        # gpt-oss and Solar end each message with it, and the answer with others.
        ends.pop(numbers["<|end|>"])
    if "</s>" in known and known & {"<|tool_response>", "<|plamo:eos|>"}:
        found[numbers["</s>"]] = ORDINARY
        ends.pop(numbers["</s>"])
    return TokenMarks(tuple(found), read("bos"), tuple(ends))


_SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""
_ELSEWHERE = {
    "bert": "it is of models that make no text",
    "hybriddna": "pi2 does not cut DNA into words",
    "rwkv": "pi2 knows no model that has it",
    "plamo2": "pi2 knows no model that has it",
    "whitespace": "it is of models that make no text",
}
"""Kinds that llama.cpp knows besides, and why pi2 does not take them."""
_NEVER = frozenset("ÀÁõö÷øùúûüýþÿ")
"""Letters of bytes that no text has in UTF-8."""

_MOST_CHARACTERS = 4096
"""In a token: every place where it could be divided is looked at."""

_HELP = "give the tokenizer.json of the original checkpoint, or its folder, with --tokenizer"


def make_tokenizer(file: Path, metadata: Mapping[str, Any]) -> bytes:
    """The tokenizer of ``file`` as ``tokenizer.json``; `UserError` P543 if its kind is unknown or
    its lists contradict each other."""
    tokens = _read_tokens(file, metadata)
    marks = read_marks(metadata, tokens, _read_kinds(file, metadata, tokens))
    longest = max((len(token) for token in tokens), default=0)
    if longest > _MOST_CHARACTERS:
        raise _refuse(file, f"a token has {longest} characters")

    def build() -> str:
        tokenizer, begins = _build(file, metadata, tokens, marks.kinds)
        _add_marks(tokenizer, metadata, tokens, marks.kinds)
        ends = metadata.get("tokenizer.ggml.add_eos_token", False)
        _frame_texts(
            tokenizer,
            tokens,
            marks.begin if begins else None,
            marks.ends[0] if marks.ends and ends else None,
        )
        return str(tokenizer.to_str())

    try:
        return call_library(build).encode()
    except TokenizerRefused as error:
        raise _refuse(file, str(error)) from None


def find_marks(file: Path, metadata: Mapping[str, Any], vocab: int = 0) -> TokenMarks:
    """The marks of ``file``; those that its keys name, of ``vocab`` tokens, where it has no list of
    tokens that can be used: `make_tokenizer` says that."""
    try:
        tokens = _read_tokens(file, metadata)
        kinds = _read_kinds(file, metadata, tokens)
    except UserError:
        tokens, kinds = [""] * vocab, [1] * vocab
    return read_marks(metadata, tokens, kinds)


def _read_tokens(file: Path, metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab") or tokens is None:
        raise _refuse(file, "it has no tokenizer")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _refuse(file, "tokenizer.ggml.tokens is not a list of texts")
    return tokens


def _read_kinds(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    kinds = metadata.get("tokenizer.ggml.token_type")
    try:
        found = [1] * len(tokens) if kinds is None else [int(number) for number in kinds]
    except (TypeError, ValueError, OverflowError) as error:
        raise _refuse(file, str(error)) from None
    if len(found) != len(tokens):
        raise _refuse(file, f"{len(tokens)} tokens have {len(found)} types")
    return found


def _build(
    file: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    kind = metadata.get("tokenizer.ggml.model")
    stated = metadata.get("tokenizer.ggml.add_bos_token")
    if kind in ("gpt2", "gemma4"):
        cut = _find_cut(file, "gemma4" if kind == "gemma4" else metadata.get("tokenizer.ggml.pre"))
        begins = cut.begins if stated is None else bool(stated)
        return _make_pairs(metadata, tokens, cut), begins or cut.always_begins
    if kind == "llama":
        return _make_sentence_piece(file, metadata, tokens, kinds), stated in (None, True)
    if kind == "t5":
        return _make_unigram(file, metadata, tokens, kinds), stated is True
    reason = _ELSEWHERE.get(str(kind), "known are gpt2, gemma4, llama and t5")
    raise _refuse(file, f"its tokenizer is of the kind {kind!r}: {reason}")


def _find_cut(file: Path, name: object) -> Cut:
    """How ``tokenizer.ggml.pre`` says that words are cut."""
    cut = CUTS.get("" if name is None else str(name))
    if cut is None:
        near = get_close_matches(str(name), CUTS, 3, 0.5)
        known = f"the nearest of {len(CUTS) - 1} known: {', '.join(near)}" if near else ""
        known = known or f"known are {', '.join(sorted(CUTS)[1:])}"
        raise _refuse(file, f"how {name!r} cuts text into words is unknown; {known}")
    return cut


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


def _make_pairs(metadata: Mapping[str, Any], tokens: Sequence[str], cut: Cut) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    def split(expression: str, behavior: str) -> Any:
        return pre_tokenizers.Split(Regex(expression), behavior)

    numbers = _number_tokens(tokens)
    has_bytes = all(f"<0x{byte:02X}>" in numbers for byte in range(256))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=numbers,
            merges=_read_merges(metadata),
            ignore_merges=cut.whole_words,
            byte_fallback=not cut.bytes_as_letters and has_bytes,
        )
    )
    steps = [split(write_expression(expression), "isolated") for expression in cut.expressions]
    if cut.bytes_as_letters:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        letters = frozenset(pre_tokenizers.ByteLevel.alphabet())
        lacking = letters - numbers.keys() - _NEVER
        if lacking:
            steps.append(split(_write_class(lacking), "removed"))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        if not has_bytes:
            steps.append(split(_write_class(filter(_is_letter, numbers), "^"), "removed"))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _is_letter(token: str) -> bool:
    return len(token) == 1


def _write_class(letters: Iterable[str], sign: str = "") -> str:
    """An expression for one of ``letters``, or with the sign ``^`` for any other character."""
    return f"[{sign}" + "".join(f"\\x{{{ord(letter):X}}}" for letter in sorted(letters)) + "]"


def _make_sentence_piece(
    file: Path, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _read_scores(file, metadata, tokens)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == 2), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_number_tokens(tokens),
            merges=_find_merges(tokens, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
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
    unknown = next((place for place, kind in enumerate(kinds) if kind == UNKNOWN), None)
    pieces = list(zip(tokens, scores, strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=BYTE in kinds))
    changes = _list_changes(metadata)
    if changes:
        tokenizer.normalizer = normalizers.Sequence(changes)
    leads = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "always" if leads else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme)
    steps: list[Any] = [decoders.ByteFallback()] if BYTE in kinds else []
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
        changes += [normalizers.Replace(Regex(r"\A +| +\z| +(?= )"), "")]
    return changes


def _read_scores(file: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise _refuse(file, "its pieces have no scores")
    return [float(score) for score in scores]


def _find_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of tokens by the score of both together, and of a token by their numbers."""
    numbers = _number_tokens(tokens)
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


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
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


def _add_marks(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Take control tokens, and those that users have added, as they are out of the text."""
    from tokenizers import AddedToken

    pairs = list(zip(tokens, kinds, strict=True))
    controls = [token for token, kind in pairs if kind in (CONTROL, UNKNOWN)]
    own = [token for token, kind in pairs if kind == OWN]
    # Phi-3 was taught to swallow what follows its marks.
    name = str(metadata.get("general.name", "")).lower()
    takes = "phi-3" in name or "phi3" in name
    keeping = ("<unk>", "<s>", "<|endoftext|>")
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False, rstrip=takes and text not in keeping)
            for text in controls
        ]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, rstrip=takes) for text in own if text])


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


def _refuse(file: Path, problem: str) -> UserError:
    return UserError.of(
        "P543", f"no tokenizer can be made from {file}: {problem}", help=_HELP, file=str(file)
    )


_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_BYTE_PAIRS = 2
"""Kind of a model that merges pairs; 1 is one of which the likeliest division counts."""
_ORDINARY, _CONTROL, _OWN = 1, 3, 4
_MOST_VARINT_BYTES = 10

Value = int | float | bytes


def convert_sentence_piece(file: Path, content: bytes, config: Mapping[str, Any]) -> bytes:
    """``content`` of ``file`` as ``tokenizer.json``; ``config`` is ``tokenizer_config.json``.

    `UserError` P543 if it is no such file, or of a kind that is unknown.
    """
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
    kinds = [int(piece.get(3, _ORDINARY)) for piece in pieces]
    kind = trainer.get(3, 1)
    if kind not in (1, _BYTE_PAIRS):
        raise ValueError(f"its kind of model, {kind!r}, is unknown")
    for token, special in _list_added(config, len(tokens)):
        tokens.append(token)
        scores.append(0.0)
        kinds.append(_CONTROL if special else _OWN)
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
    """Values of ``tokenizer_config.json``; empty if there is none, or if it is broken, which is
    said elsewhere."""
    try:
        values = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
