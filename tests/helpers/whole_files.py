"""GGUF files of golden models that run as they are, next to numpy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from safetensors.numpy import save_file

import pi2
from pi2.arrays import F32
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_gemma import write_gemma3n, write_gemma4
from tests.helpers.gguf_goldens import UNNAMED, UNSAID, convert
from tests.helpers.gguf_llama4 import FIXED, write_llama4
from tests.helpers.gguf_nemotron import write_nemotron
from tests.helpers.gguf_tensors import read_checkpoint, translate
from tests.helpers.goldens import EXACT, change_config, copy_checkpoint, read_golden, write_plan

UNROUNDED = {"kv.type": "fp32"}
SETTINGS = {"decode.activations": "fp32", "prefill.activations": "fp32", "kv.context": 64}
NEAR = 5e-5
"""Of the largest logit: what sums in another order change."""
OLDER = "-older"
"""End of names of files with keys and values of heads in one matrix."""
PIECE = 3 << 12
"""Room for a piece of a streamed matrix."""
FLIPPED = 0.1
"""Of what rounding the KV cache to fp16 changes: some elements may be rounded the other way."""

TOKENS = {"qwen3-5": 14}
"""Tokens of the prompt that are taken of some: of the next one, a head's mix nearly cancels out,
and its norm makes the last bits of float32 a thousand times larger."""


def write_file(name: str, folder: Path) -> Path:
    """The checkpoint of a golden model as a file in ``folder``; what no file says becomes its usual
    value."""
    name, is_older = name.removesuffix(OLDER), name.endswith(OLDER)
    checkpoint, file = copy_checkpoint(name, folder / "checkpoint"), folder / "tiny.gguf"
    if name.startswith("gemma3n"):
        return write_gemma3n(file, checkpoint)
    if name.startswith("gemma4"):
        return write_gemma4(file, checkpoint)
    if name == "llama4":
        change_config(checkpoint, **FIXED)
        return write_llama4(file, *read_checkpoint(checkpoint))
    if name.startswith("nemotron-h"):
        change_config(checkpoint, time_step_min=0.001)
        return write_nemotron(file, *read_checkpoint(checkpoint))
    change_config(checkpoint, **UNSAID.get(name, {}))
    config, weights = read_checkpoint(checkpoint)
    if name in UNNAMED:
        weights = {key: v for key, v in weights.items() if not key.endswith(UNNAMED[name])}
        save_file(weights, checkpoint / "model.safetensors")
    tensors = translate(weights, config)
    if is_older:
        config |= {"has_whole_keys": True}
        join_keys(tensors, weights)
    return write_gguf(file, config, tensors)


def join_keys(tensors: dict[str, F32], weights: Mapping[str, F32]) -> None:
    """Put keys and values of latent attention into one matrix, as files of before May 2025 have
    them, which state the lengths of whole keys."""
    for name, values in weights.items():
        if name.endswith("kv_b_proj.weight"):
            block = f"blk.{name.split('.')[2]}.attn"
            del tensors[f"{block}_k_b.weight"], tensors[f"{block}_v_b.weight"]
            tensors[f"{block}_kv_b.weight"] = values


class WholeFile:
    """A golden model's file, with the logits of its prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        self.file = write_file(name, folder)
        self.plan = folder / "file.plan.toml"
        tokenizer = "checkpoint/tokenizer.json"
        self.plan.write_text(
            f'schema_version = 3\nweights = "{self.file.name}"\ntokenizer = "{tokenizer}"\n'
        )
        prompt = read_golden(name.removesuffix(OLDER)).prompt
        self.prompt = prompt[: TOKENS.get(name)]
        model = convert(self.file, folder / "store", folder / tokenizer, EXACT)
        with pi2.load(write_plan(folder, model, {})) as loaded:
            self.of_store: F32 = loaded.logits(self.prompt)
            """Of the store that is made of the file, by another computation."""
        self.expected = self.compute_in_numpy(**UNROUNDED)

    def open(self, **settings: object) -> pi2.LoadedModel:
        return pi2.load(self.plan, set={**SETTINGS, **settings})

    def compute_in_numpy(self, **settings: object) -> F32:
        with self.open(**{"backends.cpu": "reference"}, **settings) as loaded:
            return loaded.logits(self.prompt)

    @contextmanager
    def stream(self, **settings: object) -> Iterator[pi2.LoadedModel]:
        """Open the file with so little memory that about half of its matrices are read for every
        step, in pieces of a few rows."""
        with self.open(**settings) as whole:
            own = whole.plan
        assert own.file is not None
        segments = own.plan.memory.segments
        rest = segments.runtime + segments.attention + segments.kv + segments.state
        rest += segments.workspace
        ring, most = 6 * PIECE, own.file.matrix_bytes
        patches = (
            patch("pi2.weights.file_plan.LEAST_RING", ring),
            patch("pi2.weights.file_plan.USUAL_RING", ring),
            patch("pi2.engine.file_loading.PIECE_BYTES", 1024),
        )
        with patches[0], patches[1], patches[2]:
            resident = max(0, min(most // 2, most - ring - 1))
            budget = {"memory.budget": f"{rest + ring + resident} B"}
            with self.open(**budget, **settings) as found:
                yield found

    def check(self, found: F32, first: int = 0) -> None:
        """Compare the logits of the prompt's tokens from ``first`` on with the expected ones."""
        expected = self.expected[first : first + len(found)]
        assert np.abs(found - expected).max() <= NEAR * np.abs(self.expected).max()
