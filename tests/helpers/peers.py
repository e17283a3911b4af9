"""Small GGUF files of random weights, and the logits that llama.cpp computes from them."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pi2.arrays import F32, I32, U8
from pi2.formats import Format, find_format
from pi2.formats.groups import Bits
from tests.helpers.gguf_tensors import write_all

FOLDER = Path(__file__).resolve().parents[1] / "golden/peers"
"""Models as their files state them, and what tools/record_peer_logits.py has recorded."""
VOCAB = 96
TOKENS = [(17 * n * n + 5 * n + 3) % (VOCAB - 3) + 3 for n in range(16)]
PROMPT = 12
"""Tokens that come together; the others come one by one."""
_PLAIN = ("norm", "tid2eid", "gate_inp", "conv", "rope_", "altup", "scale")
"""Parts of names of matrices that no file has quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    name: str
    architecture: str
    settings: Mapping[str, Any]
    """Metadata; a key that begins with a dot follows the architecture."""
    tensors: Mapping[str, Any]
    """Shape by name, where ``*`` is every layer, and two bounds of weights or all values."""
    kind: str = "F32"
    """Type of matrices whose rows are whole blocks of it."""

    def list_tensors(self) -> Iterator[tuple[str, F32 | I32]]:
        draw = np.random.SFC64(0)
        for pattern, (shape, *numbers) in self.tensors.items():
            count = int(np.prod(shape))
            for name in self._name(pattern):
                values = np.array(numbers, np.float32)
                if count != len(numbers):
                    bits = (draw.random_raw(count) >> np.uint64(40)).astype(np.float32)
                    values = values[0] + (values[1] - values[0]) * (bits / np.float32(1 << 24))
                    # Stores of 16 bits have them, too.
                    values = values.astype(np.float16).astype(np.float32)
                values = values.astype(np.int32) if "tid2eid" in name else values
                yield name, values.reshape(shape)

    def _name(self, pattern: str) -> list[str]:
        place = re.match(r"blk\.([\d,*]+)\.", pattern)
        if place is None:
            return [pattern]
        every = map(str, range(self.settings[".block_count"]))
        layers = every if place[1] == "*" else place[1].split(",")
        return [pattern.replace(place[1], layer, 1) for layer in layers]


def read_models() -> dict[str, Tiny]:
    """Models by name; one that is ``like`` another differs in the other keys."""
    stated = json.loads((FOLDER / "models.json").read_text())
    found = {}
    for name, values in stated.items():
        base = stated[values["like"]] if "like" in values else {}
        own = {key: value for key, value in {**base, **values}.items() if key != "like"}
        found[name] = Tiny(name=name, **own)
    return found


def read_records() -> dict[str, Any]:
    with np.load(FOLDER / "logits.npz") as arrays:
        return dict(arrays)


def write_tiny(file: Path, model: Tiny, *, decoded: bool = False) -> Path:
    """Write the model's file; ``decoded``: float32 of the numbers that its blocks stand for."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(file, model.architecture)
    words = [f"w{n}" for n in range(VOCAB)]
    tokens = {"model": "llama", "tokens": words, "scores": [0.0] * VOCAB, "token_type": [1] * VOCAB}
    settings = {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    for key, value in {**model.settings, **settings, ".vocab_size": VOCAB}.items():
        name = f"{model.architecture}{key}" if key.startswith(".") else key
        if isinstance(value, list):
            writer.add_array(name, value)
        elif type(value) is int:
            writer.add_uint32(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    own = find_format(model.kind.lower())
    with patch.dict(gguf.GGML_QUANT_SIZES, {own.number: (own.block, own.block_bytes)}):
        for name, values in model.list_tensors():
            is_plain = own.is_plain or values.ndim == 1 or values.shape[-1] % own.block
            if is_plain or any(part in name for part in _PLAIN):
                writer.add_tensor(name, values)
                continue
            packed = _encode(own, values.astype(np.float32))
            if decoded:
                writer.add_tensor(name, own.decode(packed))
            else:
                writer.add_tensor(name, packed, raw_dtype=own.number)
    write_all(writer)
    return file


def _encode(own: Format, values: F32) -> U8:
    """Encode as the package does, or as this project does if the package doesn't."""
    import gguf

    if isinstance(own, Bits):
        raw = np.empty((*values.shape[:-1], values.shape[-1] // own.block, own.block_bytes), "u1")
        blocks = values.reshape(*raw.shape[:-1], own.block)
        scales = np.abs(blocks).mean(axis=-1, keepdims=True).astype("<f2")
        raw[..., :2] = scales.view(np.uint8)
        codes = np.rint(blocks / scales) + 1 if own.bits == 2 else blocks > 0
        fields = np.clip(codes, 0, 3).astype(np.uint8).reshape(*raw.shape[:-1], -1, 8 // own.bits)
        places = np.arange(0, 8, own.bits, dtype=np.uint8)
        raw[..., 2:] = np.bitwise_or.reduce(fields << places, axis=-1)
        return raw.reshape(*values.shape[:-1], -1)
    if own.name.endswith("_k"):
        return own.encode(values)
    packed: U8 = gguf.quants.quantize(values, gguf.GGMLQuantizationType(own.number))
    return packed


def hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
