"""``tokenizer.model`` becomes a tokenizer that cuts text as the SentencePiece library does."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pi2.diagnostics import UserError
from pi2.engine.answer import TokenDecoder
from pi2.importing.convert import convert_checkpoint
from pi2.importing.gguf_tokenizer import convert_sentence_piece
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import draw_weights, make_model

FOLDER = Path(__file__).resolve().parents[1] / "golden/tokenizers"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def read(name: str, **config: object) -> Tokenizer:
    file = FOLDER / name / "tokenizer.model"
    return Tokenizer.from_buffer(convert_sentence_piece(file, file.read_bytes(), config))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_library(name: str) -> None:
    expected = json.loads((FOLDER / name / "expected.json").read_text("utf-8"))
    tokenizer = read(name)
    for text, ids in expected.items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_back(name: str) -> None:
    tokenizer = read(name)
    for text in ("Weights are read from flash.", "plan.toml: budget = 4 GiB"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        decoder = TokenDecoder(tokenizer.decode)
        streamed = "".join([*map(decoder.push, ids), decoder.flush()])
        # After a prompt, the space before the first word counts.
        assert streamed == (text if name == "likeliest-bytes" else f" {text}")


def test_begin_tokens_are_those_that_the_configuration_wants() -> None:
    assert read("pairs").encode("a").ids[0] == 1
    assert read("pairs", add_bos_token=False).encode("a").ids[0] != 1
    assert read("likeliest").encode("a").ids[0] != 1


def test_added_tokens_follow_the_pieces() -> None:
    size = read("pairs").get_vocab_size()
    added = {str(size): {"content": "<|end|>", "special": True}}
    assert read("pairs", added_tokens_decoder=added).encode("a<|end|>").ids[-1] == size


@pytest.mark.parametrize("keep", [0, 1, 30, 2000])
def test_broken_files_are_findings(keep: int) -> None:
    file = FOLDER / "pairs" / "tokenizer.model"
    with pytest.raises(UserError, match=r"P543.*tokenizer\.model"):
        convert_sentence_piece(file, file.read_bytes()[:keep], {})


def test_a_checkpoint_may_have_no_other_tokenizer(tmp_path: Path) -> None:
    model = make_model({"shape": {"vocab": 448}, "predictor": None})
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, draw_weights(model))
    (checkpoint / "tokenizer.json").unlink()
    content = (FOLDER / "pairs" / "tokenizer.model").read_bytes()
    (checkpoint / "tokenizer.model").write_bytes(content)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"bos_token_id": 1, "max_position_embeddings": 64, "hidden_act": "silu"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert describe_checkpoint(checkpoint).model.tokenizer.add_bos
    convert_checkpoint(checkpoint, model, tmp_path / "store")
    made = Tokenizer.from_file(str(tmp_path / "store" / "tokenizer.json"))
    assert made.encode("Weights").ids == read("pairs").encode("Weights").ids
    # The same file, given by hand.
    (checkpoint / "tokenizer.model").rename(tmp_path / "mine.model")
    convert_checkpoint(checkpoint, model, tmp_path / "other", tokenizer=tmp_path / "mine.model")
    other = tmp_path / "other" / "tokenizer.json"
    assert other.read_bytes() == (tmp_path / "store" / "tokenizer.json").read_bytes()
