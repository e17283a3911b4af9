"""Small GGUF files of random weights, and the logits that llama.cpp computes from them."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I32
from tests.helpers.gguf_files import write_gguf

FOLDER = Path(__file__).resolve().parents[1] / "golden/peers"
"""Models as their files state them, and what tools/record_peer_logits.py has recorded."""
VOCAB = 96
TOKENS = [(17 * n * n + 5 * n + 3) % (VOCAB - 3) + 3 for n in range(16)]
PROMPT = 12
"""Tokens that come together; the others come one by one."""


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


def write_tiny(
    file: Path,
    model: Tiny,
    tensors: Mapping[str, F32 | I32] | None = None,
    *,
    decoded: bool = False,
) -> Path:
    """Write the model's file, of its own ``tensors`` if no others are given; see `write_gguf`."""
    if tensors is None:
        tensors = dict(model.list_tensors())
    words = [f"w{n}" for n in range(VOCAB)]
    tokens = {"model": "llama", "tokens": words, "scores": [0.0] * VOCAB, "token_type": [1] * VOCAB}
    words_of = {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    settings = {**model.settings, **words_of, ".vocab_size": VOCAB}
    return write_gguf(file, model.architecture, settings, tensors, model.kind, decoded=decoded)


def hash_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
