"""A neuron store, opened for a run: its parts come into the segments of the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.arrays import I32, U8, Scales
from pi2.backends.protocol import BuildRequest
from pi2.caches import read_regular
from pi2.diagnostics import UserError
from pi2.engine.model_texts import DryTexts, ModelTexts, StoreTexts
from pi2.fitting.misfits import locate_findings
from pi2.formats import find_packing
from pi2.memory.budget import Budget
from pi2.memory.bulk_load import Batch, Job, cut_rows
from pi2.memory.bundle_files import BundleFile
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, ReadSettings, count_reads
from pi2.model.tensor import EMBEDDING, LAYER_EMBEDDING
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_chunk_tokens, count_gate_read_bytes, reads_embedding
from pi2.plan.arithmetic.units import Verdict
from pi2.plan.weights.bundles import join_scales, slice_bias, slice_part
from pi2.plan.weights.layout import Tensor
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

    from pi2.backends.units import WholeModel


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


class StoreWeights:
    """The weights of a store, which ``cleanup`` closes."""

    def __init__(self, resolved: ResolvedPlan, cleanup: ExitStack) -> None:
        """UserError P5xx if the store is not the plan's, P605."""
        self.resolved, self._cleanup = resolved, cleanup
        self.texts = self._open()

    def _open(self) -> ModelTexts:
        resolved = self.resolved
        self.store = store = NeuronStore.open(resolved.store_path, model=resolved.model)
        self._cleanup.callback(store.close)
        if misfits := list(find_bundle_misfits(resolved, store.manifest.bundle)):
            raise UserError(locate_findings(misfits, resolved.path), exit_code=2)
        return StoreTexts(resolved, read_tokenizer(store.tokenizer_path), store)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Dense tensors, without their bytes."""
        return self.store.tensors

    @property
    def is_by_hotness(self) -> bool:
        """Whether stored order says which neurons are used often."""
        return self.store.manifest.order != "index"

    def begin_hashes(self, *, reads_all: bool) -> Callable[[], None]:
        """Begin to compare the store's files with their hashes, if the plan wants it, while the
        rest is loaded; ``reads_all``: the reader compares its own reads. Returns a call that
        ends it."""
        if self.resolved.plan.io.verify == "never":
            return lambda: None
        compares = reads_all and not keeps_mapped(self.resolved)
        hashes = HashCheck(self.store.path, self.store.manifest, reader_compares=compares)
        self._cleanup.callback(hashes.close)
        return hashes.finish

    def group_by_expert(self, budget: Budget) -> list[I32] | None:
        """Stored indices [neurons] of every layer, expert by expert; None without experts. Streamed
        models count them as part of the runtime."""
        model = self.resolved.model
        if model.moe is None:
            return None
        found = []
        for layer in self.store.layers:
            grouped = np.argsort(layer.original // model.shape.ffn, kind="stable")
            if self.resolved.plan.decode.names_all:
                found.append(grouped.astype(np.int32))
            else:
                room = budget.allocate("predictor", 4 * layer.neurons).view(np.int32)
                room[:] = grouped
                found.append(room)
        return found

    def open_embeddings(self, budget: Budget) -> tuple[EmbeddingRows | None, EmbeddingRows | None]:
        """Open the embedding where the plan has its rows read, and the layers' own embeddings,
        whose rows always are; None if there is none, or it is resident."""
        model, tokens = self.resolved.model, count_chunk_tokens(self.resolved.plan)
        allocate = partial(budget.allocate, "attention")

        def open_rows(name: str, is_read: bool) -> EmbeddingRows | None:
            if not is_read:
                return None
            rows = EmbeddingRows(self.store, allocate, rows=tokens, name=name)
            self._cleanup.callback(rows.close)
            return rows

        return (
            open_rows(EMBEDDING, reads_embedding(self.resolved.plan, model)),
            open_rows(LAYER_EMBEDDING, model.layer_embedding is not None),
        )

    def complete_request(
        self,
        request: BuildRequest,
        rows: list[EmbeddingRows],
        grouped: list[I32] | None,
        budget: Budget,
        batch: Batch,
        blocks: BlockTensors,
    ) -> BuildRequest:
        """Complete a request with dense weights and scales, which ``batch`` reads and ``blocks``
        arranges, and with room."""
        resolved = self.resolved
        tensors = self._begin_dense(rows, budget, batch, blocks)
        scales = self._begin_scales(budget, batch)
        gate_rows = gate_biases = None
        if resolved.plan.decode.predictor == "gate":
            gate_rows = {
                layer: allocate_gate_rows(resolved, budget) for layer in resolved.named_layers
            }
            if resolved.bundle.biases:
                size = 4 * resolved.model.layer_neurons
                gate_biases = [
                    budget.allocate("predictor", size).view(np.float32) for _ in resolved.layers
                ]
        return replace(
            request,
            allocate=budget.allocate,
            tensors=tensors,
            gate_rows=gate_rows,
            scales=scales,
            gate_biases=gate_biases,
            expert_neurons=None if resolved.plan.decode.names_all else grouped,
        )

    def _begin_dense(
        self, rows: Sequence[EmbeddingRows], budget: Budget, batch: Batch, blocks: BlockTensors
    ) -> Mapping[str, Tensor]:
        """Begin to read used tensors into their segments; others stay mapped, as do all if the plan
        lets the system read again. ``rows`` replace embeddings whose rows are read; ``blocks``
        arranges the read bytes."""
        resolved, store = self.resolved, self.store
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
        file = self._open_file(DENSE_FILE, batch)
        for segment, names in segments.items():
            loaded |= blocks.place(file, store, names, partial(_allocate, budget, segment))
        begin_file(file, batch)
        return loaded

    def _begin_scales(self, budget: Budget, batch: Batch) -> list[U8] | None:
        """Begin to read the scales of all neurons [neurons, bytes]; None if bundles have them."""
        if self.store.bundle.scales == "inline":
            return None
        found = []
        for layer in self.store.layers:
            assert layer.scales_entry is not None
            file = self._open_file(layer.scales_entry.path, batch)
            found.append(place_scales(file, layer, partial(_allocate, budget, "attention")))
            begin_file(file, batch)
        return found

    def _open_file(self, path: str, batch: Batch) -> FileRead:
        """Open a file that is read as a whole, to be closed when ``batch``'s load is."""
        entry, io = self.store.manifest.find_file(path), self.resolved.plan.io
        assert entry is not None, path  # the manifest was validated
        verify = io.verify == "first-read"
        file = FileRead(self.store.path, entry, direct=io.mode == "direct", verify=verify)
        batch.keep(file.close)
        return file

    def open_reader(self, cache: NeuronCache) -> FlashReader:
        resolved = self.resolved
        files = [
            BundleFile(
                path=layer.path,
                bundles_offset=layer.bundles_offset,
                stride=resolved.bundle.stride,
                count=resolved.model.layer_neurons,
                bytes=layer.bytes,
                read_checks=partial(getattr, layer, "checks"),
            )
            for layer in self.store.layers
        ]
        self.store.check_unchanged()
        reader = FlashReader(files, cache.arena, _choose_settings(resolved), cache.loops)
        self._cleanup.callback(reader.close)
        return reader

    def begin_neurons(self, reader: FlashReader, cache: NeuronCache, batch: Batch) -> None:
        """Begin to fill the hot region in stored order, and the cold one as the plan states."""
        fill, read_run = list_filled_layers(self.resolved), reader.read_run
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
                    read = partial(read_run, layer, first + rows.start, piece)
                    jobs.append(Job(read, piece.nbytes, piece))
        batch.add(jobs)

    def copy_dense(self, model: WholeModel, buffer: U8, progress: Progress) -> None:
        """Give dense tensors to a unit; main memory has a piece of one in ``buffer``."""
        names = [tensor.name for tensor in self.store.manifest.tensors]
        for tensor, first, share in read_pieces(self.store, names, buffer):
            model.put(tensor, first)
            progress("loading dense tensors", share)


class AbsentWeights(StoreWeights):
    """A store that stays closed, because nothing is computed; reads are counted."""

    tensors: Mapping[str, Tensor] = MappingProxyType({})
    is_by_hotness = False

    def _open(self) -> ModelTexts:
        return DryTexts()

    def begin_hashes(self, *, reads_all: bool) -> Callable[[], None]:
        return lambda: None

    def group_by_expert(self, budget: Budget) -> list[I32] | None:
        model = self.resolved.model
        if model.moe is None:
            return None
        return [np.arange(model.layer_neurons, dtype=np.int32)] * len(self.resolved.layers)

    def open_embeddings(self, budget: Budget) -> tuple[None, None]:
        return None, None

    def complete_request(self, request: BuildRequest, *given: Any) -> BuildRequest:
        return replace(request, gate_rows=None, allocate=given[2].allocate)

    def open_reader(self, cache: NeuronCache) -> FlashReader:
        settings = replace(_choose_settings(self.resolved), verify=False)
        return count_reads(cache.arena, len(cache.hot_slots), cache.loops, settings)

    def begin_neurons(self, reader: FlashReader, cache: NeuronCache, batch: Batch) -> None:
        fill = list_filled_layers(self.resolved)
        slots = sum(len(hot) for hot in cache.hot_slots)
        slots += sum(len(filling.slots) for filling in cache.fill(fill)) if fill else 0
        reader.reads.read_bytes += slots * cache.arena.shape[1]

    def copy_dense(self, model: WholeModel, buffer: U8, progress: Progress) -> None:
        """There is nothing to give."""


WEIGHTS: Mapping[Verdict, type[StoreWeights]] = {"runs": StoreWeights, "dry run": AbsentWeights}


def keeps_mapped(resolved: ResolvedPlan) -> bool:
    """Whether dense tensors stay in their file, which the system reads again as it likes."""
    return resolved.plan.memory.lock == "re-read"


def _allocate(budget: Budget, segment: str, size: int, spare: int) -> U8:
    return budget.allocate_spanning({segment: size}, reserved_bytes=spare)


def begin_file(file: FileRead, batch: Batch) -> None:
    batch.add([Job(piece.run, piece.bytes, piece.target) for piece in file.list_pieces()])


def count_tensor_bytes(tensor: Tensor) -> int:
    return tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)


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
        gate_bytes=count_gate_read_bytes(resolved),
    )


def list_filled_layers(resolved: ResolvedPlan) -> Sequence[int]:
    """Layers whose neurons fill the cold region at first; wholly streamed layers never use it."""
    return resolved.named_layers if resolved.plan.cache.fill else ()


def read_neurons(
    reader: FlashReader, layer: int, count: int, buffer: U8
) -> Iterator[tuple[int, U8]]:
    """The first neurons of a layer in pieces, each in ``buffer`` [n, stride] until the next one."""
    for first in range(0, count, len(buffer)):
        piece = buffer[: min(len(buffer), count - first)]
        reader.load_run(layer, first, piece)
        yield first, piece


def load_gates(
    reader: FlashReader, cache: NeuronCache, request: BuildRequest, staging: U8, progress: Progress
) -> None:
    """Read the gate rows, if decoding needs them."""
    for layer, (weights, scales) in (request.gate_rows or {}).items():
        places = np.arange(cache.neurons)
        if request.expert_neurons is not None:
            places[request.expert_neurons[layer]] = np.arange(cache.neurons)
        for first, piece in read_neurons(reader, layer, cache.neurons, staging[0]):
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
