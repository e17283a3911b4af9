"""Loading the parts of a model from its neuron store into the segments of the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import I32, U8, Scales
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.units import WholeModel, WholeRequest
from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.engine.model_texts import DryTexts, ModelTexts, StoreTexts
from pi2.fitting import find_backend, find_whole_backend
from pi2.fitting.misfits import check_fit, locate_findings
from pi2.formats import find_packing
from pi2.machine import Machine
from pi2.memory.arena import allocate_cache, allocate_staging
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch, Job, cut_rows
from pi2.memory.bundle_files import BundleFile
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, NullReader, ReadSettings
from pi2.model.tensor import EMBEDDING, LAYER_EMBEDDING
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import (
    count_chunk_tokens,
    count_gate_read_bytes,
    count_piece_bytes,
    reads_embedding,
)
from pi2.plan.weights.bundles import join_scales, slice_bias, slice_part
from pi2.progress import Progress
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer
from pi2.store.file_read import (
    BlockTensors,
    EmbeddingRows,
    FileRead,
    map_blocks,
    place_scales,
    read_pieces,
)
from pi2.store.identity import find_bundle_misfits
from pi2.store.manifest import DENSE_FILE
from pi2.store.reader import NeuronStore
from pi2.store.verification import HashCheck

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer file; UserError P605 if it is missing or broken."""
    try:
        return open_tokenizer(read_regular(path))
    except (OSError, TokenizerRefused) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError.of(
            "P605",
            f"cannot read the tokenizer {path}: {reason}",
            help="convert the model again, or copy its tokenizer.json into the store",
        ) from None


def group_by_expert(
    resolved: ResolvedPlan, store: NeuronStore | None, budget: Budget
) -> list[I32] | None:
    """Stored indices [neurons] of every layer, expert by expert; None without experts. Streamed
    models count them as part of the runtime."""
    model = resolved.model
    if model.moe is None:
        return None
    if store is None:
        return [np.arange(model.layer_neurons, dtype=np.int32)] * len(resolved.layers)
    found = []
    for layer in store.layers:
        grouped = np.argsort(layer.original // model.shape.ffn, kind="stable")
        if resolved.plan.decode.names_all:
            found.append(grouped.astype(np.int32))
        else:
            room = budget.allocate("predictor", 4 * layer.neurons).view(np.int32)
            room[:] = grouped
            found.append(room)
    return found


def open_embeddings(
    resolved: ResolvedPlan, store: NeuronStore | None, budget: Budget, cleanup: ExitStack
) -> tuple[EmbeddingRows | None, EmbeddingRows | None]:
    """Open the embedding where the plan has its rows read, and the layers' own embeddings, whose
    rows always are; None if there is none, or it is resident."""
    model, tokens = resolved.model, count_chunk_tokens(resolved.plan)
    allocate = partial(budget.allocate, "attention")

    def open_rows(name: str, is_read: bool) -> EmbeddingRows | None:
        if store is None or not is_read:
            return None
        rows = EmbeddingRows(store, allocate, rows=tokens, name=name)
        cleanup.callback(rows.close)
        return rows

    return (
        open_rows(EMBEDDING, reads_embedding(resolved.plan, model)),
        open_rows(LAYER_EMBEDDING, model.layer_embedding is not None),
    )


def begin_dense(
    resolved: ResolvedPlan,
    store: NeuronStore,
    rows: Sequence[EmbeddingRows],
    budget: Budget,
    batch: Batch,
    blocks: BlockTensors,
) -> Mapping[str, Tensor]:
    """Begin to read used tensors into their segments; others stay mapped, as do all if the plan
    lets the system read again. ``rows`` replace embeddings whose rows are read; ``blocks`` arranges
    what was read."""
    is_mapped = keeps_mapped(resolved)
    loaded = dict(map_blocks(store) if is_mapped else store.tensors)
    read = {own.tensor.name: own.tensor for own in rows}
    loaded |= read
    wanted = [name for name in loaded if name not in read]
    segments = {"attention": [name for name in wanted if ".predictor" not in name]}
    if resolved.plan.decode.predictor == "low-rank":
        segments["predictor"] = [name for name in wanted if ".predictor" in name]
    if is_mapped:
        for segment, names in segments.items():
            budget.charge(segment, sum(count_tensor_bytes(loaded[name]) for name in names))
        return loaded
    file = open_file(resolved, store, DENSE_FILE, batch)
    for segment, names in segments.items():
        loaded |= blocks.place(file, store, names, partial(_allocate, budget, segment))
    begin_file(file, batch)
    return loaded


def keeps_mapped(resolved: ResolvedPlan) -> bool:
    """Whether dense tensors stay in their file, which the system reads again as it likes."""
    return resolved.plan.memory.lock == "re-read"


def _allocate(budget: Budget, segment: str, size: int, spare: int) -> U8:
    return budget.allocate_spanning({segment: size}, reserved_bytes=spare)


def open_file(resolved: ResolvedPlan, store: NeuronStore, path: str, batch: Batch) -> FileRead:
    """Open a file of the store that is read as a whole, to be closed when ``batch``'s load is."""
    entry, io = store.manifest.find_file(path), resolved.plan.io
    assert entry is not None, path  # the manifest was validated
    file = FileRead(store.path, entry, direct=io.mode == "direct", verify=io.verify == "first-read")
    batch.keep(file.close)
    return file


def begin_file(file: FileRead, batch: Batch) -> None:
    batch.add([Job(piece.run, piece.bytes, piece.target) for piece in file.list_pieces()])


def count_tensor_bytes(tensor: Tensor) -> int:
    return tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)


def begin_scales(
    resolved: ResolvedPlan, store: NeuronStore, budget: Budget, batch: Batch
) -> list[U8] | None:
    """Begin to read the scales of all neurons [neurons, bytes]; None if bundles have them."""
    if store.bundle.scales == "inline":
        return None
    found = []
    for layer in store.layers:
        assert layer.scales_entry is not None
        file = open_file(resolved, store, layer.scales_entry.path, batch)
        found.append(place_scales(file, layer, partial(_allocate, budget, "attention")))
        begin_file(file, batch)
    return found


def allocate_gate_rows(resolved: ResolvedPlan, budget: Budget) -> tuple[U8, Scales | None]:
    """Room for the gate weights and scales of one layer, in the predictor segment."""
    bundle, neurons = resolved.bundle, resolved.model.layer_neurons
    packing = find_packing(bundle.gate_up)
    weights = budget.allocate("predictor", neurons * packing.count_weight_bytes(bundle.hidden))
    size = packing.count_scale_bytes(bundle.hidden)
    if size == 0:
        return weights.reshape(neurons, -1), None
    scales = budget.allocate("predictor", neurons * size)
    return weights.reshape(neurons, -1), packing.view_scales(scales, neurons)


def open_reader(
    resolved: ResolvedPlan, store: NeuronStore | None, cache: NeuronCache
) -> FlashReader | NullReader:
    stride = resolved.bundle.stride
    if store is None:
        return NullReader(stride, count_gate_read_bytes(resolved))
    files = [
        BundleFile(
            path=layer.path,
            bundles_offset=layer.bundles_offset,
            stride=stride,
            count=resolved.model.layer_neurons,
            bytes=layer.bytes,
            read_checks=partial(getattr, layer, "checks"),
        )
        for layer in store.layers
    ]
    settings = replace(_choose_settings(resolved), gate_bytes=count_gate_read_bytes(resolved))
    return FlashReader(files, cache.arena, settings, cache.loops)


def _choose_settings(resolved: ResolvedPlan) -> ReadSettings:
    io = resolved.plan.io
    return ReadSettings(
        engine=io.engine,
        direct=io.mode == "direct",
        threads=io.threads,
        depth=io.depth,
        merge_gap=io.merge_gap,
        cluster=resolved.plan.pipeline.cluster,
        ahead=resolved.plan.decode.look_ahead == "layer",
        verify=io.verify == "first-read",
    )


def list_filled_layers(resolved: ResolvedPlan) -> Sequence[int]:
    """Layers whose neurons fill the cold region at first; wholly streamed layers never use it."""
    return resolved.named_layers if resolved.plan.cache.fill else ()


def begin_neurons(
    reader: FlashReader | NullReader, cache: NeuronCache, batch: Batch, *, fill: Sequence[int]
) -> None:
    """Begin to fill the hot region in stored order, and the cold one with the layers ``fill``."""
    if isinstance(reader, NullReader):
        slots = sum(len(hot) for hot in cache.hot_slots)
        slots += sum(len(filling.slots) for filling in cache.fill(fill)) if fill else 0
        reader.read_bytes += slots * cache.arena.shape[1]
        return
    runs: list[list[tuple[int, U8]]] = [[] for _ in cache.hot_slots]
    for layer, hot in enumerate(cache.hot_slots):
        runs[layer].append((cache.hot_range(layer).start, cache.arena[hot.start : hot.stop]))
    for filling in cache.fill(fill) if fill else ():
        arena = cache.arena[filling.slots.start : filling.slots.stop]
        runs[filling.layer].append((filling.first, arena))
    jobs = []
    for layer, own in enumerate(runs):
        for first, arena in own:
            for rows in cut_rows(*arena.shape):
                piece = arena[rows]
                read = partial(reader.read_run, layer, first + rows.start, piece)
                jobs.append(Job(read, piece.nbytes, piece))
    batch.add(jobs)


def load_gates(
    reader: FlashReader | NullReader,
    cache: NeuronCache,
    request: BuildRequest,
    staging: U8,
    progress: Progress,
) -> None:
    """Read the gate rows, if decoding needs them."""
    for layer, (weights, scales) in (request.gate_rows or {}).items():
        step = staging.shape[1]
        places = np.arange(cache.neurons)
        if request.expert_neurons is not None:
            places[request.expert_neurons[layer]] = np.arange(cache.neurons)
        for first in range(0, cache.neurons, step):
            piece = staging[0, : min(step, cache.neurons - first)]
            reader.start_run(layer, first, piece).result()
            rows = places[first : first + len(piece)]
            if request.scales is not None:
                own = slice(first, first + len(piece))
                piece = join_scales(piece, request.scales[layer], request.bundle, own)
            layout = request.whole_bundle
            weights[rows], piece_scales = slice_part(piece, layout, 0)
            if scales is not None:
                assert piece_scales is not None
                scales[rows] = piece_scales
            if request.gate_biases is not None:
                request.gate_biases[layer][rows] = slice_bias(piece, layout, 0)
        progress("loading gates", (layer + 1) / len(cache.hot_slots))


def open_store(
    resolved: ResolvedPlan, machine: Machine, cleanup: ExitStack
) -> tuple[NeuronStore | None, ModelTexts]:
    """Open the plan's neuron store, to be closed by ``cleanup``, and its texts; no store if nothing
    is computed."""
    if not find_backend(resolved.name_backend(resolved.sparse_unit)).COMPUTES:
        return None, DryTexts()
    check_fit(resolved, machine)
    store = NeuronStore.open(resolved.store_path, model=resolved.model)
    cleanup.callback(store.close)
    check_bundles(resolved, store)
    return store, StoreTexts(resolved, read_tokenizer(store.tokenizer_path), store)


def begin_hashes(
    resolved: ResolvedPlan, store: NeuronStore | None, cleanup: ExitStack
) -> HashCheck | None:
    """Begin to compare the store's other files with their hashes, if the plan wants it, while the
    rest is loaded; to be closed by ``cleanup``."""
    if store is None or resolved.plan.io.verify == "never":
        return None
    hashes = HashCheck(
        store.path,
        store.manifest,
        reader_compares=not (resolved.has_whole_unit or keeps_mapped(resolved)),
    )
    cleanup.callback(hashes.close)
    return hashes


def is_by_hotness(store: NeuronStore | None) -> bool:
    """Whether stored order says which neurons are used often."""
    return store is not None and store.manifest.order != "index"


def check_bundles(resolved: ResolvedPlan, store: NeuronStore) -> None:
    """UserError P520 if the store's bundles do not lie as the plan says."""
    found = list(find_bundle_misfits(resolved, store.manifest.bundle))
    if found:
        raise UserError(locate_findings(found, resolved.path), exit_code=2)


def load_whole(
    resolved: ResolvedPlan,
    store: NeuronStore | None,
    budget: Budget,
    cleanup: ExitStack,
    progress: Progress,
) -> tuple[WholeModel, FlashReader | NullReader]:
    """Make room for the model on the unit that has it, and bring it there; ``cleanup`` closes it
    and the reader of its neurons."""
    plan, name = resolved.plan, resolved.sparse_unit
    grouped = group_by_expert(resolved, store, budget)
    backend = find_whole_backend(resolved.name_backend(name))
    assert backend is not None, name
    model = backend.build_whole(
        WholeRequest(
            name=name,
            unit=resolved.device.units[name],
            model=resolved.model,
            bundle=resolved.bundle,
            chunk=plan.prefill.chunk,
            sequences=plan.decode.batch,
            context=plan.kv.context,
            kv_type=plan.kv.type,
            predictor=plan.decode.predictor,
            threshold=plan.decode.threshold,
            expert_neurons=None if plan.decode.predictor == "none" else grouped,
            count=partial(budget.charge, resolved.name_segment(name)),
            progress=progress,
        )
    )
    cleanup.callback(model.close)
    reader = open_reader(resolved, store, allocate_cache(resolved, budget))
    cleanup.callback(reader.close)
    if store is not None:
        store.check_unchanged()
        _copy_weights(model, resolved, store, reader, budget, progress)
    return model, reader


def _copy_weights(
    model: WholeModel,
    resolved: ResolvedPlan,
    store: NeuronStore,
    reader: FlashReader | NullReader,
    budget: Budget,
    progress: Progress,
) -> None:
    """Read dense tensors and neurons from flash, and give them to the unit; meanwhile main memory
    has a piece of a tensor and staging buffers of neurons."""
    staging = allocate_staging(resolved, budget)
    buffer = budget.allocate("workspace", count_piece_bytes(resolved))
    names = [tensor.name for tensor in store.manifest.tensors]
    for tensor, first, share in read_pieces(store, names, buffer):
        model.put(tensor, first)
        progress("loading dense tensors", share)
    layers, neurons, size = len(resolved.layers), resolved.model.layer_neurons, staging.shape[1]
    for layer in range(layers):
        for first in range(0, neurons, size):
            piece = staging[0, : min(size, neurons - first)]
            reader.start_run(layer, first, piece).result()
            model.keep(layer, first, piece)
        progress(f"loading neurons of {resolved.sparse_unit}", (layer + 1) / layers)
