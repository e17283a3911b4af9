"""A small ``tokenizer.json``, and what has been done to it to make the tokenizer library fail."""

import json
from typing import Any

_VOCABULARY = {token: index for index, token in enumerate([*"abcdefgh ", "<unk>"])}


def write_tokenizer(**changes: Any) -> bytes:
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": _VOCABULARY, "merges": [],
        },
    }  # fmt: skip
    return json.dumps(document | changes).encode()


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _pad(**changes: Any) -> dict[str, Any]:
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    return padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"} | changes


def _cut(length: int, stride: int) -> dict[str, Any]:
    order = {"direction": "Right", "strategy": "LongestFirst"}
    return order | {"max_length": length, "stride": stride}


_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_PIECES = {"unk_token": "[UNK]", "vocab": {"a": 0}}

HARMLESS: dict[str, bytes] = {
    "a stride beyond what texts are cut to": write_tokenizer(truncation=_cut(2, 5)),
    "texts that are cut to nothing": write_tokenizer(truncation=_cut(0, 0)),
    "padding to 10^9 tokens": write_tokenizer(padding=_pad(strategy={"Fixed": 10**9})),
    "padding to multiples of 10^9": write_tokenizer(padding=_pad(pad_to_multiple_of=10**9)),
    "padding to multiples of 0": write_tokenizer(padding=_pad(pad_to_multiple_of=0)),
}
"""What only texts that are cut or filled up would meet: pi2 does neither."""

HOSTILE: dict[str, bytes] = {
    "words of no characters": write_tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "empty text is replaced": write_tokenizer(normalizer=_replace("", "x")),
    "empty text is replaced in answers": write_tokenizer(decoder=_replace("", "x")),
    "a table that is cut": write_tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "a table that leads out of itself": write_tokenizer(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}
    ),
    "a template without its token": write_tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {},
        }
    ),
    "one character becomes 10^12": write_tokenizer(
        normalizer={"type": "Sequence", "normalizers": [_replace("a", "a" * 10)] * 12}
    ),
    "one rare character becomes 10^12": write_tokenizer(
        normalizer={"type": "Sequence", "normalizers": [_replace("\u2603", "\u2603" * 10)] * 12}
    ),
    "every character becomes two, forty times": write_tokenizer(
        normalizer={"type": "Sequence", "normalizers": [_replace(".", "zz", "Regex")] * 40}
    ),
    "one character becomes 10^5 in answers": write_tokenizer(
        decoder={"type": "Sequence", "decoders": [_replace("a", "a" * 10)] * 5}
    ),
    "a million characters before every text": write_tokenizer(
        normalizer={"type": "Prepend", "prepend": "a" * 10**6}
    ),
    "more is taken off than there is": write_tokenizer(
        decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}
    ),
    "an expression that never ends": write_tokenizer(
        pre_tokenizer=_SPLIT | {"pattern": {"Regex": "(a+)+$"}}
    ),
    "pieces of words without an unknown token": write_tokenizer(
        model=_PIECES
        | {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    ),
    "words without an unknown token": write_tokenizer(model=_PIECES | {"type": "WordLevel"}),
    "likely pieces without an unknown token": write_tokenizer(
        model={"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
    ),
    "a number of an unknown token that is none": write_tokenizer(
        model={"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]], "byte_fallback": False}
    ),
    "a key twice": write_tokenizer().replace(
        b'"normalizer": null',
        b'"normalizer": {"type": "Prepend", "prepend": "' + b"a" * 9999 + b'", "prepend": "a"}',
    ),
    "sequences in sequences in sequences": b'{"normalizer": ' + b"[" * 9999 + b"]" * 9999 + b"}",
    "no object": b"null",
    "nothing": b"",
}
"""What nobody should use, by what is wrong with it."""
