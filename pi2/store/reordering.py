"""Writes a store again, layer by layer, with neurons in another order or distance."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from pi2.arrays import I32, I64, U8
from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.model.tensor import DenseTensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import join_scales
from pi2.plan.weights.layout import GROUP, ScalesPlace, round_up
from pi2.progress import Progress, ignore_progress
from pi2.store.manifest import DENSE_FILE, MANIFEST, Manifest, Order, name_layer_file
from pi2.store.reader import NeuronStore, StoredLayer
from pi2.store.verification import check_file, recover_replaced
from pi2.store.writer import StoreWriter, TensorPieces, keep_groups

STEP_BYTES = 512
"""Bundles lie a multiple of it apart: the smallest block that drives have."""
_PIECE_BYTES = 16 << 20
"""Bundles that are gathered together."""


def reorder_store(
    path: Path,
    orders: I32,
    kind: Order,
    *,
    output: Path | None = None,
    replace: bool = False,
    stride: int | None = None,
    scales: ScalesPlace | None = None,
    progress: Progress = ignore_progress,
) -> Manifest:
    """Write the store ``path`` in ``orders`` int32 [layers, neurons], to ``output`` or in place,
    with a new ``stride`` or ``scales`` if given. Predictors follow, unchanged files are linked,
    others copied; a killed job resumes. `UserError` as opening, P507 for damage, P521-P523 if it
    cannot be written."""
    target = path if output is None else output
    if not path.exists():
        recover_replaced(Path(os.path.realpath(path)))
    with NeuronStore.open(path) as old:
        manifest = old.manifest
        model = manifest.describe_model()
        assert orders.shape == (model.shape.layers, model.layer_neurons)
        orders = keep_groups(model, orders)
        places = [
            _find_places(layer.original, order)
            for layer, order in zip(old.layers, orders, strict=True)
        ]
        with StoreWriter(
            target,
            model,
            ranks=None if manifest.predictor is None else manifest.predictor.rank,
            order=kind,
            synthetic=manifest.synthetic,
            stride=stride or manifest.bundle.stride,
            scales=scales or manifest.bundle.scales,
            replace=replace or output is None,
            job=_describe_job(manifest, orders, kind, stride, scales),
        ) as writer:
            for number, (layer, order) in enumerate(zip(old.layers, orders, strict=True)):
                if layer.scales_entry is not None and not writer.has_file(name_layer_file(number)):
                    check_file(path, layer.scales_entry)
                pieces = _gather(layer, places[number], writer.bundle.stride)
                writer.write_layer(number, order, pieces)
                progress("rewriting", (number + 1) / len(old.layers))
            if manifest.predictor is None or _keeps_rows(old, places):
                entry = manifest.find_file(DENSE_FILE)
                assert entry is not None
                writer.adopt_file(path / DENSE_FILE, entry)
            else:
                writer.write_dense(lambda tensor: _read_tensor(old, model, places, tensor))
            for entry in manifest.files:
                if entry.rows is None:
                    writer.adopt_file(path / entry.path, entry)
            for name, content in _read_notes(path, manifest).items():
                writer.add_note(name, content)
            written = writer.finish()
    return written


def _find_places(original: I32, order: I32) -> I64:
    """Old place of the neuron at every new one."""
    place_of = np.empty(len(original), np.int64)
    place_of[original] = np.arange(len(original))
    return place_of[order]


def repack_store(
    path: Path,
    stride: int | None = None,
    scales: ScalesPlace | None = None,
    *,
    output: Path | None = None,
    replace: bool = False,
    progress: Progress = ignore_progress,
) -> Manifest:
    """Write the store with another ``stride`` or ``scales`` in the same order; the least stride if
    scales move.  `UserError` P105, and as `reorder_store`."""
    if not path.exists():
        recover_replaced(Path(os.path.realpath(path)))
    with NeuronStore.open(path) as store:
        manifest = store.manifest
        orders = np.stack([layer.original for layer in store.layers])
    place = scales or manifest.bundle.scales
    used = manifest.describe_model().lay_out_bundle(scales=place).used_bytes
    if stride is None:
        moves = place != manifest.bundle.scales
        stride = round_up(used, STEP_BYTES) if moves else manifest.bundle.stride
    if stride < used or stride % STEP_BYTES:
        fitting = round_up(used, STEP_BYTES)
        raise UserError.of(
            "P105",
            f"neurons of {used} bytes cannot lie {stride} bytes apart: it takes a multiple of "
            f"{STEP_BYTES} that holds one",
            help=f"--stride '{fitting} B' is the least",
        )
    return reorder_store(
        path,
        orders,
        manifest.order,
        output=output,
        replace=replace,
        stride=stride,
        scales=place,
        progress=progress,
    )


def _gather(layer: StoredLayer, places: I64, stride: int) -> Iterator[U8]:
    """Bundles with their scales in them, ``stride`` bytes apart, in their new order; UserError P507
    if one is not as it was written."""
    checks, layout = layer.checks, layer.layout
    step = round_up(max(1, _PIECE_BYTES // layer.stride), GROUP)
    for start in range(0, len(places), step):
        wanted = places[start : start + step]
        piece = layer.bundles[wanted]
        scales = layer.scales
        joined = piece if scales is None else join_scales(piece, scales, layout, wanted)
        # What stays mapped counts as memory.
        layer.forget()
        for place, bundle in zip(wanted.tolist(), piece, strict=True):
            if zlib.crc32(bundle) != checks[place]:
                raise UserError.of(
                    "P507",
                    f"neuron {place} in {layer.path} is damaged: its checksum differs",
                    help="make the store again, or copy it again as a whole",
                )
        if stride != joined.shape[1]:
            # What a bundle does not use is zero.
            spread = np.zeros((len(joined), stride), np.uint8)
            common = min(stride, joined.shape[1])
            spread[:, :common] = joined[:, :common]
            joined = spread
        yield joined


def _read_tensor(
    old: NeuronStore, model: Model, places: list[I64], tensor: DenseTensor
) -> TensorPieces:
    """A dense tensor; what predictors say of neurons is in their new order."""
    known = old.tensors[tensor.name]
    kind = tensor.name.rpartition(".")[2]
    if kind not in ("predictor_out", "predictor_bias"):
        return [(known.weights, known.scales)]
    layer = int(tensor.name.split(".")[1])
    rows = _find_rows(model, old.layers[layer].original, places[layer])
    if kind == "predictor_bias":
        return [(np.ascontiguousarray(known.weights[:, rows]), None)]
    scales = None if known.scales is None else np.ascontiguousarray(known.scales[rows])
    return [(np.ascontiguousarray(known.weights[rows]), scales)]


def _find_rows(model: Model, original: I32, places: I64) -> I64:
    """Old predictor row for every new one: expert by expert, in stored order within each."""
    owners = original // model.shape.ffn
    old_rows = np.empty(len(places), np.int64)
    old_rows[np.argsort(owners, kind="stable")] = np.arange(len(places))
    return old_rows[places[np.argsort(owners[places], kind="stable")]]


def _keeps_rows(old: NeuronStore, places: list[I64]) -> bool:
    """Whether every predictor's rows are in the new order as they are in the old one: so where
    neurons of an expert stay in order among themselves."""
    model = old.manifest.describe_model()
    return all(
        bool((np.diff(_find_rows(model, layer.original, found)) == 1).all())
        for layer, found in zip(old.layers, places, strict=True)
    )


def _read_notes(path: Path, manifest: Manifest) -> dict[str, bytes]:
    listed = {MANIFEST, *(entry.path for entry in manifest.files)}
    return {
        file.name: read_regular(file)
        for file in sorted(path.iterdir())
        if file.is_file()
        and not file.is_symlink()
        and file.name not in listed
        and not file.name.startswith(".")
    }


def _describe_job(
    manifest: Manifest, orders: I32, kind: Order, stride: int | None, scales: ScalesPlace | None
) -> str:
    fields = {
        "version": version("pi2"),
        "files": [[entry.path, entry.sha256] for entry in manifest.files],
        "order": hashlib.sha256(orders.astype("<i4").tobytes()).hexdigest(),
        "kind": kind,
        "stride": stride,
        "scales": scales,
    }
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
