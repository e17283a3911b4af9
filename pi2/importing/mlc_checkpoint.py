"""Opens folders of MLC-LLM as the Hugging Face checkpoint that they were made from.

``mlc-chat-config.json`` is the configuration; ``tensor-cache.json`` (``ndarray-cache.json`` before)
lists shards and the tensors in them.  Query, key and value are one tensor there, gate and up too,
and experts of a layer lie one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi2.diagnostics import UserError
from pi2.importing.checkpoint import MLC_CONFIG, Checkpoint, read_json
from pi2.importing.mlc_shards import Record, list_records
from pi2.importing.mlc_tensor import PLAIN, MlcTensor
from pi2.importing.safetensors_file import SourceTensor

INDEXES = ("tensor-cache.json", "ndarray-cache.json")
QUANTIZED = frozenset({"q4f16_1", "q4f32_1"})
"""Four bits in groups of 32 along the rows, with one scale each."""
UNQUANTIZED = frozenset({"q0f16", "q0f32", "q0bf16"})

_ACTIVATIONS = {"gemma": "gelu_pytorch_tanh"}
"""Activations of families whose configuration does not say; the others have SiLU."""
_RENAMED = (
    (re.compile(r"transformer\.embd\."), "model.embed_tokens."),
    (re.compile(r"transformer\.norm\."), "model.norm."),
    (re.compile(r"transformer\.h\.(\d+)\.ln\."), r"model.layers.\1.input_layernorm."),
    (re.compile(r"transformer\.h\.(\d+)\.mixer\.out_proj\."), r"model.layers.\1.self_attn.o_proj."),
    (re.compile(r"transformer\.h\.(\d+)\.mixer\."), r"model.layers.\1.self_attn."),
    (re.compile(r"transformer\.h\."), "model.layers."),
    (re.compile(r"\.moe\.gate\."), ".block_sparse_moe.gate."),
)
"""Names of MLC-LLM, and what they are in a Hugging Face checkpoint."""
_QKV = re.compile(r"(.+\.self_attn)\.(?:qkv_proj|c_attn)\.(weight|bias)")
_GATE_UP = re.compile(r"(.+\.mlp)\.gate_up_proj\.weight")
_EXPERTS = re.compile(r"(.+)\.moe\.(e1_e3|e2)\.weight")


def open_mlc(folder: Path) -> Checkpoint:
    """Open a folder of MLC-LLM.

    Raises `UserError`: P530 a file is missing, P531 there is no list of tensors, P532 a broken
    file, P533 a shard or a part of a tensor is missing, P534 a wrong shape, P535 a quantisation
    that cannot be read, P536 a tensor twice, P538 a shard outside of the folder.
    """
    chat = read_json(folder / MLC_CONFIG)
    index = next((folder / name for name in INDEXES if (folder / name).exists()), None)
    if index is None:
        raise UserError.of(
            "P531",
            f"{folder} has no {INDEXES[0]}",
            help="give the folder that `mlc_llm convert_weight` wrote",
        )
    quantization = chat.get("quantization")
    if quantization not in QUANTIZED | UNQUANTIZED:
        known = ", ".join(sorted(QUANTIZED | UNQUANTIZED))
        raise UserError.of(
            "P535",
            f"{folder / MLC_CONFIG} says that weights are {quantization!r}, which cannot be read",
            help=f"convert the original checkpoint, or one in {known}",
            file=str(folder / MLC_CONFIG),
        )
    records = list_records(folder, index)
    config = _make_config(folder, chat)
    tensors: dict[str, SourceTensor] = {}
    for tensor in _join_records(index, records):
        for name, part in _split_tensor(tensor, config):
            tensors[name] = part
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is not None:
        config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return Checkpoint(
        folder=folder,
        config=config,
        config_file=folder / MLC_CONFIG,
        tensors=tensors,
        files=tuple(sorted({record.shard.file for record in records.values()})),
    )


def _join_records(index: Path, records: Mapping[str, Record]) -> Iterator[MlcTensor]:
    """Tensors by what the original code calls them; weights and scales are one tensor."""
    for name, record in records.items():
        stem, _, kind = name.rpartition(".")
        if kind == "q_scale":
            if f"{stem}.q_weight" not in records:
                raise _miss(index, f"{stem}.q_weight", name)
            continue
        scale = None
        shape = record.shape
        if kind == "q_weight":
            scale = records.get(f"{stem}.q_scale")
            if scale is None:
                raise _miss(index, f"{stem}.q_scale", name)
            shape = (*shape[:-1], shape[-1] * 8)
            wanted = (*shape[:-1], shape[-1] // 32)
            if record.dtype != "uint32" or len(shape) < 2 or shape[-1] % 32:
                raise _bad_shape(record, "rows of groups of 32 in uint32")
            if scale.shape != wanted or scale.dtype not in ("float16", "float32"):
                raise _bad_shape(scale, f"{list(wanted)} in float16")
        yield MlcTensor(
            file=record.shard.file,
            name=name,
            dtype=PLAIN.get(record.storage, record.storage) if scale is None else "q4",
            shape=shape,
            offset=record.offset,
            size_bytes=record.size_bytes + (0 if scale is None else scale.size_bytes),
            shard=record.shard,
            scales=scale,
        )


def _split_tensor(
    tensor: MlcTensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, SourceTensor]]:
    """The tensors of a Hugging Face checkpoint that ``tensor`` holds, by name."""
    name = tensor.name.replace(".q_weight", ".weight")
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    if config.get("model_type") == "gemma" and name.endswith("norm.weight"):
        yield name, replace(tensor, added=1.0)
        return
    experts = _EXPERTS.fullmatch(name)
    if experts is not None and len(tensor.shape) == 3:
        yield from _split_experts(tensor, experts[1], experts[2])
        return
    qkv, gate_up = _QKV.fullmatch(name), _GATE_UP.fullmatch(name)
    if config.get("model_type") == "phi3" or (qkv is None and gate_up is None):
        yield name, tensor
        return
    rows = tensor.shape[0]
    if gate_up is not None:
        stem, kind = gate_up[1], "weight"
        parts = {"gate_proj": rows // 2, "up_proj": rows - rows // 2}
    else:
        assert qkv is not None
        stem, kind = qkv[1], qkv[2]
        heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if type(heads) is not int or type(kv_heads) is not int or heads < 1 or kv_heads < 1:
            yield name, tensor
            return
        head = rows // (heads + 2 * kv_heads)
        parts = {"q_proj": heads * head, "k_proj": kv_heads * head, "v_proj": kv_heads * head}
    first = 0
    for part, count in parts.items():
        yield f"{stem}.{part}.{kind}", tensor.take_rows(first, count)
        first += count


def _split_experts(tensor: MlcTensor, stem: str, kind: str) -> Iterator[tuple[str, SourceTensor]]:
    experts, rows, columns = tensor.shape
    flat = replace(tensor, shape=(experts * rows, columns))
    for expert in range(experts):
        prefix = f"{stem}.block_sparse_moe.experts.{expert}"
        if kind == "e2":
            yield f"{prefix}.w2.weight", flat.take_rows(expert * rows, rows)
            continue
        half = rows // 2
        yield f"{prefix}.w1.weight", flat.take_rows(expert * rows, half)
        yield f"{prefix}.w3.weight", flat.take_rows(expert * rows + half, rows - half)


def _make_config(folder: Path, chat: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ``config.json`` would have."""
    stated = chat.get("model_config")
    if not isinstance(stated, dict):
        raise UserError.of("P532", f"{folder / MLC_CONFIG} has no model_config")
    others = stated.get("kwargs")
    config: dict[str, Any] = {**(others if isinstance(others, dict) else {}), **stated}
    family = chat.get("model_type", config.get("model_type"))
    config["model_type"] = family
    config.setdefault("hidden_act", _ACTIVATIONS.get(str(family), "silu"))
    for key, name in (
        ("position_embedding_base", "rope_theta"),
        ("context_window_size", "max_position_embeddings"),
        ("sliding_window_size", "sliding_window"),
    ):
        value = config.pop(key, None)
        if isinstance(value, int | float) and value > 0:
            config[name] = value
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) == 0:
            del config[key]
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    for key in ("bos_token_id", "eos_token_id"):
        if key in chat:
            config[key] = chat[key]
    return config


def _miss(index: Path, name: str, beside: str) -> UserError:
    return UserError.of(
        "P533",
        f"{index} lists no tensor {name!r}, although it lists {beside!r}",
        help="convert the original checkpoint with MLC-LLM again",
        file=str(index),
    )


def _bad_shape(record: Record, expected: str) -> UserError:
    return UserError.of(
        "P534",
        f"tensor {record.name!r} in {record.shard.file} is {list(record.shape)} in {record.dtype}, "
        f"expected {expected}",
        help="convert the original checkpoint with MLC-LLM again",
    )
