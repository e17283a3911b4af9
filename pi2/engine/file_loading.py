"""Making a model of a GGUF file that is run as it is, and noticing that the file is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pi2.arrays import U8
from pi2.backends.blocks.instructions import FindWeight
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.operands import Extent
from pi2.backends.faults.guard import find_guard
from pi2.backends.protocol import ProgramRequest
from pi2.caches import open_regular
from pi2.diagnostics import UserError
from pi2.engine.accounts import FileAccount
from pi2.engine.file_model import Division, FileModel, divide_matrices
from pi2.engine.model_texts import ModelTexts
from pi2.engine.opening import Opening, Parts
from pi2.fitting import find_program_backend
from pi2.memory.budget import Budget
from pi2.memory.direct_files import BLOCK, BatchReads, DirectFiles, FileReads, Piece, load_ranges
from pi2.memory.matrix_pool import MatrixPlace
from pi2.memory.ring import WeightStream
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sources import FileFacts
from pi2.plan.documents.plan_units import list_cores
from pi2.reads import refuse_cut, refuse_weights
from pi2.weights.file_tensor import PIECE_BYTES, FileTensor, describe_experts
from pi2.weights.gguf_weights import FileTexts, GgufWeights

if TYPE_CHECKING:
    from pi2.engine.experts import RoutingDials
    from pi2.memory.expert_slots import ExpertSlots
    from pi2.memory.host_loops import HostLoops


class FileOpening(Opening):
    """A GGUF file whose weights stay in it."""

    def __init__(self, facts: FileFacts, *given: Any) -> None:
        self.facts, self.weights = facts, facts.weights
        super().__init__(*given)

    def open(self) -> None:
        weights, cleanup = self.weights, self.cleanup
        cleanup.callback(weights.close)
        # Of a file beyond memory every byte would come from the disk; `pi2 validate` checks it.
        if not self.facts.missing_bytes:
            weights.check_once(self.wish.progress)
        folder = FileTexts(weights, cleanup)
        self.texts = ModelTexts(self.resolved, folder.open_tokenizer(), folder, self.facts.path)
        self.files = files = DirectFiles(weights.files)
        cleanup.callback(files.close)
        self._tensors = list({t.name: t for _, _, t in weights.list_matrices()}.values())
        self._is_mapped = self.resolved.plan.memory.weights == "mapped"
        self._backend = find_program_backend(self.resolved.name_backend(self.resolved.sparse_unit))

    def place(self, shared: Mapping[str, U8]) -> Mapping[str, U8]:
        weights, is_mapped = self.weights, self._is_mapped
        self._shared = shared
        self._division = divide(self.resolved, self.facts, self._tensors)
        self._sharing = self.cleanup.enter_context(ExitStack())
        states = [os.fstat(own) for own in self.files.descriptors]
        names = set(self._division.resident)
        chosen = [tensor for tensor in self._tensors if tensor.name in names]
        self._places = {t.name: find_place(states, t, is_mapped=is_mapped) for t in chosen}
        self._lent = lent = self.wish.pool.share(self._places.values(), self._sharing)
        known = {name: lent[place] for name, place in self._places.items() if place in lent}
        self._placed, self._ranges = place_resident(chosen, known, weights, self.budget, is_mapped)
        self._watched = WatchedFiles(weights.files, weights.maps)
        self.cleanup.callback(self._watched.close)
        return self._placed if self.draft is not None and self.draft.resolved.model.is_mtp else {}

    def build(self) -> Parts:
        resolved, plan, facts = self.resolved, self.resolved.plan, self.facts
        weights, files, budget, progress = self.weights, self.files, self.budget, self.wish.progress
        placed, division, pool = self._placed, self._division, self.wish.pool
        loaded = sum(piece.size for piece, _ in self._ranges)
        looked_up = weights.list_looked_up()
        whole = [own for name, own in placed.items() if name not in looked_up]
        routers = [own.name for key, _, own in weights.list_matrices() if key == "router"]
        predicts = bool(facts.expert_bytes) and set(routers) <= placed.keys()
        slots, ring_bytes = None, plan.memory.segments.cold - facts.slot_bytes
        if facts.expert_bytes:
            # Also what is left where the next matrix is too large to be resident.
            sizes = {"cold": facts.slot_bytes, "hot": max(0, plan.memory.segments.hot - loaded)}
            region = budget.allocate_spanning(sizes)
            slots = open_slots(resolved, weights, files, region, self._load_loops())
        ring = np.zeros(0, np.uint8)
        if ring_bytes:
            ring = budget.allocate("cold", ring_bytes // BLOCK * BLOCK, is_filled=True)

        def make_stream(pieces: Sequence[Piece], region: U8) -> WeightStream:
            engine = files.open_engine(plan.io, self._load_loops(), has_one_caller=False)
            return WeightStream(BatchReads(files, engine), pieces, region)

        model = FileModel(
            weights,
            division,
            {name: rows.ctypes.data for name, rows in {**self._shared, **placed}.items()},
            ring,
            make_stream,
            partial(self._make_program, predicts),
            slots,
            self._watched.check,
            _make_dials(resolved, weights),
        )
        self.cleanup.callback(model.close)
        # Kernels that had to be compiled had the memory until now.
        load_ranges(files, self._ranges, progress)
        if not self._is_mapped:
            new = {p: placed[name] for name, p in self._places.items() if p not in self._lent}
            pool.add(new, self._sharing)
        rates = model.measure() if slots is None else None
        expected = None
        if rates is not None:
            expected = rates.expect(facts.streamed_bytes, facts.token_bytes)
        report = {
            "weights": plan.memory.weights,
            "resident_bytes": sum(t.size_bytes for t in self._tensors if t.name in placed),
            "streamed_bytes": sum(piece.size for piece in division.pieces),
            "expert_bytes": facts.expert_bytes,
            "reads_through_cache": files.fallback,
            "expected_tokens_s": expected and round(expected.tokens_s, 2),
        }
        return self.finish(
            model,
            report,
            account=FileAccount(resolved, self.verdict, facts, expected),
            reader=FileReads(files, model.readers, lambda: model.read_bytes),
            loaded_bytes=loaded,
            resident=whole,
            has_pooled_matrices=not self._is_mapped,
            check=self._watched.check,
            compute_threads=self._count_threads(),
        )

    def _load_loops(self) -> HostLoops:
        from pi2.backends.host import load_host_loops

        return load_host_loops(self.wish.progress, self.machine.features)

    def _count_threads(self) -> int:
        """Return the threads that compute: no more than the workspace has room for."""
        return self.resolved.plan.threads.compute or min(self.machine.cores, self.facts.threads)

    def _make_program(self, predicts: bool, find: FindWeight) -> BlockModel:
        resolved, machine, plan = self.resolved, self.machine, self.resolved.plan
        unit = resolved.device.units[resolved.sparse_unit]
        features = machine.features if unit.features is None else frozenset(unit.features)
        threads = self._count_threads()
        request = ProgramRequest(
            architecture=unit.architecture or machine.architecture,
            features=features,
            threads=threads,
            cores=tuple(list_cores(plan.threads.cores or "")),
            progress=self.wish.progress,
        )
        return BlockModel(
            resolved.model,
            find,
            Extent.of_file(plan, threads, predicts=predicts),
            allocate=self.budget.allocate,
            interpret=partial(self._backend.interpret, request),
        )


def divide(resolved: ResolvedPlan, facts: FileFacts, tensors: list[FileTensor]) -> Division:
    """Choose the resident tensors, by the segment ``hot``."""
    hot, weights = resolved.plan.memory.segments.hot, facts.weights
    if hot >= sum(tensor.size_bytes for tensor in tensors):
        return Division(tuple(tensor.name for tensor in tensors), {})
    if facts.expert_bytes:
        experts = {t.name for own in weights.list_experts().values() for t in own}
        tensors = [tensor for tensor in tensors if tensor.name not in experts]
    looked_up = weights.list_looked_up()
    tensors = [tensor for tensor in tensors if tensor.name not in looked_up]
    return divide_matrices(tensors, hot, PIECE_BYTES, facts.shared)


def find_place(
    states: Sequence[os.stat_result], tensor: FileTensor, *, is_mapped: bool
) -> MatrixPlace:
    state = states[tensor.file]
    own = tensor.offset, tensor.size_bytes, is_mapped
    return MatrixPlace(state.st_dev, state.st_ino, state.st_mtime_ns, *own)


def list_resident(resolved: ResolvedPlan) -> Mapping[MatrixPlace, int]:
    """Bytes of the matrices that a plan keeps in memory and other plans may use: of a file."""
    facts = resolved.source
    if not isinstance(facts, FileFacts):
        return {}
    weights = facts.weights
    try:
        states = [path.stat() for path in weights.files]
    except OSError:  # it is gone, which loading tells
        return {}
    tensors = {t.name: t for _, _, t in weights.list_matrices()}
    names = divide(resolved, facts, list(tensors.values())).resident
    is_mapped = resolved.plan.memory.weights == "mapped"
    found = [find_place(states, tensors[name], is_mapped=is_mapped) for name in names]
    return {place: place.size for place in found}


def place_resident(
    tensors: Sequence[FileTensor],
    known: Mapping[str, U8],
    weights: GgufWeights,
    budget: Budget,
    is_mapped: bool,
) -> tuple[Mapping[str, U8], list[tuple[Piece, U8]]]:
    """Bytes of resident matrices by name, of which some are ``known``, and the ranges that are
    read into the others."""
    if is_mapped:
        return {t.name: budget.adopt("hot", weights.map_rows(t).reshape(-1)) for t in tensors}, []
    placed = {name: budget.adopt("hot", own) for name, own in known.items()}
    chosen = [tensor for tensor in tensors if tensor.name not in known]
    size = sum(tensor.size_bytes for tensor in chosen)
    region = budget.allocate("hot", size, is_filled=True)
    ranges: list[tuple[Piece, U8]] = []
    place = 0
    for tensor in chosen:
        target = region[place : place + tensor.size_bytes]
        ranges.append((Piece(tensor.file, tensor.offset, tensor.size_bytes), target))
        placed[tensor.name] = target
        place += tensor.size_bytes
    return placed, ranges


def open_slots(
    resolved: ResolvedPlan, weights: GgufWeights, files: DirectFiles, region: U8, loops: HostLoops
) -> ExpertSlots:
    plan, moe = resolved.plan, resolved.model.moe
    assert moe is not None
    from pi2.memory.expert_slots import ExpertSlots, SlotReads

    reads = SlotReads(
        engine=plan.io.engine,
        depth=plan.io.depth,
        threads=plan.io.threads,
        policy=plan.cache.policy,
        active=moe.active_experts,
    )
    layers = {layer: describe_experts(own) for layer, own in weights.list_experts().items()}
    return ExpertSlots(files, layers, moe.experts, region, reads, loops)


def _make_dials(resolved: ResolvedPlan, weights: GgufWeights) -> RoutingDials | None:
    """Return the plan's settings of experts; None if routing is exact."""
    settings, moe = resolved.plan.experts, resolved.model.moe
    if moe is None or not settings.is_lossy:
        return None
    find = partial(weights.read_vector, "expert_scale")
    from pi2.engine.experts import RoutingDials

    return RoutingDials(settings, resolved.model, find if moe.expert_scale else lambda layer: None)


class WatchedFiles:
    """A model's files, from the time on when their headers had been read."""

    def __init__(self, paths: Sequence[Path], maps: Mapping[int, U8]) -> None:
        """``maps``: the bytes of mapped ones, by number."""
        self._paths, self._cleanup = paths, ExitStack()
        self._descriptors = [open_regular(path) for path in paths]
        for descriptor in self._descriptors:
            self._cleanup.callback(os.close, descriptor)
        self._states = [_read_state(own) for own in self._descriptors]
        self._faults: dict[int, Callable[[], int | None]] = {}
        """What tells where the disk failed, by the file's number."""
        if maps and (guard := find_guard()) is not None:
            for number, whole in maps.items():
                place = guard.watch(whole.ctypes.data, whole.nbytes)
                if place is not None:
                    self._faults[number] = partial(guard.find_fault, place)
                    self._cleanup.callback(guard.forget, place)

    def check(self) -> None:
        """Raises `UserError` P532 if a file was cut, P546 if its disk failed, P547 if its contents
        were changed."""
        for number, descriptor in enumerate(self._descriptors):
            if _read_state(descriptor) != self._states[number]:
                raise self._refuse(number)
        for number, find_fault in self._faults.items():
            if find_fault() is not None:
                raise self._refuse(number)

    def _refuse(self, number: int) -> UserError:
        path, before = self._paths[number], self._states[number]
        now = _read_state(self._descriptors[number])
        if now[0] < before[0]:
            return refuse_cut(path)
        fault = self._faults[number]() if number in self._faults else None
        if fault is not None and now == before:
            return refuse_weights(path, fault, OSError(5, os.strerror(5)))
        return UserError.of(
            "P547",
            f"{path} was changed while it was in use",
            help="load the model again when the file is written, and replace files by renaming",
        )

    def close(self) -> None:
        """Call it before the files are mapped no longer."""
        self._cleanup.close()
        self._descriptors.clear()
        self._faults.clear()


def _read_state(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
