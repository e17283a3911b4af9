"""Small GGUF files that run as they are, next to numpy and to stores that are made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import pi2
from pi2.arrays import F32
from pi2.importing.checkpoint import open_checkpoint
from pi2.importing.new_model import describe_checkpoint
from pi2.importing.quantize import Wish, quantize_checkpoint
from pi2.weights.gguf_weights import GgufWeights
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_goldens import LONG, UNSAID, convert
from tests.helpers.gguf_tensors import list_settings, read_weights, translate
from tests.helpers.goldens import (
    EXACT,
    change_config,
    copy_checkpoint,
    make_small_tokenizer,
    read_golden,
    write_plan,
)
from tests.helpers.peers import TOKENS, VOCAB, read_models, write_tiny

UNROUNDED: dict[str, Any] = {"kv.type": "fp32"}
SETTINGS: dict[str, Any] = {
    "decode.activations": "fp32", "prefill.activations": "fp32", "kv.context": 64
}  # fmt: skip
NEAR = 5e-5
"""Of the largest logit: what sums in another order change."""
FLIPPED = 0.1
"""Of what rounding the KV cache to fp16 changes: some elements may be rounded the other way."""
_ENDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "bamboo": {},
    "opt": {".attention.layer_norm_epsilon": 1e-5},
    "phimoe": {
        ".rope.scaling.attn_factor": LONG["attention_factor"],
        ".rope.scaling.original_context_length": LONG["original_max_position_embeddings"],
    },
}
"""Golden models whose files llama.cpp does not compute, with what files state beside sizes; what no
file says becomes its usual value."""
INDEXED = ("deepseek-v32", "glm-moe-dsa", "minimax-m3-blocks")
"""Golden models whose index leaves keys out, next to transformers."""
MODELS = read_models()


def write_file(name: str, folder: Path) -> Path:
    """The file of a tiny model, or of a golden one."""
    file = folder / "tiny.gguf"
    if name in MODELS:
        return write_tiny(file, MODELS[name])
    checkpoint = copy_checkpoint(name, folder / "checkpoint")
    if name in INDEXED:
        return make_file(checkpoint, file)
    change_config(checkpoint, **UNSAID.get(name, {}))
    model = describe_checkpoint(checkpoint).model
    tensors = translate(model, read_weights(checkpoint), is_permuted=name == "bamboo")
    for length in ("long", "short") if name == "phimoe" else ():
        factors = np.array(LONG[f"{length}_factor"], np.float32)
        tensors[f"rope_factors_{length}.weight"] = factors
    return write_gguf(file, name, list_settings(model) | OTHERS[name] | _ENDS, tensors)


def make_file(checkpoint: Path, file: Path) -> Path:
    """The file that pi2 makes of a checkpoint, with all of its bits."""
    source = open_checkpoint(checkpoint)
    quantize_checkpoint(source, describe_checkpoint(source).model, file, Wish(keeps=True))
    return file


class WholeFile:
    def __init__(self, name: str, folder: Path) -> None:
        self._folder = folder
        self.file = write_file(name, folder)
        self._tokenizer = folder / "checkpoint/tokenizer.json"
        self._tokenizer.parent.mkdir(exist_ok=True)
        self._tokenizer.write_bytes(make_small_tokenizer(VOCAB))
        self.plan = folder / "file.plan.toml"
        self.plan.write_text(
            f'schema_version = 3\nweights = "{self.file.name}"\n'
            'tokenizer = "checkpoint/tokenizer.json"\n'
        )
        self.prompt = TOKENS if name in MODELS else read_golden(name).prompt

    @cached_property
    def expected(self) -> F32:
        """Logits of the prompt in numpy, without a rounded KV cache."""
        return self.compute_in_numpy(**UNROUNDED)

    @cached_property
    def of_store(self) -> F32:
        """Of the store that is made of the file, by another computation."""
        model = convert(self.file, self._folder / "store", self._tokenizer, EXACT)
        with pi2.load(write_plan(self._folder, model, {})) as loaded:
            return loaded.logits(self.prompt)

    def open(self, **settings: object) -> pi2.LoadedModel:
        return pi2.load(self.plan, set={**SETTINGS, **settings})

    def compute_in_numpy(self, **settings: object) -> F32:
        with self.open(**{"backends.cpu": "reference"}, **settings) as loaded:
            return loaded.logits(self.prompt)

    @contextmanager
    def stream(self, share: float = 0.5, **settings: object) -> Iterator[pi2.LoadedModel]:
        """Open the file with room for a share of its matrices, the ring for the others included.

        The ring is the least one: layers and the head have two slots each, of 16 rows and the
        blocks at their ends."""
        settings = {"prefill.chunk": 32, **settings}
        with self.open(**settings) as whole:
            own = whole.plan
        assert own.file is not None
        segments = own.plan.memory.segments
        rest = segments.runtime + segments.attention + segments.kv + segments.state
        rest += segments.workspace + int(own.file.matrix_bytes * share)
        with GgufWeights.open(self.file, has_texts=False) as weights:
            rows = (tensor.row_bytes for _, _, tensor in weights.list_matrices())
            ring = 4 * (-(-16 * max(rows) // 4096) + 1) * 4096
        patches = (
            patch("pi2.weights.file_plan.LEAST_RING", ring),
            patch("pi2.weights.file_plan.USUAL_RING", ring),
            patch("pi2.engine.file_loading.PIECE_BYTES", 1024),
        )
        with patches[0], patches[1], patches[2]:
            with self.open(**{"memory.budget": f"{rest} B"}, **settings) as found:
                yield found
