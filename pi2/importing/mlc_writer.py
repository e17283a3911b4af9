"""Writes a checkpoint as a folder of MLC-LLM: ``params_shard_N.bin``, ``tensor-cache.json``,
``mlc-chat-config.json`` and the tokenizer's files.

It is the reverse of `pi2.importing.mlc_checkpoint`: query, key and value are one tensor, gate and
up another.  q4f16_1 has nibbles q and an fp16 scale s = max |w| / 7 for every 32 weights of a row:
a weight is about (q - 7) s.  Matrices are quantised, embedding and head too; vectors are fp16.
The folder appears under its name when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pi2.arrays import F16, F32, U32, Raw
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import MLC_CONFIG, Checkpoint
from pi2.importing.config import TURN_FACTOR
from pi2.progress import Progress

MlcQuantization = Literal["q4f16_1", "q0f16"]
FAMILIES: Mapping[str, str] = {
    "llama": "qkv_proj",
    "mistral": "qkv_proj",
    "qwen2": "c_attn",
    "qwen3": "c_attn",
}
"""Dense families whose tensors have the same names in both, and what the joined projection is
called."""
GROUP, LEVELS = 32, 7
SHARD_BYTES = 32 << 20
"""MLC-LLM's own limit of a shard, but for larger tensors, which have one each."""
SMALL_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "hidden_act",
    "rope_scaling",
    "sliding_window",
)
_PART = re.compile(r"(.+\.(?:self_attn|mlp))\.(q|k|v|gate|up)_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor of the new folder, and what it is read from."""

    name: str
    read: Callable[[], F32]
    is_matrix: bool


def write_mlc(
    source: Checkpoint, output: Path, quantization: MlcQuantization, progress: Progress
) -> int:
    """Write ``source`` to ``output``, a new folder; return the bytes of its weights.

    UserError P547 for a family that is not known, P631 where the folder cannot be written or
    exists, and whatever reading the checkpoint raises.
    """
    family = source.config.get("model_type")
    if family not in FAMILIES:
        raise UserError.of(
            "P547",
            f"checkpoints of the family {family!r} cannot be written for MLC-LLM",
            help=f"known are {', '.join(FAMILIES)}; `mlc_llm convert_weight` knows others",
        )
    if source.config.get(TURN_FACTOR, 1.0) != 1.0:
        raise UserError.of(
            "P547",
            f"{source.folder} multiplies sines and cosines by {source.config[TURN_FACTOR]:g} "
            "(rope.scaling.attn_factor), which MLC-LLM does not",
            help="run it with another backend",
        )
    if output.exists():
        raise UserError.of("P631", f"{output} exists already", help="choose another folder")
    jobs = list(_list_jobs(source, str(family)))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
        try:
            total = _write_weights(room, jobs, quantization, progress)
            names = _copy_small_files(source, room)
            chat = describe_chat(source.config, quantization, names)
            (room / MLC_CONFIG).write_text(json.dumps(chat, indent=2) + "\n", encoding="utf-8")
            room.chmod(0o755)
            os.rename(room, output)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    except OSError as error:
        raise UserError.of("P631", f"cannot write {output}: {error.strerror}") from None
    return total


def _list_jobs(source: Checkpoint, family: str) -> Iterator[_Job]:
    """Tensors as MLC-LLM joins them, in the checkpoint's order."""
    tensors = source.tensors
    for name, tensor in tensors.items():
        part = _PART.fullmatch(name)
        if name == "lm_head.weight" and source.config.get("tie_word_embeddings"):
            continue
        if part is None:
            yield _Job(name, tensor.read, len(tensor.shape) > 1)
            continue
        stem, kind, what = part.groups()
        if kind in ("k", "v", "up"):
            continue
        kinds = ("q", "k", "v") if kind == "q" else ("gate", "up")
        joined = FAMILIES[family] if kind == "q" else "gate_up_proj"
        names = [f"{stem}.{item}_proj.{what}" for item in kinds]
        missing = [item for item in names if item not in tensors]
        if missing:
            raise UserError.of(
                "P533",
                f"{source.folder} has no tensor {missing[0]!r}, although it has {name!r}",
                help="download the checkpoint again",
            )
        parts = [tensors[item] for item in names]

        def read(parts: list[Any] = parts) -> F32:
            return np.concatenate([item.read() for item in parts])

        yield _Job(f"{stem}.{joined}.{what}", read, what == "weight")


@dataclass(slots=True)
class _Shards:
    """Writes shards, and remembers what is in them."""

    folder: Path
    shards: list[dict[str, Any]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    records: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, values: Raw) -> None:
        """Put a tensor into the open shard, or the next one if it has no room."""
        content = np.ascontiguousarray(values).tobytes()
        if self.data and len(self.data) + len(content) > SHARD_BYTES:
            self.finish()
        self.records.append(
            {
                "name": name,
                "shape": list(values.shape),
                "dtype": values.dtype.name,
                "format": "raw",
                "nbytes": len(content),
                "byteOffset": len(self.data),
            }
        )
        self.data += content

    def finish(self) -> None:
        """Write the open shard."""
        if not self.records:
            return
        name = f"params_shard_{len(self.shards)}.bin"
        (self.folder / name).write_bytes(self.data)
        self.shards.append(
            {
                "dataPath": name,
                "format": "raw-shard",
                "nbytes": len(self.data),
                "records": self.records,
                "md5sum": hashlib.md5(self.data, usedforsecurity=False).hexdigest(),
            }
        )
        self.data, self.records = bytearray(), []


def _write_weights(
    room: Path, jobs: list[_Job], quantization: MlcQuantization, progress: Progress
) -> int:
    shards, weights = _Shards(room), 0
    for number, job in enumerate(jobs):
        values = job.read()
        weights += values.size
        is_quantized = quantization == "q4f16_1" and job.is_matrix
        if is_quantized and values.shape[-1] % GROUP == 0:
            stem = job.name.removesuffix(".weight")
            words, scales = quantize(values)
            shards.add(f"{stem}.q_weight", words)
            shards.add(f"{stem}.q_scale", scales)
        elif is_quantized:
            raise UserError.of(
                "P547",
                f"rows of {job.name!r} are {values.shape[-1]} long, no multiple of {GROUP}",
                help="write it with --quantization fp16",
            )
        else:
            shards.add(job.name, values.astype(np.float16))
        progress("writing weights", (number + 1) / len(jobs))
    shards.finish()
    total = sum(int(shard["nbytes"]) for shard in shards.shards)
    metadata = {
        "ParamSize": sum(len(shard["records"]) for shard in shards.shards),
        "ParamBytes": float(total),
        "BitsPerParam": 8.0 * total / weights,
    }
    index = {"metadata": metadata, "records": shards.shards}
    (room / "tensor-cache.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def quantize(values: F32) -> tuple[U32, F16]:
    """Words of nibbles uint32 [rows, n / 8] and scales fp16 [rows, n / 32] of q4f16_1; element
    8 j + i lies in bits 4 i of word j."""
    groups = values.astype(np.float16).reshape(len(values), -1, GROUP)
    scales = (np.abs(groups).max(-1) / np.float16(LEVELS)).astype(np.float16)
    with np.errstate(all="ignore"):
        codes = np.rint(groups.astype(np.float32) / scales[..., None].astype(np.float32) + LEVELS)
    # A group of zeros has the scale 0.
    nibbles = np.clip(np.nan_to_num(codes, nan=LEVELS), 0, 2 * LEVELS).astype(np.uint32)
    nibbles = nibbles.reshape(len(values), -1, 8)
    words = np.zeros(nibbles.shape[:-1], np.uint32)
    for place in range(8):
        words |= nibbles[..., place] << np.uint32(4 * place)
    return words, scales


def _copy_small_files(source: Checkpoint, room: Path) -> list[str]:
    found = []
    for name in SMALL_FILES:
        content = source.read_file(name)
        if content is None and name == "tokenizer.json":
            content = source.read_tokenizer()
        if content is not None:
            (room / name).write_bytes(content)
            found.append(name)
    return found


def describe_chat(
    config: Mapping[str, Any], quantization: MlcQuantization, tokenizer_files: list[str]
) -> dict[str, Any]:
    """``mlc-chat-config.json`` without a conversation template, which ``mlc_llm gen_config``
    adds."""
    rope = config.get("rope_parameters") or config
    model = {key: config[key] for key in _CONFIG_KEYS if config.get(key) is not None}
    context = int(config.get("max_position_embeddings") or 4096)
    model |= {
        "position_embedding_base": rope.get("rope_theta", 10000.0),
        "context_window_size": context,
        "prefill_chunk_size": min(context, 2048),
        "tensor_parallel_shards": 1,
    }
    return {
        "version": "0.1.0",
        "model_type": config["model_type"],
        "quantization": quantization,
        "model_config": model,
        "vocab_size": config["vocab_size"],
        "context_window_size": context,
        "sliding_window_size": int(config.get("sliding_window") or -1),
        "prefill_chunk_size": min(context, 2048),
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
        "tokenizer_files": tokenizer_files,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
        "pad_token_id": config.get("pad_token_id") or 0,
    }
