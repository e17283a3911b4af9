"""Write a Hugging Face checkpoint of random bfloat16 weights, to time `pi2 convert` with.

``python tools/synthesize_checkpoint.py plans/models/llama-2-7b.model.toml DIR --shards 14`` writes
config.json, tokenizer.json and safetensors files with their index, as they lie on the hub; tensors
have their true sizes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pi2.fitting.check import check_file
from pi2.importing.requirements import Requirement, list_requirements
from pi2.plan.documents.model import Model
from synthesis.tokenizer import make_tokenizer

PIECE = 2**24
"""Weights that are drawn once; tensors are made of them again and again."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model document of the Llama family")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer layers than the document has")
    parser.add_argument("--shards", type=int, default=1, help="files that the tensors are cut into")
    options = parser.parse_args()
    model = check_file(options.model).document
    assert isinstance(model, Model)
    if options.layers is not None:
        shape = model.shape.model_copy(update={"layers": options.layers})
        model = model.model_copy(update={"shape": shape})
    options.folder.mkdir(parents=True)
    (options.folder / "config.json").write_text(json.dumps(make_config(model), indent=1))
    (options.folder / "tokenizer.json").write_bytes(make_tokenizer(model))
    write_shards(options.folder, list(list_requirements(model)), options.shards)


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


def write_shards(folder: Path, needs: Sequence[Requirement], shards: int) -> None:
    """Write all tensors into ``shards`` files of about the same size, and their index."""
    generator = np.random.default_rng(0)
    numbers = generator.standard_normal(PIECE, dtype=np.float32) * np.float32(0.02)
    # bfloat16 is the upper half of a float32.
    drawn = (numbers.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    total = sum(2 * math.prod(need.shape) for need in needs)
    groups: list[list[Requirement]] = [[] for _ in range(shards)]
    place = 0
    for need in needs:
        groups[place * shards // total].append(need)
        place += 2 * math.prod(need.shape)
    if shards == 1:
        write_weights(folder / "model.safetensors", needs, drawn)
        return
    index: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        write_weights(folder / name, group, drawn)
        index.update((need.name, name) for need in group)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def write_weights(file: Path, needs: Sequence[Requirement], drawn: bytes) -> None:
    """Write tensors into one file; ``drawn`` is what they are made of."""
    header: dict[str, object] = {}
    place = 0
    for need in needs:
        span = [place, place + 2 * math.prod(need.shape)]
        header[need.name] = {"dtype": "BF16", "shape": list(need.shape), "data_offsets": span}
        place = span[1]
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for need in needs:
            size = 2 * math.prod(need.shape)
            while size > 0:
                size -= stream.write(drawn[:size])


if __name__ == "__main__":
    main()
