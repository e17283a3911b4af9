"""Brings a GGUF file into a bundle as it is, with what a run needs to know of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.contract import SHARED, BlockSpec
from pi2.model.tensors import list_sources
from pi2.phone.documents import NUMBERS, STORE, TABLE, describe_file
from pi2.plan.arithmetic.resolved import FileFacts, ResolvedPlan
from pi2.store.files import hash_file
from pi2.weights.gguf_weights import GgufWeights

TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def list_block_specs(resolved: ResolvedPlan) -> list[BlockSpec]:
    """Return the libraries that a run of a file's plan asks for."""
    unit, weights = resolved.device.units[resolved.sparse_unit], take_weights(resolved)
    assert unit.features is not None and unit.architecture is not None
    formats = {tensor.format for _, _, tensor in weights.list_matrices()}
    return [
        BlockSpec(
            library=name, architecture=unit.architecture, features=tuple(sorted(unit.features))
        )
        for name in (*SHARED, *sorted({*formats, "f32"}))
    ]


def take_weights(resolved: ResolvedPlan) -> GgufWeights:
    assert resolved.file is not None and isinstance(resolved.file.source, GgufWeights)
    return resolved.file.source


def describe_weights(facts: FileFacts, weights: GgufWeights) -> tuple[dict[str, Any], F32]:
    """Return the table of a file's tensors, and its vectors one after the other."""
    places = dict.fromkeys((own.key, own.layer) for own in list_sources(weights.model))
    matrices = [(key, layer) for key, layer, _ in weights.list_matrices()]
    tensors, vectors, numbers, place = [], [], [], 0
    for key, layer in places:
        tensor = None if key.endswith("_bias") else weights.find(key, layer)
        if tensor is not None:
            own = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__}
            tensors.append({"key": key, "layer": layer, **own})
        if tensor is None or tensor.rows == 1:
            vector = weights.read_vector(key, layer)
            if vector is not None:
                vectors.append((key, layer, place, place + vector.size))
                numbers.append(vector)
                place += vector.size
    table = {
        "files": [file.name for file in weights.files],
        "tensors": tensors,
        "matrices": matrices,
        "vectors": vectors,
        "numbers": NUMBERS,
        "facts": describe_file(facts),
        "sha256": {file.name: hash_file(file) for file in weights.files},
    }
    joined = np.concatenate(numbers) if numbers else np.zeros(0, np.float32)
    return table, joined.astype("<f4")


def write_weights(room: Path, resolved: ResolvedPlan) -> None:
    """Write all but the file itself into the folder of weights."""
    weights, folder = take_weights(resolved), room / STORE
    folder.mkdir(exist_ok=True)
    assert resolved.file is not None
    table, numbers = describe_weights(resolved.file, weights)
    (folder / TABLE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    numbers.tofile(folder / NUMBERS)
    checkpoint = weights.checkpoint
    for name in TEXTS:
        content = checkpoint.read_tokenizer() if name == TEXTS[0] else checkpoint.read_file(name)
        if content is not None:
            (folder / name).write_bytes(content)
