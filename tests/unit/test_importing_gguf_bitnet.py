"""GGUF files of BitNet: ternary weights stay ternary, in all types of numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_goldens import convert, expect_same_weights, forget_names
from tests.helpers.goldens import FOLDER, make_small_tokenizer

CONFIG: dict[str, Any] = json.loads((FOLDER / "bitnet/config.json").read_text()) | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
"""The smallest model that has rows of whole blocks in all types."""
SETTINGS: dict[str, Any] = {
    ".context_length": 128, ".block_count": 1, ".embedding_length": 256,
    ".feed_forward_length": 256, ".attention.head_count": 2, ".attention.head_count_kv": 1,
    ".attention.layer_norm_rms_epsilon": 1e-5, ".rope.freq_base": 1e4,
    ".rope.dimension_count": 128, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip
STATED = {
    ".hidden_activation": "relu2", ".rope.scaling.type": "linear", ".rope.scaling.factor": 1.0
}  # fmt: skip
SCALE = 127 * 2.0**-13
"""What a type's own scale holds exactly, with 127 steps too."""
ROWS = {
    "self_attn.q_proj": ("attn_q", 256), "self_attn.k_proj": ("attn_k", 128),
    "self_attn.v_proj": ("attn_v", 128), "self_attn.o_proj": ("attn_output", 256),
    "mlp.gate_proj": ("ffn_gate", 256), "mlp.up_proj": ("ffn_up", 256),
    "mlp.down_proj": ("ffn_down", 256),
}  # fmt: skip
NORMS = {
    "model.norm": "output_norm",
    "model.layers.0.input_layernorm": "blk.0.attn_norm",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "model.layers.0.self_attn.attn_sub_norm": "blk.0.attn_sub_norm",
    "model.layers.0.mlp.ffn_sub_norm": "blk.0.ffn_sub_norm",
}
Tensors = dict[str, F32]


def draw_tensors() -> tuple[Tensors, Tensors]:
    """Tensors of a checkpoint, packed, and of a file, under the names of each."""
    rng = np.random.default_rng(4)
    packed: dict[str, Any] = {}
    plain: Tensors = {}
    for original, (name, rows) in ROWS.items():
        codes = rng.integers(-1, 2, (rows, 256))
        quarters = (codes + 1).astype(np.uint8).reshape(4, rows // 4, 256)
        key = f"model.layers.0.{original}.weight"
        packed[key] = sum(quarters[part] << np.uint8(2 * part) for part in range(4))
        packed[f"{key}_scale"] = np.array([SCALE], np.float32)
        plain[f"blk.0.{name}.weight"] = (codes * SCALE).astype(np.float32)
    for original, name in NORMS.items():
        halves = rng.uniform(0.5, 1.5, 256).astype(np.float16)
        packed[f"{original}.weight"] = halves
        plain[f"{name}.weight"] = halves.astype(np.float32)
    # Rows of the embedding, too, are of numbers that all types hold.
    values = (rng.integers(-1, 2, (CONFIG["vocab_size"], 256)) * SCALE).astype(np.float32)
    packed["model.embed_tokens.weight"] = plain["token_embd.weight"] = values
    return packed, plain


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as BitNet is published, with its store beside it."""
    folder = tmp_path_factory.mktemp("bitnet") / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_bytes(make_small_tokenizer(CONFIG["vocab_size"]))
    save_file(draw_tensors()[0], folder / "model.safetensors")
    convert(folder, folder.parent / "store", folder / "tokenizer.json", {})
    return folder


def write_bitnet(file: Path, kind: str, tensors: Tensors) -> Path:
    return write_gguf(file, "bitnet", SETTINGS | STATED, tensors, kind)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "TQ1_0", "TQ2_0"])
def test_a_file_gives_the_store_of_its_checkpoint(
    tmp_path: Path, checkpoint: Path, kind: str
) -> None:
    file = write_bitnet(tmp_path / "tiny.gguf", kind, draw_tensors()[1])
    found = convert(file, tmp_path / "store", checkpoint / "tokenizer.json", {})
    assert (found.quantization.ffn, found.quantization.attention) == ("ternary", "ternary")
    assert forget_names(found) == forget_names(describe_checkpoint(checkpoint, "golden").model)
    expect_same_weights(checkpoint.parent / "store", tmp_path / "store")


def test_scales_may_be_tensors_of_their_own(tmp_path: Path, checkpoint: Path) -> None:
    _, tensors = draw_tensors()
    for name in [name for name in tensors if name.startswith("blk.") and "norm" not in name]:
        tensors[name] = tensors[name] / np.float32(SCALE)
        tensors[name.replace(".weight", ".scale")] = np.array([SCALE], np.float32)
    file = write_bitnet(tmp_path / "tiny.gguf", "TQ2_0", tensors)
    convert(file, tmp_path / "store", checkpoint / "tokenizer.json", {})
    expect_same_weights(checkpoint.parent / "store", tmp_path / "store")
    tensors["blk.0.ffn_up.scale"] = np.ones(2, np.float32)
    with pytest.raises(UserError, match=r"P534.*blk\.0\.ffn_up\.scale"):
        open_checkpoint(write_bitnet(tmp_path / "wrong.gguf", "F32", tensors))


def halve_one(tensors: Tensors) -> None:
    """Let the last number of one matrix have another magnitude."""
    tensors["blk.0.ffn_gate.weight"][-1, -1] = SCALE / 2


def halve_block(tensors: Tensors) -> None:
    """Let a row have another scale."""
    tensors["blk.0.attn_v.weight"][-1] /= 2


@pytest.mark.parametrize(
    ("kind", "change"), [("F16", halve_one), ("TQ2_0", halve_block), ("Q4_0", None)]
)
def test_what_is_not_ternary_in_all_matrices_is_not_rounded_to_it(
    tmp_path: Path, kind: str, change: Callable[[Tensors], None] | None
) -> None:
    """Q4_0 has no number that is minus another's largest one."""
    _, tensors = draw_tensors()
    if change is not None:
        change(tensors)
    model = describe_checkpoint(write_bitnet(tmp_path / "tiny.gguf", kind, tensors)).model
    assert (model.quantization.ffn, model.quantization.attention) == ("int4", "int4")


def test_a_file_that_states_no_activation_computes_what_llama_cpp_computes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", "bitnet", SETTINGS, draw_tensors()[1], "TQ2_0")
    assert describe_checkpoint(file).model.ffn.activation == "silu"
