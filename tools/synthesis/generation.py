"""Writes a synthetic store: layer by layer, chunk by chunk, resumable."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from pi2.arrays import I32, U8
from pi2.importing.conversion_job import count_bands, group_experts
from pi2.model.tensor import DenseTensor
from pi2.plan.weights.layout import ScalesPlace
from pi2.progress import Progress, ignore_progress
from pi2.store.manifest import Manifest
from pi2.store.writer import StoreWriter, TensorPieces
from synthesis.blueprint import Blueprint
from synthesis.dense import make_tensor
from synthesis.neurons import count_chunks, make_bundles
from synthesis.tokenizer import make_tokenizer

RECIPE_FILE = "synthesis.json"
"""What was asked for, inside the store."""


def write_synthetic_store(
    output: Path,
    blueprint: Blueprint,
    *,
    stride: int | None = None,
    scales: ScalesPlace = "inline",
    order: Literal["hotness", "expert"] = "hotness",
    replace: bool = False,
    progress: Progress = ignore_progress,
) -> Manifest:
    """Write the store of a calibrated ``blueprint`` to ``output``.

    Needs about 0.3 GiB of memory whatever the model's size; ``order`` by expert (of a mixture) a
    band of a layer's neurons more.  A job that was killed or interrupted
    goes on where it was when called again; the bytes are the same.  Raises `UserError` P521-P523.
    """
    model, recipe = blueprint.model, blueprint.recipe
    layers = model.shape.layers
    ranks = None if model.predictor is None else [model.predictor.rank] * layers
    with StoreWriter(
        output,
        model,
        ranks=ranks,
        order=order,
        synthetic=True,
        stride=stride,
        scales=scales,
        replace=replace,
        job=f"{recipe.describe_job(model, stride or 0)} {order} {scales}",
    ) as writer:
        steps = layers + len(writer.tensors) // 4
        with ThreadPoolExecutor(max_workers=max(1, os.cpu_count() or 1)) as pool:
            for layer in range(layers):
                bundles = _make_layer(blueprint, layer, writer, pool)
                original = blueprint.draw_original(layer)
                if order == "expert":
                    bands = count_bands(model)
                    grouped = group_experts(original, model.shape.ffn, bands)
                    bundles = _rearrange(bundles, original, grouped)
                    original = grouped
                writer.write_layer(layer, original, bundles)
                progress("making neurons", (layer + 1) / steps)
            done = layers

            def read(tensor: DenseTensor) -> TensorPieces:
                nonlocal done
                done += 1
                progress("making dense weights", (layers + (done - layers) / 4) / steps)
                return make_tensor(blueprint, tensor)

            writer.write_dense(read)
        writer.add_file(model.tokenizer.file, make_tokenizer(model))
        text = json.dumps(recipe.describe(model), indent=1)
        writer.add_file(RECIPE_FILE, text.encode() + b"\n")
        manifest = writer.finish()
    progress("making dense weights", 1.0)
    return manifest


def _make_layer(
    blueprint: Blueprint, layer: int, writer: StoreWriter, pool: ThreadPoolExecutor
) -> Iterator[U8]:
    """Bundles of a layer in stored order; called only when its file is to be written."""
    directions = blueprint.draw_directions(layer)
    tasks = (
        pool.submit(make_bundles, blueprint, layer, chunk, directions, writer.bundle)
        for chunk in range(count_chunks(blueprint))
    )
    yield from _take_in_order(tasks, ahead=os.cpu_count() or 1)


def _rearrange(bundles: Iterable[U8], original: I32, wanted: I32) -> Iterator[U8]:
    """``bundles`` of the neurons ``original`` [n], in pieces, as those of ``wanted`` [n]; holds no
    more of them than neurons move."""
    places = np.empty(len(original), np.int64)
    places[original] = np.arange(len(original))
    places = places[wanted]
    # How many have to be there before the first so many can be written.
    needed = np.maximum.accumulate(places) + 1
    held, first, done = [], 0, 0
    for piece in bundles:
        held.append(piece)
        there = first + sum(map(len, held))
        ready = int(np.searchsorted(needed, there, side="right"))
        if ready == done:
            continue
        together = np.concatenate(held)
        yield together[places[done:ready] - first]
        least = int(places[ready:].min(initial=there))
        held, first, done = [together[least - first :].copy()], least, ready


def _take_in_order(tasks: Iterable[Future[U8]], *, ahead: int) -> Iterator[U8]:
    """Results in order, while at most ``ahead`` of the following are being made."""
    waiting: deque[Future[U8]] = deque()
    for task in tasks:
        waiting.append(task)
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
