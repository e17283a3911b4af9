"""`pi2 convert --to mlc` writes what the reader of MLC-LLM's folders reads back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from pi2.cli.main import run
from pi2.importing import mlc_writer
from pi2.importing.checkpoint import open_checkpoint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_tensors import read_checkpoint
from tests.helpers.goldens import copy_checkpoint
from tests.helpers.mlc_folders import dequantize, quantize
from tests.helpers.models import draw_weights, make_model


@pytest.mark.parametrize("quantization", ["int4", "fp16"])
def test_weights_are_read_back_as_they_were_rounded(
    tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlc_writer, "SHARD_BYTES", 6000)
    model = make_model({"predictor": None, "ffn": {"activation": "silu"}, "tied_head": False})
    weights = draw_weights(model)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", model, weights)
    folder = tmp_path / "mlc"
    arguments = ["convert", str(checkpoint), "--to", "mlc", "-o", str(folder)]
    assert run([*arguments, "--quantization", quantization]) == 0
    found = open_checkpoint(folder)
    assert set(found.tensors) == set(weights)
    for name, values in weights.items():
        expected = values.astype(np.float16)
        if quantization == "int4" and values.ndim > 1:
            expected = dequantize(*quantize(values))
        np.testing.assert_array_equal(found.tensors[name].read(), expected, err_msg=name)
    original = json.loads((checkpoint / "config.json").read_text())
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"):
        assert found.config[key] == original[key]
    index = json.loads((folder / "tensor-cache.json").read_text())
    assert len(index["records"]) > 1
    for shard in index["records"]:
        content = (folder / shard["dataPath"]).read_bytes()
        assert (len(content), hashlib.md5(content).hexdigest()) == (
            shard["nbytes"],
            shard["md5sum"],
        )
    assert (folder / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_families_with_biases_and_norms_of_heads(name: str, tmp_path: Path) -> None:
    checkpoint = copy_checkpoint(name, tmp_path / "checkpoint")
    _, weights = read_checkpoint(checkpoint)
    folder = tmp_path / "mlc"
    arguments = ["convert", str(checkpoint), "--to", "mlc", "--quantization", "fp16"]
    assert run([*arguments, "-o", str(folder)]) == 0
    found = open_checkpoint(folder).tensors
    for tensor, values in weights.items():
        if tensor != "lm_head.weight":
            expected = values.astype(np.float16)
            np.testing.assert_array_equal(found[tensor].read(), expected, err_msg=tensor)


def test_mixtures_and_existing_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy_checkpoint("mixtral", tmp_path / "checkpoint")
    arguments = ["convert", str(checkpoint), "--to", "mlc", "-o"]
    assert run([*arguments, str(tmp_path / "out")]) == 2
    assert "P547" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    dense = copy_checkpoint("qwen2", tmp_path / "dense")
    assert run(["convert", str(dense), "--to", "mlc", "-o", str(tmp_path / "mine")]) == 2
    assert "P631" in capsys.readouterr().err
