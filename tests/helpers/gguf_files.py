"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pi2.arrays import F32, I32, U8
from pi2.formats import Format, find_format
from pi2.formats.integers import BitCodes
from tests.helpers.blocks import make_blocks
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_tensors import list_settings, translate
from tests.helpers.models import draw_weights, make_model

_PLAIN = ("norm", "tid2eid", "gate_inp", "conv", "rope_", "altup", "scale")
"""Parts of names of matrices that no file has quantised."""
_WIDE = (".ple.layer_multipliers", ".ple.head_offsets", ".ple.head_vocab_sizes")
"""Metadata of 64 bits."""


def write_gguf(
    file: Path, architecture: str, settings: Mapping[str, Any],
    tensors: Mapping[str, F32 | I32],
    kind: str = "F32", kinds: Mapping[str, str] | None = None, *, decoded: bool = False,
    **options: Any,
) -> Path:  # fmt: skip
    """Write ``tensors``, matrices in the type ``kind``, those whose names end with a key of
    ``kinds`` in another, or in float32 where their rows are no whole blocks; return ``file``.

    Keys of ``settings`` that begin with a dot follow the architecture.  ``decoded``: float32 of the
    numbers that blocks stand for."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, architecture, **options)
    for key, value in settings.items():
        name = f"{architecture}{key}" if key.startswith(".") else key
        if isinstance(value, list | np.ndarray):
            kinds_of = gguf.GGUFValueType
            wide = kinds_of.UINT64 if key in _WIDE else None
            writer.add_key_value(name, np.asarray(value).tolist(), kinds_of.ARRAY, sub_type=wide)
        elif type(value) is int:
            writer.add_uint32(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, values in tensors.items():
        chosen = next((own for end, own in (kinds or {}).items() if name.endswith(end)), kind)
        own = find_format(chosen.lower())
        is_plain = own.name == "f32" or values.ndim == 1 or values.shape[-1] % own.block
        if is_plain or any(part in name for part in _PLAIN):
            plain = values if values.dtype == np.int32 else values.astype(np.float32)
            writer.add_tensor(name, np.ascontiguousarray(plain))
            continue
        packed = _encode(own, np.ascontiguousarray(values, np.float32))
        if decoded:
            writer.add_tensor(name, own.decode(packed))
            continue
        with patch.dict(gguf.GGML_QUANT_SIZES, {own.number: (own.block, own.block_bytes)}):
            writer.add_tensor(name, packed, raw_dtype=own.number)
    write_all(writer)
    return file


def write_all(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _encode(own: Format, values: F32) -> U8:
    """Encode as the package does, or as this project does if the package doesn't."""
    import gguf

    if isinstance(own, BitCodes):
        raw = np.empty((*values.shape[:-1], values.shape[-1] // own.block, own.block_bytes), "u1")
        blocks = values.reshape(*raw.shape[:-1], own.block)
        scales = np.abs(blocks).mean(axis=-1, keepdims=True).astype("<f2")
        raw[..., :2] = scales.view(np.uint8)
        codes = np.rint(blocks / scales) + 1 if own.bits == 2 else blocks > 0
        fields = np.clip(codes, 0, 3).astype(np.uint8).reshape(*raw.shape[:-1], -1, 8 // own.bits)
        places = np.arange(0, 8, own.bits, dtype=np.uint8)
        raw[..., 2:] = np.bitwise_or.reduce(fields << places, axis=-1)
        return raw.reshape(*values.shape[:-1], -1)
    if own.name.startswith("iq"):  # which nothing here writes: any bits are weights
        made = make_blocks(own, values.size // own.block, np.random.default_rng(values.size))
        return made.reshape(*values.shape[:-1], -1)
    if own.name.endswith("_k"):
        return own.encode(values)
    packed: U8 = gguf.quants.quantize(values, gguf.GGMLQuantizationType(own.number))
    return packed


SPACE = "\u2581"
"""How SentencePiece writes a space."""


def make_sentence_piece() -> dict[str, Any]:
    """Metadata of a small SentencePiece model: marks, bytes, pieces."""
    pieces = [f"{SPACE}hello", f"{SPACE}world", f"{SPACE}two", "spa", "ces", "hel", "lo", "wor"]
    letters = sorted({*"helowrdtspacesnivbxy123456790", SPACE})
    parts = ["ld", f"{SPACE}w", "he", "wo", "tw", f"{SPACE}t", "sp", "ce", f"{SPACE}{SPACE}"]
    parts += [f"{SPACE}h", f"{SPACE}he", f"{SPACE}hel", f"{SPACE}wor", f"{SPACE}tw"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(tokens)
    kinds = [2, 3, 3] + [6] * 256
    for rank, piece in enumerate([*parts, *pieces, *letters]):
        tokens.append(piece)
        scores.append(-float(rank))
        kinds.append(1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_random_gguf(
    folder: Path, shape: Mapping[str, int], changes: Mapping[str, Any] | None = None,
    kind: str = "Q8_0", kinds: Mapping[str, str] | None = None, template: str | None = None,
) -> Path:  # fmt: skip
    """Write a model of random weights, with a tokenizer: see `make_model`; the folder of the same
    model is ``checkpoint``."""
    metadata = make_sentence_piece()
    metadata |= {} if template is None else {"tokenizer.chat_template": template}
    own = {**shape, "vocab": len(metadata["tokenizer.ggml.tokens"])}
    usual = {"shape": own, "predictor": None, "ffn": {"activation": "silu"}}
    model = make_model({**usual, **(changes or {})})
    weights = draw_weights(model, 0)
    checkpoint = write_checkpoint(folder / "checkpoint", model, weights)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"max_position_embeddings": model.shape.context, "hidden_act": "silu"}
    if model.moe is not None:
        experts, active = model.moe.experts, model.moe.active_experts
        config |= {"num_local_experts": experts, "num_experts_per_tok": active}
        config |= {"model_type": "mixtral"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    settings, tensors = list_settings(model) | metadata, translate(model, weights)
    return write_gguf(folder / "model.gguf", "llama", settings, tensors, kind, kinds)
