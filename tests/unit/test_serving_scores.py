"""What clients are told of tokens' probabilities, and of bodies that are wrong."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from pi2.engine.answer import TokenScore
from pi2.serving.completions import CompletionScores, describe_chat_scores
from pi2.serving.errors import explain_invalid
from pi2.serving.openai_schema import CompletionRequest
from tests.helpers.tables import in_table

EURO = "\u20ac".encode()


def make_model(tokenizer: Tokenizer) -> Any:
    def decode(ids: list[int], *, special: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=not special))

    return SimpleNamespace(decode=decode, coder=tokenizer)


def make_byte_level() -> Tokenizer:
    vocab = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        (decoders.ByteLevel()),
    )
    return tokenizer


def make_fallback() -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


@pytest.mark.parametrize("make", [make_byte_level, make_fallback])
def test_parts_of_a_character_have_their_bytes(make: Any) -> None:
    tokenizer = make()
    parts = tokenizer.encode("\u20ac").ids
    assert len(parts) == len(EURO) == 3
    scores = [TokenScore(token, -1.0, ((token, -1.0),)) for token in parts]
    content = describe_chat_scores(make_model(tokenizer), scores)["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == EURO
    assert [token["top_logprobs"][0]["bytes"] for token in content] == [[byte] for byte in EURO]


def test_of_tokens_with_the_same_text_the_likeliest_is_told() -> None:
    tokenizer = make_byte_level()
    first, second, _ = tokenizer.encode("\u20ac").ids
    score = TokenScore(first, -1.0, ((first, -1.0), (second, -2.0)))
    told = CompletionScores(make_model(tokenizer), [first], "").write([score])
    assert told["top_logprobs"] == [{"\ufffd": -1.0}]


def test_the_space_before_a_word_is_the_words_wherever_it_stands() -> None:
    # Such decoders leave out the space with which a text begins.
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "\u2581the": 1, "\u2581end": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids, later = [0, 1, 2], TokenScore(1, -1.0, ((1, -1.0), (2, -2.0)))
    scores = CompletionScores(make_model(tokenizer), ids, " the end")
    told = scores.write_prompt([TokenScore(1, -3.0, ((2, -1.0),)), TokenScore(2, -4.0, ())])
    assert told == {
        "tokens": ["<s>", " the", " end"],
        "token_logprobs": [None, -3.0, -4.0],
        "top_logprobs": [None, {" end": -1.0}, {}],
        "text_offset": [0, 0, 4],
    }
    told = scores.write([later, later])
    assert told["tokens"] == [" the", " the"]
    assert told["top_logprobs"] == [{" the": -1.0, " end": -2.0}] * 2
    assert told["text_offset"] == [8, 12]


@in_table
def test_a_value_that_may_be_of_several_types_is_explained_by_the_nearest(
    body: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(json.dumps({"model": "m", **body}))
    told = explain_invalid(caught.value)
    assert told.param == param and said in told.message
