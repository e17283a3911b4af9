"""Tokenizers that are made from GGUF metadata cut text as the original ones do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_checkpoint import open_gguf
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import SPACE, make_sentence_piece, write_gguf
from tests.helpers.gguf_tensors import translate
from tests.helpers.models import draw_weights, make_model

TEXTS = (
    "hello world",
    "  two  spaces",
    "naïve café ☃ 😀",
    "",
    "a\nb\tc",
    "x12345 67",
    "<s> no mark",
)


def cut_by_scores(metadata: dict[str, Any], text: str) -> list[int]:
    """What llama.cpp does: of all neighbours, the pair that makes the best piece is merged."""
    tokens = metadata["tokenizer.ggml.tokens"]
    numbers = {token: number for number, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    kinds = metadata["tokenizer.ggml.token_type"]
    parts = list((SPACE + text).replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-scores[numbers[a + b]], place)
            for place, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in numbers and kinds[numbers[a + b]] == 1
        ]
        if not pairs:
            break
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        pieces = [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
        ids += [numbers[part]] if part in numbers else pieces
    return ids


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_sentence_piece_merges_the_best_pair_first(text: str) -> None:
    metadata = make_sentence_piece()
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == cut_by_scores(metadata, text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).ids == [1, *ids]


def test_marks_are_taken_whole() -> None:
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), make_sentence_piece()))
    ids = tokenizer.encode("<s>hello</s>", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (1, 2) and len(ids) > 2
    assert tokenizer.decode([1, *tokenizer.encode("hello").ids, 2]) == "hello"


def test_no_begin_mark_where_the_file_says_so() -> None:
    metadata = make_sentence_piece() | {"tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    assert 1 not in tokenizer.encode("hello").ids


def make_byte_level(pre: str | None) -> tuple[Tokenizer, dict[str, Any]]:
    """A trained byte-level tokenizer, and the metadata that a GGUF file has of it."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

    from pi2.importing.gguf_tokenizer import _CUTS

    expression = _CUTS.get(pre or "default")
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cut])
    elif expression is not None:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, cut])
    else:
        tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        [*TEXTS, "hello there world 123 1234 12345 it's we'll"] * 5, trainer
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    stated = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stated["model"]["merges"]],
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 2) + [3, 4], np.int32),
    }
    return tokenizer, metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})


@pytest.mark.parametrize("pre", [None, "gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_pairs(pre: str | None) -> None:
    original, metadata = make_byte_level(pre)
    made = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    for text in [*TEXTS, "it's 12345 we'll<|end|>see <tool>hello"]:
        ids = original.encode(text).ids
        assert made.encode(text).ids == ids, text
        assert made.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, "not a list of texts"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "3 types"),
        ({"tokenizer.ggml.merges": ["no such"]}, ""),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_what_is_unknown_asks_for_the_original(changes: dict[str, Any], words: str) -> None:
    _, metadata = make_byte_level("gpt-2")
    with pytest.raises(UserError) as caught:
        make_tokenizer(Path("x.gguf"), metadata | changes)
    text = str(caught.value)
    assert "P543" in text and "x.gguf" in text and "--tokenizer" in text and words in text


def test_tokenizer_and_chat_template_go_into_the_store(tmp_path: Path) -> None:
    metadata = make_sentence_piece()
    size = len(metadata["tokenizer.ggml.tokens"])
    model = make_model({"shape": {"vocab": size}, "predictor": None})
    weights = draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 64}
    changes = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in metadata.items()
    }
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    changes["tokenizer.chat_template"] = template
    changes["tokenizer.ggml.eot_token_id"] = 5
    file = write_gguf(tmp_path / "tiny.gguf", config, translate(weights, config), changes=changes)
    made = describe_checkpoint(file).model
    assert (made.tokenizer.bos, made.tokenizer.eos, made.tokenizer.add_bos) == (1, (2, 5), True)
    convert_checkpoint(file, made, tmp_path / "store")
    assert (tmp_path / "store/chat_template.jinja").read_text() == template
    special = json.loads((tmp_path / "store/tokenizer_config.json").read_text())
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    stored = Tokenizer.from_file(str(tmp_path / "store/tokenizer.json"))
    assert stored.encode("hello world").ids == [1, *cut_by_scores(metadata, "hello world")]
    assert open_gguf(file).read_file("generation_config.json") is None
