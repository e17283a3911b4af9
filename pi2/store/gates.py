"""The gates of a mixture's experts apart from their neurons: a further file of the store.

A run whose plan has thresholds reads the gates of the experts that its router chose first, an
expert's in one stretch, and then those neurons alone whose gates are open.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from pi2.arrays import I64, U8
from pi2.diagnostics import UserError
from pi2.plan.weights.bundles import slice_bias, slice_part
from pi2.plan.weights.gates import GateRecord, lay_out_gates
from pi2.plan.weights.layout import BundleLayout
from pi2.progress import Progress, ignore_progress
from pi2.store.additions import put_weights
from pi2.store.arrow_file import PieceFeed, lay_out_layer_file
from pi2.store.files import HashedFile
from pi2.store.manifest import GATES_FILE, Manifest, StoredFile, StoredGates
from pi2.store.reader import NeuronStore, StoredLayer
from pi2.store.unfinished import explain_os_error


def pack_gates(bundles: U8, layout: BundleLayout, record: GateRecord) -> U8:
    """Return the record uint8 [record.stride] of an expert's ``bundles`` [neurons, .], which have
    their scales in them as ``layout`` says."""
    assert len(bundles) == record.neurons
    weights, scales = slice_part(bundles, layout, 0)
    packed = np.zeros(record.stride, np.uint8)
    packed[: record.neurons * record.row_bytes] = weights.reshape(-1)
    if scales is not None:
        own = scales.view(np.uint8).reshape(-1)
        packed[record.scales_offset : record.scales_offset + len(own)] = own
    if record.has_biases:
        biases = np.ascontiguousarray(slice_bias(bundles, layout, 0), "<f4").view(np.uint8)
        packed[record.biases_offset : record.biases_offset + len(biases)] = biases
    return packed


def add_gates(path: Path, progress: Progress = ignore_progress) -> Manifest:
    """Write the gates of the store at ``path``, in the place of those that it may have.

    Nothing else of the store is written but its manifest, last and at once.  Raises `UserError`
    P501-P508 if there is no sound store, P105 if its model has no experts with gates, P523 if it
    cannot be written to.
    """
    with NeuronStore.open(path) as store:
        model = store.manifest.describe_model()
        if model.moe is None or not store.bundle.is_gated:
            raise UserError.of(
                "P105",
                f"the neurons of {path} have no gates to keep apart: the model is no mixture of "
                "experts with gates",
                help='thresholds of other models have predictor = "gate", which needs no file',
            )
        if store.bundle.precision == "mxfp4":
            raise UserError.of(
                "P105",
                f"the gates of {path} cannot be kept apart: its neurons are mxfp4",
                help="convert the checkpoint with `--quantization int4`, or int8",
            )
        record = lay_out_gates(store.bundle, model.shape.ffn)
        rows = model.shape.layers * model.expert_count
        plan = lay_out_layer_file(rows, record.stride)
        checks = np.empty(rows, "<u4")
        temporary = path / f".{GATES_FILE}.new"
        try:
            temporary.unlink(missing_ok=True)
            with HashedFile(temporary) as file:
                known = PieceFeed(file, plan.pieces)
                known.write_before(plan.bundles_offset)
                row = 0
                for number, layer in enumerate(store.layers):
                    for own in _list_experts(layer, model.shape.ffn):
                        packed = pack_gates(layer.read_inline(own), _find_inline(store), record)
                        file.write(packed)
                        checks[row] = zlib.crc32(packed.data)
                        row += 1
                    layer.forget()
                    progress("writing gates", (number + 1) / len(store.layers))
                known.write_before(plan.neurons_offset)
                file.write(np.arange(rows, dtype="<i4"))
                known.write_before(plan.checks_offset)
                file.write(checks)
                known.write_rest(plan.size)
                entry = StoredFile(
                    path=GATES_FILE,
                    bytes=file.position,
                    sha256=file.finish(),
                    rows=rows,
                    bundles_offset=plan.bundles_offset,
                    neurons_offset=plan.neurons_offset,
                    checks_offset=plan.checks_offset,
                )
            gates = StoredGates(stride=record.stride)
            return put_weights(store.manifest, path, temporary, entry, gates=gates)
        except OSError as problem:
            raise explain_os_error(problem, path) from None


def _find_inline(store: NeuronStore) -> BundleLayout:
    return store.bundle if store.bundle.scales == "inline" else store.bundle.inline


def _list_experts(layer: StoredLayer, size: int) -> I64:
    """Stored indices [experts, size] of each expert's neurons, ascending within each."""
    grouped: I64 = np.argsort(layer.copy_original() // size, kind="stable")
    return grouped.reshape(-1, size)
