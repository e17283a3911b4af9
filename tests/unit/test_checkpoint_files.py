"""Checkpoints as one GGUF file: golden models give their logits, and quantised weights stay."""

from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.formats import find_format
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.gguf_file import join_blocks, read_gguf, split_blocks
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.quantize import Wish, quantize_checkpoint
from tests.helpers.goldens import (
    UNROUNDED,
    copy_checkpoint,
    list_goldens,
    measure_error,
    read_golden,
)
from tests.helpers.whole_files import NEAR

FAR = {"bitnet": 1e-3}
"""Goldens whose scales a file has in 16 bits."""
LAYOUTS = (
    *("falcon-40b", "gpt-oss", "granite-moe", "qwen3-next", "kimi-linear", "gemma3n", "cohere"),
    *("deepseek-v2", "jamba", "llama4"),
)
"""Checkpoints whose rows, experts or streams lie in other ways than a file's."""


def make_file(name: str, folder: Path) -> Path:
    source = open_checkpoint(copy_checkpoint(name, folder / "checkpoint"))
    model = describe_checkpoint(source).model
    quantize_checkpoint(source, model, folder / "made.gguf", Wish(keeps=True))
    return folder / "made.gguf"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in LAYOUTS else pytest.mark.slow)
        for name in list_goldens()
    ],
)
def test_files_of_golden_checkpoints_give_their_logits(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    with pi2.load(make_file(name, tmp_path), set={**UNROUNDED, "kv.context": 64}) as model:
        found = model.logits(golden.prompt)
    assert measure_error(found, golden.logits) < FAR.get(name, NEAR)


def test_a_file_has_the_document_that_its_checkpoint_was_described_by(tmp_path: Path) -> None:
    made = make_file("gpt-oss", tmp_path)
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


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_codes_and_scales_become_blocks_again(name: str) -> None:
    own = find_format(name)
    rows = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    blocks = own.encode(rows)
    np.testing.assert_array_equal(join_blocks(*split_blocks(blocks, own), own), blocks)


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
    assert read_gguf(make_file("llama", tmp_path)).metadata["general.file_type"] == 1
