"""Importance matrices of llama.cpp: both kinds of file say the same, broken ones are refused."""

import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.quantizers import read_imatrix
from tests.helpers.gguf_files import write_all

NAMES = ("blk.0.ffn_up.weight", "output.weight")


def draw_sums() -> dict[str, F32]:
    random = np.random.default_rng(0)
    return {name: random.random((1, 64), np.float32) for name in NAMES} | {
        "blk.0.ffn_down_exps.weight": random.random((4, 32), np.float32)
    }


def write_old(file: Path, sums: Mapping[str, F32], calls: int = 5) -> Path:
    content = struct.pack("<i", len(sums))
    for name, own in sums.items():
        content += struct.pack("<i", len(name)) + name.encode()
        content += struct.pack("<ii", calls, own.size) + (own * calls).tobytes()
    file.write_bytes(content + struct.pack("<ii", calls, 4) + b"text")
    return file


def write_new(file: Path, sums: Mapping[str, F32], calls: int = 5) -> Path:
    writer = gguf.GGUFWriter(file, "imatrix")
    writer.add_type("imatrix")
    for name, own in sums.items():
        writer.add_tensor(f"{name}.in_sum2", own * calls)
        writer.add_tensor(f"{name}.counts", np.full((len(own), 1), calls, np.float32))
    write_all(writer)
    return file


@pytest.mark.parametrize("write", [write_old, write_new], ids=["dat", "gguf"])
def test_columns_count_what_their_inputs_mean_squares_say(tmp_path: Path, write: object) -> None:
    sums = draw_sums()
    assert callable(write)
    found = read_imatrix(write(tmp_path / "imatrix", sums))
    for name in NAMES:
        own = found.find(name, 64)
        assert own is not None
        np.testing.assert_allclose(own, sums[name] / sums[name].mean(), rtol=1e-5)
    experts = found.find("blk.0.ffn_down_exps.weight", 32, 4)
    assert experts is not None and experts.shape == (4, 32)
    third = found.find("blk.0.ffn_down.3.weight", 32)
    assert third is not None
    np.testing.assert_array_equal(third[0], experts[3])
    assert found.find("blk.1.ffn_up.weight", 64) is None


def test_an_expert_that_no_token_chose_says_nothing(tmp_path: Path) -> None:
    sums = {"blk.0.ffn_up_exps.weight": np.ones((2, 32), np.float32)}
    sums["blk.0.ffn_up_exps.weight"][1] = 0
    sums["blk.0.ffn_up_exps.weight"][0, 5] = 0
    found = read_imatrix(write_old(tmp_path / "x.dat", sums))
    own = found.find("blk.0.ffn_up_exps.weight", 32, 2)
    assert own is not None
    assert (own > 0).all() and own[0, 5] < 1e-4
    np.testing.assert_array_equal(own[1], np.ones(32))


def test_a_matrix_with_other_columns_is_refused(tmp_path: Path) -> None:
    found = read_imatrix(write_old(tmp_path / "x.dat", draw_sums()))
    with pytest.raises(UserError, match=r"P548.*output\.weight.*48 columns"):
        found.find("output.weight", 48)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: b"\xff" * 64,
        lambda content: content[:4] + struct.pack("<i", -1) + content[8:],
        lambda content: struct.pack("<i", 0),
        lambda content: content.replace(struct.pack("<ii", 5, 64), struct.pack("<ii", 5, -64)),
        lambda content: content[:60] + struct.pack("<f", np.nan) + content[64:],
    ],
    ids=["empty", "cut", "noise", "negative name", "no matrix", "negative", "no number"],
)
def test_broken_files_are_refused(tmp_path: Path, spoil: object) -> None:
    assert callable(spoil)
    file = write_old(tmp_path / "x.dat", draw_sums())
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UserError, match=r"P548.*importance matrix"):
        read_imatrix(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"P548.*No such file"):
        read_imatrix(tmp_path / "x.dat")


def test_a_model_is_no_importance_matrix(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("output.weight", np.ones((2, 32), np.float32))
    write_all(writer)
    with pytest.raises(UserError, match=r"P548.*no matrix"):
        read_imatrix(tmp_path / "x.gguf")
