"""The FFN of a layer with its neurons in memory and on flash.

Dense (prefill, and decode with ``predictor = "none"``): the hot neurons are computed where they
lie, the others stream through two staging buffers, one being read while the other is computed.
Sparse (decode): the predictor names the neurons, the cache says which are in memory; those compute
while the missing ones are being read.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import Executor
from pi2.diagnostics import UserError
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader, NullReader

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

PredictorMode = Literal["none", "gate", "low-rank"]


@dataclass(slots=True)
class NeuronCounters:
    """Neurons of sparse layers, summed over layers and tokens."""

    predicted: int = 0
    active: int = 0
    possible: int = 0


class FeedForward:
    """Computes FFN layers through an executor."""

    def __init__(
        self,
        executor: Executor,
        cache: NeuronCache,
        reader: FlashReader | NullReader,
        staging: U8,
        *,
        layers: int,
        predictor: PredictorMode,
        threshold: float,
    ) -> None:
        """``staging`` [2, n, stride]: two page-aligned buffers."""
        self._executor = executor
        self._cache = cache
        self._reader = reader
        self._staging = staging
        self._layers = layers
        self._predictor = predictor
        self._threshold = threshold
        self._ahead: tuple[int, Future[None]] | None = None
        self._next_buffer = 0
        self.counters = NeuronCounters()

    def decode_is_dense(self) -> bool:
        """Whether a generated token computes every neuron."""
        return self._predictor == "none"

    def run_dense(self, layer: int) -> None:
        """Compute all neurons of ``layer`` for the tokens of the chunk."""
        executor = self._executor
        executor.begin_ffn(layer)
        self._read_ahead(layer)
        hot = self._cache.hot_bundles(layer)
        if len(hot):
            executor.add_dense(layer, hot)
        for bundles in self._stream_cold(layer):
            executor.add_dense(layer, bundles)
        executor.end_ffn(layer)

    def run_sparse(self, layer: int) -> None:
        """Compute the neurons of ``layer`` that the predictor names, for one token."""
        executor, cache = self._executor, self._cache
        executor.begin_ffn(layer)
        if self._predictor == "gate":
            indices = executor.predict_gate(layer)
        else:
            indices = executor.predict_low_rank(layer, self._threshold)
        self.counters.predicted += len(indices)
        self.counters.possible += cache.neurons
        hot_count = len(cache.hot_slots[layer])
        first_cold = int(np.searchsorted(indices, hot_count))
        # More cold neurons than the cache has slots go through it in waves.
        end = min(first_cold + cache.cold_capacity, len(indices))
        self._run_wave(layer, indices[:end])
        while end < len(indices):
            start, end = end, min(end + cache.cold_capacity, len(indices))
            self._run_wave(layer, indices[start:end])
        executor.end_ffn(layer)
        self.counters.active += executor.count_active()

    def _run_wave(self, layer: int, indices: I32) -> None:
        found = self._cache.look_up(layer, indices)
        arena = self._cache.arena
        if len(found.missing) == 0:
            if len(found.resident_slots):
                self._executor.add_neurons(layer, arena, found.resident_slots)
            return
        pending = self._reader.start(layer, found.missing, found.missing_slots)
        try:
            if len(found.resident_slots):
                self._executor.add_neurons(layer, arena, found.resident_slots)
        finally:
            try:
                self._reader.finish(pending)
            except UserError:
                self._cache.forget(layer, found.missing)
                raise
        self._executor.add_neurons(layer, arena, found.missing_slots)

    def _pieces(self, layer: int) -> list[tuple[int, int]]:
        """First neuron and number of neurons of each run of cold neurons."""
        size = self._staging.shape[1]
        first = len(self._cache.hot_slots[layer])
        starts = range(first, self._cache.neurons, size)
        return [(start, min(size, self._cache.neurons - start)) for start in starts]

    def _start(self, layer: int, piece: tuple[int, int]) -> tuple[U8, Future[None]]:
        first, count = piece
        buffer = self._staging[self._next_buffer, :count]
        self._next_buffer = 1 - self._next_buffer
        return buffer, self._reader.start_run(layer, first, buffer)

    def _read_ahead(self, layer: int) -> None:
        """Make sure that the layer's first run is on its way."""
        pieces = self._pieces(layer)
        if self._ahead is None and pieces:
            _, future = self._start(layer, pieces[0])
            self._ahead = (layer, future)

    def _stream_cold(self, layer: int) -> Iterator[U8]:
        pieces = self._pieces(layer)
        for number, (_, count) in enumerate(pieces):
            assert self._ahead is not None and self._ahead[0] == layer
            future = self._ahead[1]
            buffer = self._staging[1 - self._next_buffer, :count]
            self._ahead = None
            future.result()
            # The other buffer's content has been used: fill it while this one is computed, with
            # the first run of the next layer at the end, so that reads go on during attention.
            if number + 1 < len(pieces):
                _, ahead = self._start(layer, pieces[number + 1])
                self._ahead = (layer, ahead)
            elif layer + 1 < self._layers and (following := self._pieces(layer + 1)):
                _, ahead = self._start(layer + 1, following[0])
                self._ahead = (layer + 1, ahead)
            yield buffer

    def abandon(self) -> None:
        """Forget a run that is on its way, after an error or an interrupt.

        Its buffer is free again only when the read is over: a late write would spoil the next run.
        """
        if self._ahead is not None:
            future, self._ahead = self._ahead[1], None
            if not future.cancel():
                wait([future])
