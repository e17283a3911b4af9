"""Tiny random models: a model document, the weights of its checkpoint, and its neuron store."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I32
from pi2.formats import find_packing
from pi2.model.tensor import EMBEDDING, FINAL_NORM, HEAD, DenseTensor
from pi2.plan.documents.model import Model
from pi2.store.writer import StoreWriter, TensorPieces
from tests.helpers.bundles import pack_bundles

_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
PUBLISHED_HITS = (
    (64, 8, 8 / 64, 0.28), (64, 8, 24 / 64, 0.68), (64, 8, 32 / 64, 0.74),
    (512, 10, 64 / 512, 0.67), (512, 10, 128 / 512, 0.81), (256, 8, 3 / 20, 0.65),
    (256, 8, 1950 / 19200, 0.549), (256, 6, 1075 / 11008, 0.606), (128, 8, 4 / 17, 0.79),
    (128, 6, 0.05, 0.379), (128, 6, 0.1, 0.546), (128, 6, 0.2, 0.752), (128, 6, 0.5, 0.958),
    (128, 2, 0.05, 0.454), (128, 2, 0.1, 0.611), (128, 2, 0.3, 0.831), (128, 4, 2 / 57, 0.27),
)  # fmt: skip
"""Experts, those of a token, the share that a least recently used cache holds, and what it hits:
OLMoE, two of 512 experts, Qwen3.6-35B-A3B, GLM-5.2, DeepSeek-V4-Flash, Qwen3-30B-A3B with eight and
six experts, gpt-oss-120b with two and four."""
MIXTURE: Mapping[str, Mapping[str, Any]] = {
    "moe": {"experts": 4, "active_experts": 2},
    "tensors": {
        "gate": f"{_EXPERT}w1.weight",
        "up": f"{_EXPERT}w3.weight",
        "down": f"{_EXPERT}w2.weight",
        "predictor_in": f"{_EXPERT}predictor.fc1.weight",
        "predictor_out": f"{_EXPERT}predictor.fc2.weight",
        "predictor_bias": f"{_EXPERT}predictor.bias",
    },
}
"""Changes of `make_model` that make a mixture of four experts, two of which compute a token."""

SPECIAL_TOKENS = ("<begin>", "<end>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    model: Model
    store: Path
    weights: Mapping[str, F32]
    """float32 weights by their names in the checkpoint, before quantisation."""
    original: I32
    """[layers, ffn]: index in the checkpoint of the neuron at every stored place."""


def merge(document: dict[str, Any], changes: Mapping[str, Any] | None) -> None:
    """Replace values of a document, tables by key."""
    for key, value in (changes or {}).items():
        if isinstance(value, Mapping) and isinstance(document.get(key), dict):
            document[key] = {**document[key], **value}
        else:
            document[key] = value


def make_model(changes: Mapping[str, Mapping[str, Any] | Any] | None = None) -> Model:
    """A model document: 3 layers, hidden 64, 96 neurons, GQA 4:2, predictors of rank 32.

    ``changes`` replaces values, tables by key: ``{"shape": {"layers": 1}, "predictor": None}``.
    """
    document: dict[str, Any] = {
        "schema_version": 3,
        "id": "tiny",
        "shape": {
            "layers": 3, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16,
            "vocab": 288, "context": 64,
        },
        "ffn": {"activation": "drelu"},
        "tied_head": True,
        "tokenizer": {"bos": 256, "eos": [257], "add_bos": True},
        "predictor": {"rank": 32},
    }  # fmt: skip
    merge(document, changes)
    return Model.model_validate_json(json.dumps(document))


def draw_weights(model: Model, seed: int = 0) -> dict[str, F32]:
    """Random float32 weights by their names in the checkpoint, of the shapes found there."""
    generator = np.random.default_rng(seed)
    shape, names = model.shape, model.tensors
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    matrices = {
        names.query: (queries, shape.hidden),
        names.key: (keys, shape.hidden),
        names.value: (keys, shape.hidden),
        names.output: (shape.hidden, queries),
        names.gate: (shape.ffn, shape.hidden),
        names.up: (shape.ffn, shape.hidden),
        names.down: (shape.hidden, shape.ffn),
    }
    vectors = {names.attention_norm: shape.hidden, names.ffn_norm: shape.hidden}
    if model.attention.qkv_bias:
        vectors |= {names.query_bias: queries, names.key_bias: keys, names.value_bias: keys}
    if model.predictor is not None:
        rank = model.predictor.rank
        matrices |= {names.predictor_in: (rank, shape.hidden)}
        matrices |= {names.predictor_out: (shape.ffn, rank)}
        vectors |= {names.predictor_bias: shape.ffn}

    def draw(size: tuple[int, ...]) -> F32:
        values = generator.standard_normal(size, dtype=np.float32)
        if len(size) == 1:
            return np.float32(1) + np.float32(0.1) * values
        return values / np.float32(np.sqrt(size[1]))

    if model.moe is not None:
        matrices |= {names.router: (model.moe.experts, shape.hidden)}
    weights = {names.embedding: draw((shape.vocab, shape.hidden))}
    for layer in range(shape.layers):
        for name, size in {**matrices, **{name: (n,) for name, n in vectors.items()}}.items():
            for expert in range(model.expert_count if "{expert}" in name else 1):
                weights[name.format(layer=layer, expert=expert)] = draw(size)
    weights[names.final_norm] = draw((shape.hidden,))
    if not model.tied_head:
        weights[names.head] = draw((shape.vocab, shape.hidden))
    return weights


def write_store(
    path: Path, model: Model, weights: Mapping[str, F32], seed: int = 0, stride: int | None = None
) -> I32:
    """Write a store of ``weights``, neurons in a random order; return ``original``."""
    generator = np.random.default_rng(seed + 1)
    shape, names = model.shape, model.tensors
    original = np.stack(
        [generator.permutation(shape.ffn).astype(np.int32) for _ in range(shape.layers)]
    )
    ranks = None if model.predictor is None else [model.predictor.rank] * shape.layers
    with StoreWriter(path, model, ranks=ranks, order="hotness", stride=stride) as writer:
        for layer, order in enumerate(original):
            gate = weights[names.gate.format(layer=layer)][order]
            up = weights[names.up.format(layer=layer)][order]
            down = np.ascontiguousarray(weights[names.down.format(layer=layer)][:, order].T)
            writer.write_layer(layer, order, [pack_bundles(gate, up, down, writer.bundle)])

        def read(tensor: DenseTensor) -> TensorPieces:
            rows = gather_rows(model, weights, original, tensor.name)
            if tensor.precision == "fp32":
                return [(rows, None)]
            return [find_packing(tensor.precision).quantize(rows)]

        writer.write_dense(read)
        writer.add_file("tokenizer.json", make_tokenizer(shape.vocab))
        writer.finish()
    return original


def gather_rows(model: Model, weights: Mapping[str, F32], original: I32, name: str) -> F32:
    """float32 [rows, length] of the dense tensor ``name`` of a store."""
    names = model.tensors
    whole = {EMBEDDING: names.embedding, HEAD: names.head, FINAL_NORM: names.final_norm}
    if name in whole:
        return np.atleast_2d(weights[whole[name]])
    layer, kind = int(name.split(".")[1]), name.split(".")[2]

    patterns = {
        "qkv": (names.query, names.key, names.value),
        "qkv_bias": (names.query_bias, names.key_bias, names.value_bias),
    }.get(kind) or (getattr(names, kind),)
    rows = np.concatenate([weights[pattern.format(layer=layer)] for pattern in patterns])
    if kind in ("predictor_out", "predictor_bias"):
        rows = rows[original[layer]]
    return np.atleast_2d(rows)


def make_tokenizer(vocab: int) -> bytes:
    """A ``tokenizer.json`` with one token per byte, then two special ones, then fillers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    assert vocab >= 256 + len(SPECIAL_TOKENS)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(SPECIAL_TOKENS)
    tokens += [f"<filler {index}>" for index in range(len(tokens), vocab)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return str(tokenizer.to_str()).encode()


def make_tiny(
    folder: Path, changes: Mapping[str, Mapping[str, Any] | Any] | None = None, *, seed: int = 0,
    stride: int | None = None,
) -> TinyModel:  # fmt: skip
    """A random model with its store in ``folder / "store"``; see `make_model` for ``changes``."""
    model = make_model(changes)
    weights = draw_weights(model, seed)
    store = folder / "store"
    original = write_store(store, model, weights, seed, stride)
    return TinyModel(model=model, store=store, weights=weights, original=original)
