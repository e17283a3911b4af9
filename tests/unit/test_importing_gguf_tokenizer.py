"""Tokenizers that are made from GGUF metadata cut text as the original ones do."""

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
from pi2.importing.gguf_tokens import CUTS, find_marks
from pi2.importing.new_model import describe_checkpoint
from pi2.sandbox.coding import list_endings
from tests.helpers.gguf_files import SPACE, make_sentence_piece, write_gguf
from tests.helpers.gguf_tensors import list_settings, translate
from tests.helpers.models import draw_weights, make_model

TEXTS = (
    "hello world", "  two  spaces", "naïve café ☃ 😀", "", "a\nb\tc", "x12345 67", "<s> no mark",
)  # fmt: skip


def cut_by_scores(metadata: dict[str, Any], text: str) -> list[int]:
    """What llama.cpp does: of all neighbours, the pair that makes the best piece is merged."""
    numbers = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
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
    assert tokenizer.decode(ids) == text and tokenizer.encode(text).ids == [1, *ids]


def test_marks_are_taken_whole() -> None:
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), make_sentence_piece()))
    ids = tokenizer.encode("<s>hello</s>", add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (1, 2) and len(ids) > 2
    assert tokenizer.decode([1, *tokenizer.encode("hello").ids, 2]) == "hello"


def test_no_begin_mark_where_the_file_says_so() -> None:
    metadata = make_sentence_piece() | {"tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    assert 1 not in tokenizer.encode("hello").ids


GOLDEN = json.loads((Path(__file__).parents[1] / "golden/gguf_tokenizers.json").read_text())
"""What llama.cpp makes of texts: see tools/make_gguf_goldens.py."""
KINDS = [
    (vocabulary, kind)
    for vocabulary, made in GOLDEN["vocabularies"].items()
    for kind in made["kinds"]
]


def make_golden(vocabulary: str, kind: str) -> Tokenizer:
    metadata = GOLDEN["vocabularies"][vocabulary]["metadata"] | {"tokenizer.ggml.pre": kind}
    return Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))


def test_all_kinds_are_tried() -> None:
    assert {kind for vocabulary, kind in KINDS if vocabulary != "llama"} | {""} == set(CUTS)


@pytest.mark.parametrize(("vocabulary", "kind"), KINDS)
def test_every_kind_cuts_texts_as_llama_cpp_does(vocabulary: str, kind: str) -> None:
    made = GOLDEN["vocabularies"][vocabulary]
    expected = made["kinds"][kind]
    tokenizer = make_golden(vocabulary, kind)
    for text, results, place in zip(
        GOLDEN["texts"], made["results"], expected["results"], strict=True
    ):
        marked, plain = results[place][0], results[place][-1]
        tokenizer.encode_special_tokens = False
        assert tokenizer.encode(text, add_special_tokens=False).ids == marked, text
        tokenizer.encode_special_tokens = True  # what users write of marks is text
        assert tokenizer.encode(text, add_special_tokens=False).ids == plain, text
    assert (tokenizer.encode("a").ids[0] == 1) is expected["begins"]


@pytest.mark.parametrize("vocabulary", ["gpt2", "gemma4", "llama"])
def test_texts_come_back(vocabulary: str) -> None:
    tokenizer = make_golden(vocabulary, "gemma4" if vocabulary == "gemma4" else "llama-bpe")
    for text in GOLDEN["texts"]:
        if "<s>" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("case", GOLDEN["ends"], ids=lambda case: case["tokens"][0])
def test_answers_end_where_llama_cpp_ends_them(case: dict[str, Any]) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": case["tokens"]}
    marks = find_marks(Path("x.gguf"), metadata | case["keys"])
    assert sorted(marks.ends) == case["ends"]
    assert marks.ends[0] == case["keys"].get("tokenizer.ggml.eos_token_id")


def test_an_end_token_follows_whole_texts_where_the_file_says_so() -> None:
    metadata = make_sentence_piece() | {"tokenizer.ggml.eos_token_id": 2}
    for adds in (True, False):
        changes = {"tokenizer.ggml.add_eos_token": adds}
        tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata | changes))
        assert (tokenizer.encode("hello").ids[-1] == 2) is adds
        assert list_endings(tokenizer) == [2] * adds


def test_characters_without_tokens_are_left_out() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    assert tokenizer.encode("axb").ids == [0, 1] and tokenizer.encode("abc").ids == [2]


def test_marks_of_phi_3_swallow_the_spaces_after_them() -> None:
    metadata = make_sentence_piece() | {"general.name": "Phi-3 mini"}
    tokens = [*metadata["tokenizer.ggml.tokens"], "<|user|>"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*metadata["tokenizer.ggml.scores"], 0.0],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 3],
    }
    tokenizer = Tokenizer.from_buffer(make_tokenizer(Path("x.gguf"), metadata))
    spaced, plain = tokenizer.encode("<|user|>\n hello"), tokenizer.encode("<|user|>hello")
    assert spaced.ids == plain.ids


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "make no text"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.model": "new"}, "known are gpt2"),
        ({"tokenizer.ggml.model": "none"}, "no tokenizer"),
        ({"tokenizer.ggml.pre": "qwen4"}, "the nearest of 90 known: qwen2, qwen35"),
        ({"tokenizer.ggml.pre": "zzz"}, "known are a.x-4.0, afmoe"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, "not a list of texts"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "3 types"),
        ({"tokenizer.ggml.merges": ["no such"]}, ""),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
    ],
)
def test_what_is_unknown_asks_for_the_original(changes: dict[str, Any], words: str) -> None:
    metadata = GOLDEN["vocabularies"]["gpt2"]["metadata"]
    with pytest.raises(UserError) as caught:
        make_tokenizer(Path("x.gguf"), metadata | changes)
    text = str(caught.value)
    assert "P543" in text and "x.gguf" in text and "--tokenizer" in text and words in text


def test_tokenizer_and_chat_template_go_into_the_store(tmp_path: Path) -> None:
    metadata = make_sentence_piece()
    size = len(metadata["tokenizer.ggml.tokens"])
    model = make_model({"shape": {"vocab": size}, "predictor": None})
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    more = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 5}
    tensors = translate(model, draw_weights(model))
    settings = list_settings(model) | metadata | more
    file = write_gguf(tmp_path / "tiny.gguf", "llama", settings, tensors)
    made = describe_checkpoint(file).model
    assert (made.tokenizer.bos, made.tokenizer.eos, made.tokenizer.add_bos) == (1, (2, 5), True)
    convert_checkpoint(file, made, tmp_path / "store")
    assert (tmp_path / "store/chat_template.jinja").read_text() == template
    special = json.loads((tmp_path / "store/tokenizer_config.json").read_text())
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    stored = Tokenizer.from_file(str(tmp_path / "store/tokenizer.json"))
    assert stored.encode("hello world").ids == [1, *cut_by_scores(metadata, "hello world")]
    assert open_gguf(file).read_file("generation_config.json") is None
