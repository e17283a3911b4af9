"""Makes a ``tokenizer.json`` from ``tokenizer.model``, the file of the SentencePiece library.

The file is one message of protocol buffers: pieces with scores and kinds, how they were trained,
and how text is normalised (sentencepiece_model.proto of that library).  Nothing but these is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.importing.gguf_tokenizer import make_tokenizer

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
