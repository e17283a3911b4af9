"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.arrays import F32
from pi2.formats import find_format
from tests.helpers.blocks import make_blocks
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_metadata import add_config
from tests.helpers.gguf_tensors import ARCHITECTURES, translate, write_all
from tests.helpers.models import draw_weights, make_model


def write_gguf(
    file: Path, config: Mapping[str, Any], tensors: Mapping[str, F32], kind: str = "F32",
    changes: Mapping[str, Any] | None = None, kinds: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:  # fmt: skip
    """Write ``tensors`` (named as GGUF does), matrices in the type ``kind``, those whose names end
    with a key of ``kinds`` in another, or in float32 where their rows are not a multiple of 32;
    return ``file``."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(
        file, ARCHITECTURES.get(config["model_type"], config["model_type"]), **options
    )
    add_config(writer, config)
    for key, value in (changes or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif type(value) is int:
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    usual = kind
    for name, values in tensors.items():
        kind = next((own for end, own in (kinds or {}).items() if name.endswith(end)), usual)
        number = gguf.GGMLQuantizationType[kind]
        plain = values.ndim == 1 or "rope_freqs" in name or kind == "F32"
        plain |= kind.startswith("Q") and values.shape[-1] % 32 != 0
        if plain:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            values = np.ascontiguousarray(values, np.float32)
            if kind.startswith("IQ"):  # which nothing here writes: any bits are weights
                own = find_format(kind.lower())
                generator = np.random.default_rng(values.size)
                blocks = make_blocks(own, values.size // own.block, generator)
                packed = blocks.reshape(*values.shape[:-1], -1)
            elif kind.endswith("_K"):  # which the package does not write
                packed = find_format(kind.lower()).encode(values)
            else:
                packed = gguf.quants.quantize(values, number)
            writer.add_tensor(name, packed, raw_dtype=number)
    write_all(writer)
    return file


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


def make_tokens(count: int) -> dict[str, Any]:
    metadata = make_sentence_piece()
    names = [*metadata["tokenizer.ggml.tokens"], *(f"w{n}" for n in range(count))][:count]
    kinds = [*metadata["tokenizer.ggml.token_type"].tolist(), *[1] * count][:count]
    scores = [*metadata["tokenizer.ggml.scores"].tolist(), *[-1e3] * count][:count]
    metadata |= {"tokenizer.ggml.tokens": names, "tokenizer.ggml.token_type": kinds}
    return metadata | {"tokenizer.ggml.scores": scores}


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
    further = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in metadata.items()
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    return write_gguf(
        folder / "model.gguf", config, translate(weights, config), kind, further, kinds
    )
