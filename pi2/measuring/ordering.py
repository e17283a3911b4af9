"""Orders of neurons by activation statistics; stores that are written again, layer by
layer, with neurons in another order or distance."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from pi2.arrays import F32, I32, I64, U8
from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.importing.conversion_job import (
    ACTIVATIONS,
    COACTIVATIONS,
    MODEL_NOTE,
    WEIGHTS_NOTE,
    check_experts,
    count_bands,
    group_experts,
    order_neurons,
    read_counts,
    read_summary,
    read_table,
)
from pi2.measuring.activations import Statistics
from pi2.model.tensor import DenseTensor
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import join_scales
from pi2.plan.weights.layout import GROUP, ScalesPlace, round_up
from pi2.progress import Progress, ignore_progress
from pi2.store.files import recover_replaced
from pi2.store.identity import identify_weights
from pi2.store.manifest import DENSE_FILE, MANIFEST, Manifest, Order, name_layer_file
from pi2.store.reader import NeuronStore, StoredLayer
from pi2.store.verification import check_entries
from pi2.store.writer import StoreWriter, TensorPieces, keep_groups


def check_identity(file: Path, store: NeuronStore) -> None:
    """UserError P540 if ``file`` has counts of another model, by weights or else by name."""
    notes: Mapping[str, str] = {}
    with suppress(OSError, UserError):
        notes = read_table(file, {}, lambda problem: UserError.of("P540", problem))[1]
    own = store.manifest.model.id
    named = notes.get(MODEL_NOTE)
    if WEIGHTS_NOTE in notes:
        if notes[WEIGHTS_NOTE] == identify_weights(store.tensors):
            return
        of_whom = f"of model {named!r}" if named != own else f"of another {own!r}, by its weights"
    else:
        summary = read_summary(file.parent, Statistics) if named is None else None
        named = named if summary is None else summary.model
        if named in (None, own):
            return
        of_whom = f"of model {named!r}"
    raise UserError.of(
        "P540",
        f"{file} has counts {of_whom}, and {store.path} is a store of {own!r}",
        help="record them with this store: `pi2 activations PLAN --text FILE -o STATS`",
    )


Kind = Literal["hotness", "coactivation", "expert"]
BANDS = (0.0625, 0.125, 0.25, 0.5, 1.0)
"""Ends of the bands, as shares of a layer's neurons."""


def choose_orders(path: Path, kind: Kind, statistics: Path | None) -> I32:
    """The checkpoint's neuron at every stored place, int32 [layers, neurons]; ``statistics`` is a
    folder, or a Parquet file of counts. UserError P540 for another model, P524 without such an
    order."""
    if not path.exists():
        recover_replaced(Path(os.path.realpath(path)))
    with NeuronStore.open(path) as store:
        if statistics is not None:
            files = [_find_counts(statistics)]
            files += [statistics / COACTIVATIONS] if kind == "coactivation" else []
            for file in files:
                check_identity(file, store)
        if kind == "expert":
            return order_by_expert(store, statistics)
        model = store.manifest.describe_model()
    assert statistics is not None
    choose = order_by_hotness if kind == "hotness" else order_by_coactivation
    return choose(statistics, model.shape.layers, model.layer_neurons)


def order_by_hotness(statistics: Path, layers: int, neurons: int) -> I32:
    """Orders by hotness, int32 [layers, neurons]; UserError P540 without counts of such a model."""
    return order_neurons(read_counts(_find_counts(statistics), layers, neurons)[0])


def order_by_expert(store: NeuronStore, statistics: Path | None) -> I32:
    """Orders by hotness in bands, by expert in each; UserError P524 without hotness or experts."""
    manifest, model = store.manifest, store.manifest.describe_model()
    check_experts(model)
    if statistics is not None:
        by_hotness = order_by_hotness(statistics, model.shape.layers, model.layer_neurons)
    elif manifest.order == "hotness":
        by_hotness = np.stack([layer.original for layer in store.layers])
    else:
        raise UserError.of(
            "P524",
            f"which neurons of {store.path} are hot is not known: its order is by {manifest.order}",
            help="give the statistics of `pi2 activations PLAN --text FILE -o STATS` with "
            "--statistics STATS",
        )
    bands = count_bands(model)
    return np.stack([group_experts(order, model.shape.ffn, bands) for order in by_hotness])


def order_by_coactivation(statistics: Path, layers: int, neurons: int) -> I32:
    """Orders in bands of hotness, each by chains of neurons that fire together; UserError P540."""
    counts, _ = read_counts(_find_counts(statistics), layers, neurons)
    pairs = _read_pairs(statistics / COACTIVATIONS, layers, neurons)
    borders = [0, *(round(share * neurons) for share in BANDS)]
    return np.stack(
        [
            np.concatenate(
                [
                    _chain_band(order[first:last], counts[layer], *pairs[layer])
                    for first, last in pairwise(borders)
                ]
            )
            for layer, order in enumerate(order_neurons(counts))
        ]
    )


def chain_neurons(weights: F32) -> list[list[int]]:
    """Chains of 0 ... n - 1 by greedy links of the heaviest positive ``weights`` [n, n]."""
    count = len(weights)
    first, second = np.triu_indices(count, 1)
    values = weights[first, second]
    kept = np.flatnonzero(values > 0)
    kept = kept[np.argsort(-values[kept], kind="stable")]
    left, right = first[kept], second[kept]
    links: list[list[int]] = [[] for _ in range(count)]
    root = list(range(count))

    def find(item: int) -> int:
        while root[item] != item:
            root[item] = root[root[item]]
            item = root[item]
        return item

    full = np.zeros(count, bool)
    place = 0
    while place < len(left):
        # Most pairs that are left have an end that is taken already: drop them together.
        block = slice(place, place + 4096)
        open_pairs = ~(full[left[block]] | full[right[block]])
        chosen = zip(
            left[block][open_pairs].tolist(), right[block][open_pairs].tolist(), strict=True
        )
        for one, other in chosen:
            if len(links[one]) < 2 and len(links[other]) < 2 and find(one) != find(other):
                root[find(one)] = find(other)
                for end, partner in ((one, other), (other, one)):
                    links[end].append(partner)
                    full[end] = len(links[end]) == 2
        place += 4096
    chains, seen = [], [False] * count
    for start in range(count):
        if seen[start] or len(links[start]) == 2:
            continue
        chain, item = [], start
        while item >= 0:
            seen[item] = True
            chain.append(item)
            item = next((other for other in links[item] if not seen[other]), -1)
        chains.append(chain)
    return chains


def _chain_band(band: I32, counts: I64, sampled: I32, together: I64) -> I32:
    """The neurons of ``band`` (by hotness) in chains; ``together`` [s, s] is of ``sampled`` [s]."""
    place_of = np.full(len(counts), -1, np.int64)
    place_of[sampled] = np.arange(len(sampled))
    known = band[place_of[band] >= 0]
    if len(known) < 3:
        return band
    both = together[np.ix_(place_of[known], place_of[known])].astype(np.float32)
    alone = counts[known].astype(np.float32)
    # Of the tokens that need one of the two, the share that needs both.
    weights = both / np.maximum(alone[:, None] + alone - both, 1)
    # Chains come by their hottest neuron, since ``known`` is by hotness.
    chains = sorted(chain_neurons(weights), key=min)
    chained = known[np.concatenate([np.array(chain) for chain in chains])]
    return np.concatenate([chained, band[place_of[band] < 0]])


def _find_counts(statistics: Path) -> Path:
    return statistics / ACTIVATIONS if statistics.is_dir() else statistics


def _read_pairs(path: Path, layers: int, neurons: int) -> list[tuple[I32, I64]]:
    """Sampled neurons of each layer [s] and how often pairs fired [s, s]."""
    types = dict.fromkeys(("layer", "first", "second", "count"), "int64")
    try:
        columns, _ = read_table(path, types, lambda problem: _bad_pairs(path, problem))
    except FileNotFoundError as error:
        raise _bad_pairs(path, str(error)) from None
    layer, first, second, count = columns.values()
    inside = (layer >= 0) & (layer < layers) & (np.minimum(first, second) >= 0)
    if not (inside & (np.maximum(first, second) < neurons) & (count >= 0)).all():
        raise _bad_pairs(path, f"a pair outside of {layers} layers x {neurons} neurons")
    found = []
    for number in range(layers):
        mine = layer == number
        sampled = np.unique(np.concatenate([first[mine], second[mine]]))
        together = np.zeros((len(sampled), len(sampled)), np.int64)
        one, other = np.searchsorted(sampled, first[mine]), np.searchsorted(sampled, second[mine])
        together[one, other] = together[other, one] = count[mine]
        found.append((sampled.astype(np.int32), together))
    return found


def _bad_pairs(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P540",
        f"{path} does not have the counts of pairs of this model: {problem}",
        help="record them with `pi2 activations PLAN --text FILE -o STATS`, and give STATS",
    )


STEP_BYTES = 512
"""Bundles lie a multiple of it apart: the smallest block that drives have."""
_PIECE_BYTES = 16 << 20
"""Bundles that are gathered together."""


def reorder_store(
    path: Path,
    orders: I32 | None = None,
    kind: Order | None = None,
    *,
    output: Path | None = None,
    replace: bool = False,
    stride: int | None = None,
    scales: ScalesPlace | None = None,
    progress: Progress = ignore_progress,
) -> Manifest:
    """Write the store ``path`` in ``orders`` int32 [layers, neurons], or as it is, to ``output`` or
    in place, with a new ``stride`` or ``scales`` if given. Predictors follow, unchanged files are
    linked, others copied; a killed job resumes. `UserError` as opening, P105 for the stride, P507
    for damage, P521-P523 if it cannot be written."""
    target = path if output is None else output
    if not path.exists():
        recover_replaced(Path(os.path.realpath(path)))
    with NeuronStore.open(path) as old:
        manifest = old.manifest
        model = manifest.describe_model()
        stride, scales = _choose_layout(manifest, stride, scales)
        kind = kind or manifest.order
        if orders is None:
            orders = np.stack([layer.original for layer in old.layers])
        assert orders.shape == (model.shape.layers, model.layer_neurons)
        orders = keep_groups(model, orders)
        # The old place of the neuron at every new one.
        places = [
            np.argsort(layer.original)[order]
            for layer, order in zip(old.layers, orders, strict=True)
        ]
        with StoreWriter(
            target,
            model,
            ranks=None if manifest.predictor is None else manifest.predictor.rank,
            order=kind,
            synthetic=manifest.synthetic,
            stride=stride,
            scales=scales,
            replace=replace or output is None,
            job=_describe_job(manifest, orders, kind, stride, scales),
        ) as writer:
            for number, (layer, order) in enumerate(zip(old.layers, orders, strict=True)):
                if layer.scales_entry is not None and not writer.has_file(name_layer_file(number)):
                    check_entries(path, [layer.scales_entry])
                pieces = _gather(layer, places[number], writer.bundle.stride)
                writer.write_layer(number, order, pieces)
                progress("rewriting", (number + 1) / len(old.layers))
            # Predictors' rows stay where the neurons of an expert stay in order among themselves.
            if manifest.predictor is None or all(
                bool((np.diff(_find_rows(model, layer.original, found)) == 1).all())
                for layer, found in zip(old.layers, places, strict=True)
            ):
                entry = manifest.find_file(DENSE_FILE)
                assert entry is not None
                writer.adopt_file(path / DENSE_FILE, entry)
            else:
                writer.write_dense(lambda tensor: _read_tensor(old, model, places, tensor))
            for entry in manifest.files:
                if entry.rows is None:
                    writer.adopt_file(path / entry.path, entry)
            listed = {MANIFEST, *(entry.path for entry in manifest.files)}
            for file in sorted(path.iterdir()):
                own = file.is_file() and not file.is_symlink() and not file.name.startswith(".")
                if own and file.name not in listed:
                    writer.add_note(file.name, read_regular(file))
            written = writer.finish()
    return written


def _choose_layout(
    manifest: Manifest, stride: int | None, scales: ScalesPlace | None
) -> tuple[int, ScalesPlace]:
    """The layout asked for, with the least stride if scales move; UserError P105."""
    own = manifest.bundle
    place = scales or own.scales
    if stride is None and place == own.scales:
        return own.stride, place
    used = manifest.describe_model().lay_out_bundle(scales=place).used_bytes
    least = round_up(used, STEP_BYTES)
    stride = least if stride is None else stride
    if stride < used or stride % STEP_BYTES:
        raise UserError.of(
            "P105",
            f"neurons of {used} bytes cannot lie {stride} bytes apart: it takes a multiple of "
            f"{STEP_BYTES} that holds one",
            help=f"--stride '{least} B' is the least",
        )
    return stride, place


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


def _describe_job(
    manifest: Manifest, orders: I32, kind: Order, stride: int, scales: ScalesPlace
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
