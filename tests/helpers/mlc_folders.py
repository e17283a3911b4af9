"""Folders of MLC-LLM of tiny models, written as its notes on the format say."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F16, F32, U32, Raw


def fuse(weights: Mapping[str, F32], config: Mapping[str, Any]) -> dict[str, F32]:
    """Tensors as MLC-LLM names and joins them."""
    family = config["model_type"]
    attention = "c_attn" if family in ("qwen2", "qwen3") else "qkv_proj"
    found: dict[str, F32] = {}
    for name, values in weights.items():
        stem, _, kind = name.rpartition(".")
        if ".experts." in name:
            continue
        if stem.endswith("self_attn.q_proj"):
            parts = [weights[f"{stem.replace('q_proj', f'{part}_proj')}.{kind}"] for part in "qkv"]
            found[f"{stem.replace('q_proj', attention)}.{kind}"] = np.concatenate(parts)
        elif stem.endswith("mlp.gate_proj"):
            up = weights[name.replace("gate_proj", "up_proj")]
            found[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([values, up])
        elif not stem.endswith(("k_proj", "v_proj", "up_proj")) or "gate_up" in stem:
            offset = 1 if family == "gemma" and stem.endswith("norm") else 0
            found[name.replace("block_sparse_moe.gate", "moe.gate")] = values + np.float32(offset)
    for layer in range(config["num_hidden_layers"] if config.get("num_local_experts") else 0):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        experts = range(config["num_local_experts"])
        first, last, down = (
            [weights[f"{prefix}.{expert}.{part}.weight"] for expert in experts]
            for part in ("w1", "w3", "w2")
        )
        both = [np.concatenate(pair) for pair in zip(first, last, strict=True)]
        found[f"model.layers.{layer}.moe.e1_e3.weight"] = np.stack(both)
        found[f"model.layers.{layer}.moe.e2.weight"] = np.stack(down)
    return found


def quantize(values: F32) -> tuple[U32, F16]:
    """Words of nibbles and scales of q4f16_1."""
    halves = values.astype(np.float16)
    groups = halves.reshape(*halves.shape[:-1], -1, 32)
    scales = (np.abs(groups).max(-1) / np.float16(7)).astype(np.float16)
    with np.errstate(all="ignore"):
        codes = np.rint(groups.astype(np.float32) / scales[..., None].astype(np.float32) + 7)
    nibbles = np.clip(np.nan_to_num(codes, nan=7), 0, 14).astype(np.uint32)
    nibbles = nibbles.reshape(*halves.shape[:-1], -1, 8)
    words = np.zeros(nibbles.shape[:-1], np.uint32)
    for place in range(8):
        words |= nibbles[..., place] << np.uint32(4 * place)
    return words, scales


def dequantize(words: U32, scales: F16) -> F16:
    """MLC-LLM's own formula, in fp16: (q - 7) s."""
    shifts = np.arange(8, dtype=np.uint32) * np.uint32(4)
    nibbles = (words[..., None] >> shifts) & np.uint32(15)
    codes = nibbles.reshape(*words.shape[:-1], -1).astype(np.float16) - np.float16(7)
    return codes * np.repeat(scales, 32, axis=-1)


def make_arrays(tensors: Mapping[str, F32], quantization: str) -> dict[str, Raw]:
    """What a folder holds: matrices quantised, but for routers; the rest in fp16 or fp32."""
    dtype = np.float32 if quantization.endswith("f32") else np.float16
    arrays: dict[str, Raw] = {}
    for name, values in tensors.items():
        if quantization != "q4f16_1" or values.ndim < 2 or "moe.gate" in name:
            arrays[name] = values.astype(dtype)
            continue
        stem = name.removesuffix(".weight")
        arrays[f"{stem}.q_weight"], arrays[f"{stem}.q_scale"] = quantize(values)
    return arrays


def make_chat_config(config: Mapping[str, Any], quantization: str) -> dict[str, Any]:
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
        "num_key_value_heads",
        "tie_word_embeddings",
        "num_local_experts",
        "num_experts_per_tok",
    )
    rope = config.get("rope_parameters") or config
    model = {key: config[key] for key in keys if key in config}
    model |= {
        "head_dim": config.get("head_dim") or 0,
        "position_embedding_base": rope["rope_theta"],
        "context_window_size": config["max_position_embeddings"],
        "tensor_parallel_shards": 1,
        "kwargs": {},
    }
    return {
        "version": "0.1.0",
        "model_type": config["model_type"],
        "quantization": quantization,
        "model_config": model,
        "vocab_size": config["vocab_size"],
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "tokenizer_files": ["tokenizer.json"],
    }


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, F32],
    quantization: str = "q4f16_1",
    *,
    index: str = "tensor-cache.json",
    shard_bytes: int = 6000,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "mlc-chat-config.json").write_text(json.dumps(make_chat_config(config, quantization)))
    arrays = make_arrays(fuse(weights, config), quantization)
    shards: list[dict[str, Any]] = []
    data, records = b"", list[dict[str, Any]]()

    def finish() -> None:
        nonlocal data, records
        name = f"params_shard_{len(shards)}.bin"
        (folder / name).write_bytes(data)
        shards.append(
            {
                "dataPath": name,
                "format": "raw-shard",
                "nbytes": len(data),
                "records": records,
                "md5sum": hashlib.md5(data).hexdigest(),
            }
        )
        data, records = b"", []

    for name, values in arrays.items():
        content = np.ascontiguousarray(values).tobytes()
        if data and len(data) + len(content) > shard_bytes:
            finish()
        records.append(
            {
                "name": name,
                "shape": list(values.shape),
                "dtype": values.dtype.name,
                "format": "raw",
                "nbytes": len(content),
                "byteOffset": len(data),
            }
        )
        data += content
    finish()
    (folder / index).write_text(json.dumps({"metadata": {}, "records": shards}))
    return folder
