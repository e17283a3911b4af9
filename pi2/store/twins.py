"""The low-bit twin of a store: a copy of all neurons in fewer bits, a second file.

It is what a run keeps in memory to compute neurons with that are on flash and not worth a read.
Twins lie in stored order, layer after layer.  They are made of the neurons in the store: of int4
and int8 ones, what these have lost already is small beside what a twin loses.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.plan.weights.bundles import (
    assemble_bundles,
    slice_bias,
    slice_experts,
    slice_factors,
    unpack_part,
)
from pi2.plan.weights.layout import BundleLayout, TwinPrecision, find_twin_obstacle, lay_out_twin
from pi2.plan.weights.rounding import dequantize, quantize
from pi2.progress import Progress, ignore_progress
from pi2.regular_file import open_regular
from pi2.store.additions import put_weights
from pi2.store.arrow_file import PieceFeed, lay_out_rows_file
from pi2.store.dense_reader import read_bytes
from pi2.store.files import HashedFile
from pi2.store.manifest import TWIN_FILE, Manifest, StoredFile, StoredTwin
from pi2.store.reader import NeuronStore
from pi2.store.unfinished import explain_os_error

_PIECE_NEURONS = 256


def make_twins(
    bundles: U8, layout: BundleLayout, precision: TwinPrecision
) -> tuple[U8, float, float]:
    """Return the twins uint8 [n, stride] of ``bundles`` [n, .], which have their scales in them as
    ``layout`` says, the sum of all squared errors, and that of all squared weights."""
    parts, error, total = [], 0.0, 0.0
    for index in range(len(layout.parts)):
        rows = unpack_part(bundles, layout, index)
        weights, scales = quantize(rows, precision)
        lost = rows - dequantize(weights, scales, layout.hidden, precision)
        error += float(np.square(lost, dtype=np.float64).sum())
        total += float(np.square(rows, dtype=np.float64).sum())
        parts.append((weights, scales))
    biases = None
    if layout.biases:
        columns = [slice_bias(bundles, layout, index) for index in range(len(layout.biases))]
        biases = np.stack(columns, axis=1)
    experts = None if layout.expert_offset is None else slice_experts(bundles, layout)
    target = lay_out_twin(layout, precision)
    factors = None if layout.factor_offset is None else slice_factors(bundles, layout)
    return assemble_bundles(parts, target, biases, experts, factors), error, total


def add_twin(
    path: Path, precision: TwinPrecision, progress: Progress = ignore_progress
) -> Manifest:
    """Write the twin of the store at ``path``, in the place of one that it may have.

    Nothing else of the store is written but its manifest, last and at once.  Raises `UserError`
    P501-P508 if there is no sound store, P105 if its neurons can have no twin, P523 if it cannot be
    written to.
    """
    with NeuronStore.open(path) as store:
        _check_neurons(store, precision)
        layout = lay_out_twin(store.bundle, precision)
        neurons = sum(layer.neurons for layer in store.layers)
        plan = lay_out_rows_file("twin", neurons, layout.stride)
        temporary = path / f".{TWIN_FILE}.new"
        error = total = 0.0
        try:
            temporary.unlink(missing_ok=True)
            with HashedFile(temporary) as file:
                known = PieceFeed(file, plan.pieces)
                known.write_before(plan.offset)
                for number, layer in enumerate(store.layers):
                    for first in range(0, layer.neurons, _PIECE_NEURONS):
                        some = layer.read_inline(slice(first, first + _PIECE_NEURONS))
                        own = store.bundle
                        own = own if own.scales == "inline" else own.inline
                        twins, lost, had = make_twins(some, own, precision)
                        file.write(twins)
                        error, total = error + lost, total + had
                    layer.forget()
                    progress("writing the twin", (number + 1) / len(store.layers))
                known.write_rest(plan.size)
                entry = StoredFile(
                    path=TWIN_FILE,
                    bytes=file.position,
                    sha256=file.finish(),
                    rows=neurons,
                    checks=file.checks,
                )
            twin = StoredTwin(
                precision=precision,
                stride=layout.stride,
                offset=plan.offset,
                error=round(math.sqrt(error / total), 4) if total else 0.0,
            )
            return put_weights(store.manifest, path, temporary, entry, twin=twin)
        except OSError as problem:
            raise explain_os_error(problem, path) from None


def _check_neurons(store: NeuronStore, precision: TwinPrecision) -> None:
    """UserError P105 if neurons like those of ``store`` can have no twin of ``precision``."""
    width = store.manifest.describe_model().neuron_width
    problem = find_twin_obstacle(store.bundle, width, precision)
    if problem is not None:
        raise UserError.of(
            "P105",
            f"the neurons of {store.path} can have no twin: {problem}",
            help="leave the twin out",
        )


def read_twins(
    store: NeuronStore,
    firsts: list[int],
    allocate: Callable[[int], U8],
    progress: Callable[[float], None] = lambda share: None,
) -> list[U8]:
    """Read the twins of each layer's neurons from stored index ``firsts[layer]`` on, uint8 [n,
    stride] each, into regions of ``allocate(size)``; only for stores that have a twin.

    Raises as `pi2.store.dense_reader.read_tensors` does.
    """
    twin, path = store.manifest.twin, store.path / TWIN_FILE
    assert twin is not None
    try:
        fd = open_regular(path)
    except OSError as error:
        raise UserError.of("P508", f"cannot read {path}: {error.strerror}") from None
    result, done = [], 0
    try:
        for layer, first in zip(store.layers, firsts, strict=True):
            region = allocate((layer.neurons - first) * twin.stride)
            read_bytes(fd, path, region, twin.offset + (done + first) * twin.stride)
            result.append(region.reshape(-1, twin.stride))
            done += layer.neurons
            progress(len(result) / len(firsts))
    finally:
        os.close(fd)
    return result
