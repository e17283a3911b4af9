"""A GGUF file that is computed as it is: resident matrices in their places, the others as they
arrive.

Every step needs every dense matrix once, in the same order. Matrices that are not resident pass
through a ring (`pi2.memory.ring`) in pieces of whole rows, and each piece is computed on
arrival. Experts that are not resident come into slots of a cache (`pi2.memory.expert_slots`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.blocks.instructions import FindWeight, Weight
from pi2.backends.blocks.model import PANEL_ROWS, BlockModel
from pi2.backends.executor import ExecutorObserver
from pi2.engine.experts import DialCounters, ExpertCourse, RoutingDials
from pi2.memory.direct_files import BLOCK, Piece
from pi2.memory.ring import Rates, WeightStream
from pi2.weights.file_tensor import FileTensor
from pi2.weights.gguf_weights import GgufWeights

if TYPE_CHECKING:
    from pi2.memory.expert_slots import ExpertSlots

TRIAL_S = 0.2
"""Seconds of streaming that tell a disk's rate."""
_HEAD_PART = 4
"""The ring of a streamed head is this part of all of it."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which matrices are resident, and in what pieces the others come."""

    resident: tuple[str, ...]
    streamed: Mapping[str, tuple[tuple[int, Piece], ...]]
    """Of each streamed matrix, in the order of computing: first row and bytes of its pieces."""

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, in the order in which a step needs them."""
        return [piece for pieces in self.streamed.values() for _, piece in pieces]


def divide_matrices(
    tensors: Sequence[FileTensor], resident_bytes: int, piece_bytes: int, first: Container[str] = ()
) -> Division:
    """Choose the resident ones of ``tensors``, which are in the order of computing.

    Those named ``first`` come first, then small ones, since short reads are slow; then as many
    others as fit, spread evenly: computing and reading take turns."""
    chosen: set[str] = set()
    left = resident_bytes
    for tensor in sorted(tensors, key=lambda item: (item.name not in first, item.size_bytes)):
        is_early = tensor.name in first or tensor.size_bytes <= piece_bytes
        if not is_early or tensor.size_bytes > left:
            break
        chosen.add(tensor.name)
        left -= tensor.size_bytes
    rest = [tensor for tensor in tensors if tensor.name not in chosen]
    whole = sum(tensor.size_bytes for tensor in rest)
    share, owed = left / max(1, whole), 0.0
    for tensor in rest:
        owed += share * tensor.size_bytes
        if tensor.size_bytes <= left and owed >= tensor.size_bytes / 2:
            chosen.add(tensor.name)
            left -= tensor.size_bytes
            owed -= tensor.size_bytes
    for tensor in rest:
        if tensor.name not in chosen and tensor.size_bytes <= left:
            chosen.add(tensor.name)
            left -= tensor.size_bytes
    streamed = {
        tensor.name: tuple(cut_rows(tensor, piece_bytes))
        for tensor in rest
        if tensor.name not in chosen
    }
    return Division(tuple(t.name for t in tensors if t.name in chosen), streamed)


def cut_rows(
    tensor: FileTensor, piece_bytes: int, multiple: int = PANEL_ROWS
) -> list[tuple[int, Piece]]:
    """Pieces of whole rows, a multiple of ``multiple`` except the last, of about as many bytes;
    rows that belong together stay together."""
    if tensor.together > 1:
        multiple = -(-multiple // tensor.together) * tensor.together
    rows = max(multiple, piece_bytes // tensor.row_bytes // multiple * multiple)
    return [
        (
            first,
            Piece(
                tensor.file,
                tensor.offset + first * tensor.row_bytes,
                min(rows, tensor.all_rows - first) * tensor.row_bytes,
            ),
        )
        for first in range(0, tensor.all_rows, rows)
    ]


@dataclass(frozen=True, slots=True)
class _Work:
    """A detour at instruction ``begin``: an ``action``, which is given the first instruction that
    was not run and returns the next such; else a matrix in ``pieces``, computed as they
    come: each with its first and last row, and how far its rows would begin before it."""

    begin: int
    pieces: tuple[tuple[int, int, int], ...] = ()
    action: Callable[[int], int] | None = None
    count: int = 1
    """Instructions of the matrix, each of which computes a part of it."""


class FileModel:
    """`pi2.backends.units.SequenceModel` over a file's tensors.  One calling thread."""

    touched_bytes = 0

    def __init__(
        self,
        weights: GgufWeights,
        division: Division,
        addresses: Mapping[str, int],
        ring: U8,
        make_stream: Callable[[Sequence[Piece], U8], WeightStream],
        make: Callable[[FindWeight], BlockModel],
        slots: ExpertSlots | None = None,
        check: Callable[[], None] = lambda: None,
        dials: RoutingDials | None = None,
    ) -> None:
        """``addresses`` of resident matrices, by name; ``ring``: what the others pass through,
        experts excepted, which go to ``slots``; ``make`` builds the program; ``check`` raises where
        a file is not as it was; ``dials`` change the routes of steps."""
        self._weights, self._check = weights, check
        self._dials = DialCounters() if dials is None else dials.counters
        self._model = model = make(partial(_find_weight, weights))
        self._rows: dict[int, FileTensor] = {}
        """Matrices of which tokens' rows are read, by number."""
        self._row_bytes = 0
        streamed: dict[int, tuple[tuple[int, Piece], ...]] = {}
        for number, matrix in enumerate(model.matrices):
            if matrix.weight.data is not None:
                continue
            name = matrix.weight.name
            if name in addresses:
                model.set_tensor(number, addresses[name])
            elif matrix.numbers is not None:
                tensor = weights.find(matrix.key)
                assert tensor is not None, matrix.key
                self._rows[number] = tensor
            elif matrix.weight.experts == 1:
                streamed[matrix.instructions[0]] = division.streamed[name]
        layers = {n: pieces for n, pieces in streamed.items() if n < model.head}
        head = {n: pieces for n, pieces in streamed.items() if n >= model.head}
        part = 0
        if head:
            slot = max(piece.aligned[1] for pieces in head.values() for _, piece in pieces)
            part = len(ring) // BLOCK * BLOCK
            if layers:
                part = max(2 * slot, len(ring) // _HEAD_PART // BLOCK * BLOCK)
        self._slots = slots
        self._experts: ExpertCourse | None = None
        work: list[_Work] = []
        if slots is not None:
            experts = self._experts = ExpertCourse(model, slots, dials)
            for own in model.routed:
                work.append(_Work(own.chosen, action=partial(experts.begin, own)))
                work.append(_Work(own.begin, action=partial(experts.compute, own)))
        ends = (0, model.head, model.end)
        self._layers = _Course(model, ends[:2], layers, work, lambda p: make_stream(p, ring[part:]))
        self._head = _Course(model, ends[1:], head, [], lambda p: make_stream(p, ring[:part]))
        found = (slots, self._layers.stream, self._head.stream)
        self.readers = [own.reads for own in found if own is not None]
        self._is_resident = not self.readers and not self._rows

    @property
    def program(self) -> BlockModel:
        return self._model

    def expect(self, end: int) -> None:
        self._model.expect(end)

    def abandon(self) -> None:
        """Do nothing: reads of experts under way are given up when the next ones begin."""

    def prefill(
        self, tokens: I32, sequence: int, position: int, progress: Callable[[float], None]
    ) -> None:
        self._check()
        if self._experts is not None:
            self._experts.is_step = False
        self._model.begin_chunk(tokens, sequence, position)
        self._put_rows()
        self._layers.run()
        self._check()

    def logits(self, first: int) -> F32:
        self._model.choose_logits(first)
        self._head.run()
        self._check()
        return self._model.read_logits()

    def read_head_input(self, first: int) -> F32:
        return self._model.read_head_input(first)

    def join(self, given: F32) -> None:
        self._model.join(given)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        self._check()
        if self._is_resident:
            logits = self._model.step(tokens, sequences, positions)
            self._check()
            return logits
        start = perf_counter()
        if self._experts is not None:
            self._experts.is_step = True
        self._model.begin_step(tokens, sequences, positions)
        self._put_rows()
        self._layers.run()
        self._head.run()
        if self._experts is not None:
            self._experts.pays.end_token(perf_counter() - start)
        self._check()
        return self._model.read_logits()

    def measure(self) -> Rates | None:
        """Stream for `TRIAL_S`, and compute the pieces; None where nothing streams."""
        course = self._head if self._layers.is_resident else self._layers
        zero = np.zeros(1, np.int32)
        self._model.begin_step(zero, zero.tolist(), zero.tolist())
        return course.measure()

    def _put_rows(self) -> None:
        """Read the rows that the call's tokens look up in matrices that are not resident."""
        for number, tensor in self._rows.items():
            rows = self._weights.read_rows(tensor, self._model.list_rows(number))
            self._row_bytes += rows.nbytes
            self._model.put_rows(number, rows)

    @property
    def read_bytes(self) -> int:
        return self._row_bytes + sum(own.read_bytes for own in self.readers)

    @property
    def waited_s(self) -> float:
        return sum((own.waited_s for own in self.readers), 0.0)

    def count_work(self) -> Mapping[str, float | None]:
        dials, slots, experts = self._dials, self._slots, self._experts
        hits, misses, evictions = (0, 0, 0) if slots is None else slots.counters
        return {
            "active_neurons": None,
            "cache_hits": hits,
            "cache_misses": misses,
            "cache_evictions": evictions,
            "tokens_without_ahead": 0 if experts is None else experts.pays.idle_tokens,
            "expert_weight": dials.weight,
            "replaced_weight": dials.replaced,
            "left_out_weight": dials.left_out,
        }

    def observe(self, observer: ExecutorObserver | None) -> None:
        self._model.observe(None if observer is None else observer.note_kernel)

    def close(self) -> None:
        self._layers.close()
        self._head.close()
        if self._slots is not None:
            self._slots.close()
        self._model.close()


def _find_weight(weights: GgufWeights, key: str, layer: int, mixer: int = 0) -> Weight | None:
    matrix = weights.describe(key, layer, mixer)
    if matrix is not None:
        return matrix
    vector = weights.read_vector(key, layer, mixer)
    if vector is None:
        return None
    return Weight(format="f32", rows=1, length=vector.size, data=vector.view(np.uint8))


class _Course:
    """A part of the program that runs again and again, with the stream of its weights."""

    def __init__(
        self,
        model: BlockModel,
        part: tuple[int, int],
        streamed: Mapping[int, Sequence[tuple[int, Piece]]],
        work: Sequence[_Work],
        make_stream: Callable[[Sequence[Piece]], WeightStream],
    ) -> None:
        """``part``: first and last instruction; ``work``: what else is not just run."""
        self._model, self._threads = model, model.most_threads
        special = list(work)
        for number, own in streamed.items():
            matrix = model.find_matrix(number)
            size = matrix.weight.row_bytes
            pieces = tuple(
                (first, first + piece.size // size, first * size) for first, piece in own
            )
            special.append(_Work(number, pieces, count=len(matrix.instructions)))
        self._begin, self._end = part
        self._work = sorted(special, key=lambda item: item.begin)
        cycle = [piece for number in sorted(streamed) for _, piece in streamed[number]]
        self.stream = make_stream(cycle) if cycle else None

    @property
    def is_resident(self) -> bool:
        return not self._work

    def run(self) -> None:
        stream, at = self.stream, self._begin
        try:
            for work in self._work:
                self._choose_threads()
                if work.action is not None:
                    at = work.action(at)
                    continue
                if at < work.begin:
                    self._model.run(at, work.begin)
                self._run_pieces(work)
                at = work.begin + work.count
            self._choose_threads()
            self._model.run(at, self._end)
        except BaseException:
            if stream is not None:
                stream.rewind()
            raise
        finally:
            self._model.most_threads = self._threads

    def _choose_threads(self) -> None:
        if self.stream is not None:
            self._model.most_threads = 1 if self.stream.is_behind() else self._threads

    def _run_pieces(self, work: _Work) -> None:
        stream = self.stream
        assert stream is not None
        for first, end, before in work.pieces:
            address = stream.take()
            self._choose_threads()
            self._model.run_rows(work.begin, first, end, address - before)
            stream.release()

    def measure(self) -> Rates | None:
        """Rates of reading and computing pieces, once every slot was filled: its memory is slower
        when it is touched for the first time.  A whole round follows."""
        stream = self.stream
        if stream is None:
            return None
        parts = ((work, piece) for work in itertools.cycle(self._work) for piece in work.pieces)
        begin, computing_s, filled, reads = perf_counter(), 0.0, 0, stream.reads
        for done, (work, (first, end, before)) in enumerate(parts, 1):
            address = stream.take()
            start = perf_counter()
            self._model.run_rows(work.begin, first, end, address - before)
            computing_s += perf_counter() - start
            stream.release()
            if done == stream.slots:
                begin, computing_s, filled = perf_counter(), 0.0, reads.read_bytes
            elif done > stream.slots and perf_counter() - begin >= TRIAL_S:
                break
        read, taken_s = reads.read_bytes - filled, perf_counter() - begin
        stream.rewind()
        reads.read_bytes, reads.waited_s = 0, 0.0
        return Rates(disk=read / taken_s, computing=read / computing_s)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
