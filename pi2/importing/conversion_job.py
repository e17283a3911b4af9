"""What a conversion writes, in which order, and the key by which its files are known again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import I32
from pi2.importing.activations import (
    count_bands,
    group_experts,
    order_neurons,
    read_counts,
)
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.quantizers.quantizer import Quantizer
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import ScalesPlace
from pi2.store.identity import describe_weights
from pi2.store.manifest import Order
from pi2.store.neuron_groups import keep_groups


def choose_order(model: Model, activations: Path | None) -> I32:
    """Original neuron at every stored place, int32 [layers, neurons]; the neurons of a mixture are
    numbered through its experts."""
    layers, neurons = model.shape.layers, model.layer_neurons
    if activations is None:
        return np.tile(np.arange(neurons, dtype=np.int32), (layers, 1))
    orders = order_neurons(read_counts(activations, layers, neurons))
    if name_order(model, activations) != "hotness":
        bands = count_bands(model)
        orders = np.stack([group_experts(order, model.shape.ffn, bands) for order in orders])
    return keep_groups(model, orders)


def name_order(model: Model, activations: Path | None) -> Order:
    """Order of the store.  The checkpoint's is expert by expert; without predictors experts are
    read as a whole, and stay so."""
    if activations is None:
        return "index"
    is_routed = model.moe is not None and model.predictor is None
    return "expert" if is_routed else "hotness"


def describe_files(source: Checkpoint) -> list[list[str | int]]:
    """What is equal where the weight files are."""
    describe = describe_file if source.shards is None else source.shards.describe
    return [describe(file) for file in source.files]


def describe_file(file: Path) -> list[str | int]:
    """What is equal where a file is: its place, its bytes and the time of its last change."""
    found = file.stat()
    return [str(file.resolve()), found.st_size, found.st_mtime_ns]


def describe_job(
    model: Model,
    order: I32,
    inputs: Sequence[Sequence[str | int]],
    stride: int | None,
    scales: ScalesPlace,
    quantizer: Quantizer,
) -> str:
    """A key that is equal where the same call would write the same files."""
    fields: dict[str, Any] = {
        "version": version("pi2"),
        "model": describe_weights(model),
        "tensors": model.tensors.model_dump(mode="json"),
        "inputs": inputs,
        "order": hashlib.sha256(order.tobytes()).hexdigest(),
        "stride": stride,
        "scales": scales,
        "quantizer": quantizer.describe(),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
