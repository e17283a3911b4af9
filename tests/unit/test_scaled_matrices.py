"""Files whose matrices have scales of their own (``attn_q.scale``) run as they are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pi2
from pi2.arrays import F32
from pi2.weights.file_reading import FileFiller
from tests.helpers.peers import TOKENS, read_models, write_tiny

pytest.importorskip("gguf")

MODELS = read_models()
SCALES = np.resize(np.array([0.5, 2.0, 0.25, 4.0, 8.0, 0.125, 16.0], np.float32), 12)
"""Powers of 2, by which numbers of every format are multiplied exactly."""


def read_logits(file: Path) -> F32:
    assert FileFiller().runs_as_it_is(file)
    with pi2.load(file, set={"kv.context": 64}) as model:
        return np.array(model.logits(TOKENS))


@pytest.mark.parametrize(
    ("name", "kind", "matrices"),
    [
        ("llama", "F32", ["blk.0.attn_q", "blk.1.ffn_down", "output"]),
        ("llama", "Q8_0", ["blk.0.attn_output", "blk.1.ffn_gate"]),
        ("qwen2", "F32", ["blk.0.attn_k", "blk.1.attn_v"]),
        ("qwen3-moe", "F32", ["blk.0.ffn_gate_exps", "blk.1.ffn_down_exps"]),
        ("qwen3-5", "F32", ["blk.0.attn_gate", "blk.0.ssm_out", "blk.1.attn_q"]),
        ("granite-hybrid", "F32", ["blk.0.ssm_in", "blk.0.ssm_out"]),
        ("deepseek-v3", "F32", ["blk.0.attn_k_b", "blk.1.attn_v_b", "blk.1.ffn_gate_exps"]),
        ("qwen2-moe", "BF16", ["blk.0.ffn_up_exps", "blk.1.ffn_down_shexp"]),
    ],
)
def test_logits_are_those_of_multiplied_matrices(
    tmp_path: Path, name: str, kind: str, matrices: list[str]
) -> None:
    """One scale for a matrix, before its biases are added, or one for each expert."""
    model = replace(MODELS[name], kind=kind)
    plain = dict(model.list_tensors())
    scaled, multiplied = dict(plain), dict(plain)
    for matrix in matrices:
        values = plain[f"{matrix}.weight"]
        count = len(values) if matrix.endswith("_exps") else 1
        scales = SCALES[:count]
        scaled[f"{matrix}.scale"] = scales
        multiplied[f"{matrix}.weight"] = values * scales.reshape(-1, *[1] * (values.ndim - 1))
        # It says how a processor rounds inputs, which nothing here does.
        scaled[f"{matrix}.input_scale"] = np.full(1, 0.5, np.float32)
    found = [
        read_logits(write_tiny(tmp_path / f"{number}.gguf", model, tensors))
        for number, tensors in enumerate((scaled, multiplied, plain))
    ]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
