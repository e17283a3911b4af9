"""GGUF files of Llama 4, as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from tests.helpers.gguf_tensors import start_file, write_all

FIXED: dict[str, Any] = {
    "no_rope_layers": None, "layer_types": None, "moe_layers": None, "attention_chunk_size": 8192,
    "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
"""What files cannot say, as llama.cpp has it."""


def write_llama4(
    file: Path, config: dict[str, Any], weights: dict[str, F32], window: int | None = None
) -> Path:
    writer, names = start_file(file, "LLAMA4", config)
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if window is not None:
        writer.add_sliding_window(window)
    for original, values in weights.items():
        for name, part in divide_experts(original, values):
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(found, np.ascontiguousarray(part))
    write_all(writer)
    return file


def divide_experts(name: str, values: F32) -> list[tuple[str, F32]]:
    """The converter has gates and ups apart, and rows where checkpoints have columns."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
        start = name.removesuffix("gate_up_proj")
        return [(f"{start}gate_proj.weight", gate), (f"{start}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", values.swapaxes(1, 2))]
    return [(name, values)]
