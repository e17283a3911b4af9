"""Tokenizers with compact tables make the tokens and texts that the tokenizers library makes."""

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pi2.engine.answer import TokenDecoder
from pi2.importing import gguf_tokenizer
from pi2.importing.gguf_tokenizer import make_table, make_tokenizer, read_merges
from pi2.sandbox.trial import TEXTS
from pi2.tokens.table_tokenizer import TableTokenizer
from pi2.tokens.texts import ListedMerges, Texts
from tests.helpers.gguf_files import make_sentence_piece

FILE = Path("x.gguf")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden/gguf_tokenizers.json").read_text())
KINDS = [
    (vocabulary, kind)
    for vocabulary, made in GOLDEN["vocabularies"].items()
    for kind in made["kinds"]
]
PIECES = ("1234", "hello", " ", "\n\n", "漢字", "é", "\u0301", "ไทย", "ع", "😀", "'s", "<s>", "x\t")


def make_metadata(vocabulary: str, kind: str) -> dict[str, Any]:
    metadata = GOLDEN["vocabularies"][vocabulary]["metadata"] | {"tokenizer.ggml.pre": kind}
    merges = metadata.get("tokenizer.ggml.merges", [])
    return metadata | {"tokenizer.ggml.merges": Texts.join(merges)}


def make_both(metadata: dict[str, Any]) -> tuple[TableTokenizer, Tokenizer]:
    table = make_table(FILE, metadata)
    assert table is not None
    return table, Tokenizer.from_buffer(make_tokenizer(FILE, metadata))


def check_equal(table: TableTokenizer, library: Tokenizer, texts: Sequence[str]) -> None:
    draw = random.Random(3)
    words = [*PIECES, *library.get_vocab()]
    for text in [*texts, *("".join(draw.choices(words, k=9)) for _ in range(9))]:
        for special in (False, True):
            found = table.encode(text, add_special_tokens=special).ids
            assert found == library.encode(text, add_special_tokens=special).ids, text
            for skips in (False, True):
                assert table.decode(found, skips) == library.decode(found, skips)
        streams = TokenDecoder(table.decode), TokenDecoder(lambda ids: library.decode(list(ids)))
        for token in found[:30]:
            assert streams[0].push(token) == streams[1].push(token)
        assert streams[0].flush() == streams[1].flush()
    for token in range(library.get_vocab_size() + 2):
        assert table.id_to_token(token) == library.id_to_token(token)
        assert table.decode([token], False) == library.decode([token], False)


@pytest.mark.parametrize(("vocabulary", "kind"), KINDS)
def test_tokens_are_the_librarys_whatever_cuts_the_text(vocabulary: str, kind: str) -> None:
    check_equal(*make_both(make_metadata(vocabulary, kind)), GOLDEN["texts"][::4])


@pytest.mark.parametrize("leads", [True, False])
def test_pieces_with_scores_merge_as_in_the_library(leads: bool) -> None:
    metadata = make_sentence_piece() | {"tokenizer.ggml.add_space_prefix": leads}
    check_equal(*make_both(metadata), [*TEXTS, *GOLDEN["texts"]])


def test_the_library_is_made_when_it_is_asked_for() -> None:
    table, library = make_both(make_sentence_piece())
    assert table.library.to_str() == library.to_str()
    assert table.token_to_id("</s>") == library.token_to_id("</s>")
    assert table.token_to_id("no such token") is None
    found, expected = table.get_added_tokens_decoder(), library.get_added_tokens_decoder()
    assert {token: own.content for token, own in found.items()} == {
        token: own.content for token, own in expected.items()
    }


@pytest.mark.parametrize("fault", ["twice", "unknown merge", "table of characters", "no number"])
def test_what_a_table_cannot_have_is_left_to_the_library(fault: str) -> None:
    metadata: dict[str, Any] = make_sentence_piece()
    if fault == "twice":
        metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][-2]
    elif fault == "unknown merge":
        metadata = make_metadata(*KINDS[0])
        merges = [*metadata["tokenizer.ggml.merges"], "never there"]
        metadata["tokenizer.ggml.merges"] = Texts.join(merges)
    elif fault == "table of characters":
        metadata["tokenizer.ggml.precompiled_charsmap"] = np.zeros(4, np.uint8)
    else:
        metadata["tokenizer.ggml.scores"] = metadata["tokenizer.ggml.scores"] * np.float32(np.nan)
    assert make_table(FILE, metadata) is None


@pytest.mark.parametrize("texts", [[], [""], ["a"], ["", "ab", "", "漢字", "x" * 300, "a"]])
def test_texts_are_read_as_they_were_written(texts: list[str]) -> None:
    coded = [text.encode() for text in texts]
    data = b"head" + b"".join(struct.pack("<Q", len(text)) + text for text in coded)
    found, end = Texts.read(data + b"tail", 4, len(texts))
    assert (list(found), end) == (texts, len(data))
    assert found.are_whole and Texts.join(texts) == found
    assert [found.numbers[text] for text in texts] == [texts.index(text) for text in texts]
    assert found.numbers.get("b") is None
    with pytest.raises(struct.error):
        Texts.read(data[:-1], 4, len(texts) + 1)


def test_texts_that_share_a_character_are_not_whole() -> None:
    data = np.frombuffer("é".encode(), np.uint8)
    assert not Texts(data, np.array([0, 1]), np.array([1, 1])).are_whole


def test_merges_that_were_kept_are_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gguf_tokenizer, "MANY_MERGES", 1)
    metadata = make_metadata(*KINDS[0])
    merges, tokens = (metadata[f"tokenizer.ggml.{name}"] for name in ("merges", "tokens"))
    tokens = tokens if isinstance(tokens, Texts) else Texts.join(tokens)
    read = ListedMerges.read(merges, tokens)
    assert read is not None
    for _ in range(3):
        assert read_merges(merges, tokens) == read
        (file,) = (tmp_path / "tokenizers").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert read_merges(merges, tokens) == read
    assert file.read_bytes() == content
