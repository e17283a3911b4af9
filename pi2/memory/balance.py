"""Hot regions that grow and shrink while a model runs.

A plan says how many neurons of each layer are hot, from statistics of some text.  Other text uses
others.  So uses are counted: those of the *band* of hot neurons that are last in stored order,
those of the band that would be hot next, and those of a cold slot on average.  A band that is used
less than the average cold slot becomes cold, where the cache's policy decides neuron by neuron; one
that is used more than twice as often, and lies in memory anyway, becomes hot.  Between the two
nothing changes, so that a band does not go to and fro.  Where the context takes back what it lent
to cold neurons, hot ones make room.  What stays in memory is moved there, never read again, and a
layer at a time is weighed, so that no token waits for long.
"""

from __future__ import annotations

from concurrent.futures import Future, wait

import numpy as np

from pi2.arrays import I32
from pi2.memory.cache import NeuronCache
from pi2.memory.flash import FlashReader
from pi2.memory.null_reader import NullReader
from pi2.memory.policy import ABSENT

MORE_USED = 2.0
"""A band becomes hot when its neurons are used so many times as often as an average cold slot."""
MOSTLY_THERE = 0.9
"""And when so many of them are in memory anyway."""


class HotBalance:
    """Weighs every layer's hot neurons against cold ones, once in so many tokens."""

    def __init__(
        self,
        cache: NeuronCache,
        reader: FlashReader | NullReader,
        *,
        tokens: int,
        band: int,
        least_cold: int,
    ) -> None:
        """``tokens``: after so many a layer is weighed again; ``band``: neurons that change sides
        together; ``least_cold``: fewest cold slots that may be left."""
        layers = len(cache.hot_slots)
        self._cache = cache
        self._reader = reader
        self._window = tokens
        self._band = band
        self.least_cold = least_cold
        self._planned = [cache.hot_range(layer).stop for layer in range(layers)]
        self._inside = [0] * layers
        """Uses of the last hot band since the layer was weighed."""
        self._outside = [0] * layers
        self._since = [0] * layers
        self._tokens = 0
        self._cold_uses = 0.0
        """Uses of cold slots by the last tokens, older ones counting less."""
        self._cold_tokens = 0.0
        self.grown = 0
        """Neurons that became hot."""
        self.shrunk = 0
        """Neurons that became cold."""

    def note(self, layer: int, indices: I32, found: int) -> None:
        """Count the uses ``indices`` [n] (ascending) of a layer, ``found`` of them in memory."""
        hot = self._cache.hot_range(layer).stop
        edges = (max(0, hot - self._band), hot, hot + self._band)
        first, last, beyond = np.searchsorted(indices, edges).tolist()
        self._inside[layer] += last - first
        self._outside[layer] += beyond - last
        self._cold_uses += found - last

    def end_token(self) -> None:
        """Weigh the layers whose turn it is; nothing may be held."""
        fading = 1.0 - 1.0 / self._window
        self._cold_uses *= fading
        self._cold_tokens = (self._cold_tokens + 1.0) * fading
        layers = len(self._since)
        turns = self._tokens * layers // self._window, (self._tokens + 1) * layers // self._window
        self._tokens += 1
        for turn in range(*turns):
            self._weigh(turn % layers)

    def _weigh(self, layer: int) -> None:
        cache, band = self._cache, self._band
        tokens = self._tokens - self._since[layer]
        if 2 * tokens < self._window:
            return  # at the beginning: too little is known
        first, hot = cache.hot_range(layer).start, cache.hot_range(layer).stop
        slots = self._cold_tokens * cache.cold_capacity
        average = self._cold_uses / slots if slots else 0.0
        fewer, more = min(band, hot - first), min(band, cache.neurons - hot)
        if fewer and self._inside[layer] / (fewer * tokens) < average:
            cache.resize_hot(layer, hot - fewer, rare=True)
            self.shrunk += fewer
        elif more and self._outside[layer] / (more * tokens) > MORE_USED * average:
            there = np.count_nonzero(cache.find_slots(layer, hot, more) != ABSENT)
            spare = cache.cold_capacity - more
            if there >= MOSTLY_THERE * more and spare >= self.least_cold:
                self._grow(layer, hot + more)
                self.grown += more
        self._inside[layer] = self._outside[layer] = 0
        self._since[layer] = self._tokens

    def make_room(self, slots: int) -> None:
        """Let at least ``slots`` hot neurons be cold again, of layers that have grown; nothing may
        be held."""
        cache = self._cache
        while slots > 0:
            growth = [
                cache.hot_range(layer).stop - planned for layer, planned in enumerate(self._planned)
            ]
            layer = int(np.argmax(growth))
            fewer = min(self._band, len(cache.hot_slots[layer]))
            assert fewer, "there is nothing to make room with"
            cache.resize_hot(layer, cache.hot_range(layer).stop - fewer)
            self.shrunk += fewer
            slots -= fewer

    def _grow(self, layer: int, hot: int) -> None:
        """Make ``hot`` neurons hot, and read those that are not in memory."""
        cache = self._cache
        found = cache.resize_hot(layer, hot)
        if len(found.missing) == 0:
            return
        reads: list[Future[None]] = []
        try:
            # Neighbours in stored order are neighbours in the hot region.
            for run in np.split(found.missing, np.flatnonzero(np.diff(found.missing) > 1) + 1):
                place = int(cache.find_slots(layer, int(run[0]), 1)[0])
                arena = cache.arena[place : place + len(run)]
                reads.append(self._reader.start_run(layer, int(run[0]), arena))
            for read in reads:
                read.result()
        except BaseException:
            wait([read for read in reads if not read.cancel()])
            # They count as in memory, and not all of them have been read.
            cache.resize_hot(layer, int(found.missing[0]))
            cache.forget(layer, found.missing, unread_bytes=cache.arena.shape[1])
            raise
