"""Checkpoints as one GGUF file: golden models give their logits, and quantised weights stay."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import pi2
from pi2.formats import find_format, find_packing
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.gguf_file import read_gguf, take_blocks
from pi2.importing.gguf_keys import describe_vocabulary
from pi2.importing.gguf_tokenizer import make_tokenizer
from pi2.importing.gguf_tokens import CUTS
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.quantize import Wish, quantize_checkpoint
from pi2.plan.weights.layout import Precision
from tests.helpers.gguf_tensors import permute
from tests.helpers.goldens import UNROUNDED, copy_checkpoint, measure_error, read_golden
from tests.helpers.tables import in_table
from tests.helpers.whole_files import NEAR, make_file

GOLDEN_TOKENIZERS = Path(__file__).parents[1] / "golden/gguf_tokenizers.json"
FAR = {"bitnet": 1e-3}
"""Goldens whose scales a file has in 16 bits."""


def make(name: str, folder: Path) -> Path:
    return make_file(copy_checkpoint(name, folder / "checkpoint"), folder / "made.gguf")


@in_table
def test_files_of_golden_checkpoints_give_their_logits(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    with pi2.load(make(name, tmp_path), set={**UNROUNDED, "kv.context": 64}) as model:
        found = model.logits(golden.prompt)
    assert measure_error(found, golden.logits) < FAR.get(name, NEAR)


SAME = {"arcee": "arcee", "llama": "llama", "mixtral": "llama", "gemma": "gemma", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen2-moe": "qwen2moe", "lfm2-plain": "lfm2", "qwen3-5": "qwen35",
    "cohere": "command-r", "granite-moe-shared": "granitemoe", "phi3-longrope": "phi3",
    "llama-llama3": "llama", "falcon-40b": "falcon", "kimi-linear": "kimi-linear"}  # fmt: skip
"""Architectures of files of golden checkpoints whose configurations such files state."""


@pytest.mark.parametrize("name", SAME)
def test_files_have_the_architecture_that_states_all_of_a_model(name: str, tmp_path: Path) -> None:
    file = read_gguf(make(name, tmp_path))
    assert file.metadata["general.architecture"] == SAME[name]
    assert "token_embd.weight" in file.entries and not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("name", ["gpt-oss", "minimax-m3"])
def test_a_model_that_no_architecture_states_keeps_its_document(name: str, tmp_path: Path) -> None:
    """Limits of their gates are not those of published models."""
    assert read_gguf(make(name, tmp_path)).metadata["general.architecture"] == "pi2"


def test_rows_and_norms_of_a_file_are_in_llama_cpps_way(tmp_path: Path) -> None:
    made = make("llama", tmp_path)
    stored = load_file(tmp_path / "checkpoint" / "model.safetensors")
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    query = stored["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    found = read_gguf(made).entries["blk.0.attn_q.weight"].read()
    np.testing.assert_array_equal(found, permute(query, config["num_attention_heads"]))
    gemma = make("gemma", tmp_path / "gemma")
    stored = load_file(tmp_path / "gemma" / "checkpoint" / "model.safetensors")
    found = read_gguf(gemma).entries["output_norm.weight"].read()
    np.testing.assert_array_equal(found, stored["model.norm.weight"].astype(np.float32) + 1)


def test_a_tokenizer_becomes_lists_that_divide_texts_alike(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "checkpoint")
    kept = json.loads(GOLDEN_TOKENIZERS.read_text())["vocabularies"]
    model = describe_checkpoint(folder).model
    for kind, cut, begins in (
        ("gpt2", "qwen2", False),
        ("gpt2", "llama-bpe", True),
        ("llama", "", True),
    ):
        metadata = {**kept[kind]["metadata"], **({"tokenizer.ggml.pre": cut} if cut else {})}
        (folder / "tokenizer.json").write_bytes(make_tokenizer(tmp_path, metadata))
        shape = {"vocab": len(metadata["tokenizer.ggml.tokens"])}
        changes = {"shape": shape, "tokenizer": {"add_bos": begins}}
        described = model.model_copy(
            update={key: getattr(model, key).model_copy(update=own) for key, own in changes.items()}
        )
        keys = describe_vocabulary(open_checkpoint(folder), described)
        assert keys["tokenizer.ggml.model"] == kind
        assert keys["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
        if cut:
            same = CUTS[str(keys["tokenizer.ggml.pre"])]
            assert same.expressions == CUTS[cut].expressions


def test_a_tokenizer_of_another_kind_is_kept_whole(tmp_path: Path) -> None:
    made = open_checkpoint(make("llama", tmp_path))
    assert made.read_tokenizer() == (tmp_path / "checkpoint" / "tokenizer.json").read_bytes()


def test_a_file_has_the_document_that_its_checkpoint_was_described_by(tmp_path: Path) -> None:
    made = make("gpt-oss", tmp_path)
    model = describe_checkpoint(made).model
    before = describe_checkpoint(tmp_path / "checkpoint").model
    assert before.tensors.experts_turned and not model.tensors.experts_turned
    assert model.model_copy(update={"tensors": before.tensors}) == before


def test_a_document_by_hand_counts_for_the_file(tmp_path: Path) -> None:
    folder = copy_checkpoint("llama", tmp_path / "checkpoint")
    source = open_checkpoint(folder)
    model = describe_checkpoint(source).model.model_copy(update={"logit_softcap": 5.0})
    quantize_checkpoint(source, model, tmp_path / "made.gguf", Wish(keeps=True))
    assert describe_checkpoint(tmp_path / "made.gguf").model.logit_softcap == 5.0
    with pi2.load(tmp_path / "made.gguf", set=UNROUNDED) as loaded:
        assert np.abs(loaded.logits([1, 2, 3])).max() < 5.0


@pytest.mark.parametrize(("name", "like"), [("q4_0", "int4"), ("q8_0", "int8")])
def test_codes_and_scales_become_blocks_again(name: str, like: Precision) -> None:
    own = find_format(name)
    rows = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    blocks = own.encode(rows)
    taken = take_blocks(blocks, own, like)
    assert taken is not None
    np.testing.assert_array_equal(find_packing(like).join_blocks(*taken, 96), blocks)


def test_mxfp4_is_met_exactly() -> None:
    own = find_format("mxfp4")
    draw = np.random.default_rng(1)
    blocks = draw.integers(0, 256, (7, 3, own.block_bytes), np.uint8)
    blocks[..., 0] = draw.integers(100, 150, (7, 3), np.uint8)
    blocks[..., 1] |= np.uint8(7)  # the largest magnitude: scales are not smaller than needed
    rows = own.decode(blocks.reshape(7, -1))
    np.testing.assert_array_equal(own.decode(own.encode(rows)), rows)
    np.testing.assert_array_equal(own.encode(rows)[:, 0], blocks[:, 0, 0])


def test_files_say_which_format_most_matrices_have(tmp_path: Path) -> None:
    metadata = read_gguf(make("llama", tmp_path)).metadata
    assert metadata["general.file_type"] == 1 and metadata["general.type"] == "model"
