"""Hugging Face checkpoint folders of tiny random models."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from pi2.arrays import F32, I64
from pi2.plan.documents.model import Model
from tests.helpers.models import make_tokenizer

Dtype = Literal["float32", "float16", "bfloat16"]


def write_safetensors(file: Path, tensors: Mapping[str, F32], dtype: Dtype = "float32") -> None:
    """Write ``tensors`` in ``dtype``; bfloat16 is cut, not rounded."""
    if dtype != "bfloat16":
        narrowed = {name: values.astype(dtype) for name, values in tensors.items()}
        save_file(narrowed, file, metadata={"format": "pt"})
        return
    # The library's numpy interface has no bfloat16: write it as the format's page says.
    header: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        halves = (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
        span = [len(data), len(data) + len(halves)]
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": span}
        data += halves
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def narrow(values: F32, dtype: Dtype) -> F32:
    """What ``values`` become when they are stored in ``dtype``."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return values.astype(dtype).astype(np.float32)


def make_config(model: Model) -> dict[str, Any]:
    shape = model.shape
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "rms_norm_eps": model.norm.epsilon,
        "rope_theta": model.rope.theta, "tie_word_embeddings": model.tied_head,
    }  # fmt: skip


def write_checkpoint(
    folder: Path, model: Model, weights: Mapping[str, F32], *, dtype: Dtype = "float32",
    shards: int = 1, in_order: bool = False,
) -> Path:  # fmt: skip
    """Write config.json, weights in ``shards`` files, and tokenizer.json; return ``folder``.

    Tensors are dealt out to the files, as cards are, unless they follow each other ``in_order``.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(model)))
    (folder / "tokenizer.json").write_bytes(make_tokenizer(model.shape.vocab))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, dtype)
        return folder
    weight_map: dict[str, str] = {}
    names = list(weights)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        first, last = (len(names) * place // shards for place in (number, number + 1))
        part = names[first:last] if in_order else names[number::shards]
        write_safetensors(folder / file, {name: weights[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_counts(file: Path, counts: I64, notes: Mapping[str, str] | None = None) -> Path:
    """Write activation counts int64 [layers, neurons] as Parquet; return ``file``."""
    layers, neurons = counts.shape
    table = pa.table(
        {
            "layer": np.repeat(np.arange(layers, dtype=np.int32), neurons),
            "neuron": np.tile(np.arange(neurons, dtype=np.int32), layers),
            "count": counts.reshape(-1),
        }
    )
    pq.write_table(table.replace_schema_metadata(notes), file)
    return file
