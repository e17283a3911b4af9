"""Write a Hugging Face checkpoint of random bfloat16 weights, to time `pi2 convert` with.

``python tools/synthesize_checkpoint.py plans/models/llama-2-7b.model.toml DIR --layers 8`` writes
config.json, tokenizer.json and one safetensors file; its tensors have their true sizes.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from pi2.importing.requirements import list_requirements
from pi2.importing.synthesis.tokenizer import make_tokenizer
from pi2.plan.check import check_file
from pi2.plan.model import Model

PIECE = 2**24
"""Weights that are drawn once; tensors are made of them again and again."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model document of the Llama family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the document has")
    options = parser.parse_args()
    model = check_file(options.model).document
    assert isinstance(model, Model)
    if options.layers is not None:
        shape = model.shape.model_copy(update={"layers": options.layers})
        model = model.model_copy(update={"shape": shape})
    options.folder.mkdir(parents=True)
    (options.folder / "config.json").write_text(json.dumps(make_config(model), indent=1))
    (options.folder / "tokenizer.json").write_bytes(make_tokenizer(model))
    write_weights(options.folder / "model.safetensors", model)


def make_config(model: Model) -> dict[str, object]:
    """What ``config.json`` says of a Llama."""
    shape = model.shape
    return {
        "model_type": "llama",
        "_name_or_path": model.id,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "hidden_act": model.ffn.activation,
        "rms_norm_eps": model.norm.epsilon,
        "rope_theta": model.rope.theta,
        "tie_word_embeddings": model.tied_head,
    }


def write_weights(file: Path, model: Model) -> None:
    """Write all tensors; bfloat16 is the upper half of a float32."""
    generator = np.random.default_rng(0)
    numbers = generator.standard_normal(PIECE, dtype=np.float32) * np.float32(0.02)
    drawn = (numbers.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    header: dict[str, object] = {}
    place = 0
    sizes = []
    for need in list_requirements(model):
        size = 2 * math.prod(need.shape)
        span = [place, place + size]
        header[need.name] = {"dtype": "BF16", "shape": list(need.shape), "data_offsets": span}
        place += size
        sizes.append(size)
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for size in sizes:
            while size > 0:
                size -= stream.write(drawn[:size])


if __name__ == "__main__":
    main()
