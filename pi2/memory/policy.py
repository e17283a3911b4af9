"""Which neurons leave the cold cache for new ones."""

from typing import Literal

import numpy as np

from pi2.arrays import F32, F64, I32, I64
from pi2.memory.host_loops import CacheTables, FoundNeurons, HostLoops, LayerPlace
from pi2.memory.read_sieve import ReadLimits

ABSENT = -1

PolicyName = Literal["lfu", "lru"]

_HALF_LIFE_TOKENS = 64.0
"""Tokens after which a use counts half, if a token uses the expected number of neurons."""
_PRIOR_TOKENS = 16.0
"""How many tokens the expectation is worth."""
_UNKNOWN_USE = 0.1
"""Share of the neurons that a token uses, if nothing is known."""
_CANDIDATES = 64
"""One slot of so many is a candidate for the next evictions."""
_FEW_CANDIDATES = 16
"""Candidates of a small cache of experts; one slot of as many at most."""
_SAMPLE = 4096
"""Slots, at least, whose scores tell what a low one is."""
_MOST_WEIGHT = 1e6
_TRIFLE = 1e-3
_EMPTY = -1.0
"""Score of a slot without a neuron: it goes first."""
_NO_SLOTS = np.empty(0, np.int32)
_STEEPNESS = 0.6
"""Exponent of the power law of activations over stored places: 26 to 43 % of a layer's neurons make
80 % of its activations."""


def carry_over(values: I64, source: I32, empty: int) -> I64:
    """``values[source]``, and ``empty`` where ``source`` is ABSENT."""
    result = np.full(len(source), empty, np.int64)
    known = source != ABSENT
    result[known] = values[source[known]]
    return result


def expect_uses(layers: int, neurons: int, *, share: float = _UNKNOWN_USE) -> F32:
    """Uses per token [layers, neurons], by hotness, if a token uses ``share`` of them."""
    places = ((np.arange(neurons) + 0.5) / neurons) ** -_STEEPNESS
    uses = np.minimum(places * (share / places.mean()), 1.0)
    return np.tile(uses.astype(np.float32), (layers, 1))


class Replacement:
    """Requests take slots from a list of the least needed ones, made now and then.  With ``lfu``
    they have the lowest counts of uses, of which later ones count more; with ``lru`` their last use
    is the longest ago.  A *key* is layer x neurons per layer + stored index."""

    def __init__(
        self,
        name: PolicyName,
        loops: HostLoops,
        slot_of: I32,
        capacity: int,
        expected: F32 | None = None,
    ) -> None:
        """``slot_of`` [keys]: slots, or ABSENT; ``expected`` [keys]: uses of each neuron per token;
        ``capacity`` slots are empty."""
        if expected is None:
            expected = np.zeros(0, np.float32)
        uses_per_token = float(expected.sum()) or _UNKNOWN_USE * len(slot_of)
        counts = np.zeros(len(slot_of), np.float32)
        counts[: len(expected)] = expected * np.float32(_PRIOR_TOKENS)
        self._is_lru, self._loops = name == "lru", loops
        self.tables = CacheTables(
            counts=counts,
            scores=np.full(capacity, _EMPTY, np.float32),
            used_at=np.zeros(capacity, np.int64),
            growth=np.log(2.0) / (_HALF_LIFE_TOKENS * max(uses_per_token, 1.0)),
            slot_of=slot_of,
            owner=np.full(capacity, ABSENT, np.int64),
            held=np.zeros(capacity, np.uint8),
            candidates=_NO_SLOTS,
        )

    def adopt(self, order: I32) -> None:
        """Begin anew with the owners of slots; ``order`` has all slots, the least needed neuron's
        first."""
        self._count_owners()
        # Neurons that are expected alike go in order.
        places = np.arange(len(order))
        self.tables.scores[order] += places * np.float32(_TRIFLE / max(1, len(order)))
        self.tables.used_at[order] = places - len(order)

    def _count_owners(self) -> None:
        """Let all slots have the scores of their owners."""
        tables, full = self.tables, self.tables.owner != ABSENT
        tables.scores = np.full(len(full), _EMPTY, np.float32)
        tables.scores[full] = tables.counts[tables.owner[full]]
        tables.candidates = _NO_SLOTS

    def _let_weight_grow(self, uses: int) -> None:
        """Let new uses count more than the last ``uses``."""
        tables = self.tables
        tables.weight *= 1.0 + tables.growth * uses
        if tables.weight > _MOST_WEIGHT:
            scale = np.float32(1.0 / tables.weight)
            tables.counts *= scale
            tables.scores[tables.scores > 0] *= scale
            tables.weight = 1.0

    def find(
        self,
        place: LayerPlace,
        indices: I32,
        room: int,
        marks: F32 | None = None,
        limits: ReadLimits | None = None,
    ) -> FoundNeurons:
        """Find ``indices`` [n] (ascending) of a layer, and give slots to missing ones; see
        `HostLoops.find_neurons`."""
        tables = self.tables
        tables.clock += 1
        found = self._loops.find_neurons(tables, place, indices, room, marks, limits)
        self._let_weight_grow(found.present - found.hot)
        if not found.missing:
            return found
        tables.candidates = tables.candidates[found.seen :]
        left = found.left
        if found.placed < found.missing:
            count, placed = len(found.lists) // 4, found.placed
            missing, slots, cold = (
                found.lists[start + placed : start + found.missing]
                for start in (count, 2 * count, 3 * count + found.present - found.hot)
            )
            left += self._place(place, missing, cold)
            np.add(cold, np.int32(place.first_cold), out=slots)
        self._let_weight_grow(found.missing)
        return found._replace(placed=found.missing, left=left)

    def _place(self, place: LayerPlace, missing: I32, given: I32) -> int:
        """Give cold slots, ``given`` [m], to ``missing`` [m], of new lists of candidates; return
        how many neurons left."""
        tables, placed, evicted = self.tables, 0, 0
        while placed < len(missing):
            self._list_candidates(len(missing) - placed)
            more, seen, left = self._loops.place_neurons(
                tables, place, missing[placed:], given[placed:]
            )
            tables.candidates = tables.candidates[seen:]
            placed += more
            evicted += left
        return evicted

    def _rank(self) -> F32 | F64:
        """What slots leave by, the lowest first."""
        tables = self.tables
        if not self._is_lru:
            return tables.scores
        return np.where(tables.scores == _EMPTY, -np.inf, tables.used_at)

    def _list_candidates(self, least: int) -> None:
        """List the least needed slots, at least ``least`` that may be given away."""
        tables, scores = self.tables, self._rank()
        few = min(_FEW_CANDIDATES, len(scores) // _FEW_CANDIDATES)
        size = max(least, few, len(scores) // _CANDIDATES)
        # Where they end need not be known exactly: some of the slots tell.
        sample = scores[:: max(1, len(scores) // _SAMPLE)]
        while True:
            is_all = size >= len(scores)
            place = -(-min(size, len(scores)) * len(sample) // max(1, len(scores))) - 1
            limit = np.inf if is_all else np.partition(sample, place)[place]
            lowest = (scores <= limit).nonzero()[0].astype(np.int32)
            unused = tables.used_at.take(lowest) < tables.clock
            lowest = lowest.compress(np.greater(unused, tables.held.take(lowest)))
            if len(lowest) >= least:
                break
            assert not is_all, "more slots are wanted than may be given away"
            size *= 4
        tables.candidates = lowest.take(np.argsort(scores.take(lowest), kind="stable"))
        tables.listed_at = tables.clock

    def drop(self, slots: I32) -> None:
        """``slots`` [n] are empty now."""
        tables = self.tables
        tables.scores[slots], tables.used_at[slots] = _EMPTY, 0
        others = tables.candidates[~np.isin(tables.candidates, slots)]
        tables.candidates = np.concatenate([slots, others])

    def list_order(self) -> I32:
        """All slots, the least needed neuron's first."""
        return np.argsort(self._rank(), kind="stable").astype(np.int32)

    def renumber(self, source: I32) -> None:
        """Slot i is from now on what slot ``source[i]`` was (ABSENT: a new, empty one)."""
        tables = self.tables
        tables.owner = carry_over(tables.owner, source, ABSENT)
        tables.used_at = carry_over(tables.used_at, source, 0)
        tables.held = np.zeros(len(source), np.uint8)
        self._count_owners()
