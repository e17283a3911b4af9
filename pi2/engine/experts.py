"""Which neurons of a layer belong to which expert of an MoE model, and which experts a plan's table
``[experts]`` lets a token leave out.

The settings apply in the order ``prefer_cached`` (the idea of cache-conditional routing,
arXiv 2412.00099), ``least_weight``, ``read_best``, ``most_reads``.  Prompts follow the router
exactly.  Experts of a file that are not resident come into slots of a cache
(`pi2.memory.expert_slots`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Experts

if TYPE_CHECKING:
    from pi2.backends.blocks.model import BlockModel
    from pi2.backends.blocks.routed import PairTables, RoutedLayer
    from pi2.memory.expert_slots import ExpertSlots, Held

WAVE_EXPERTS, WAVES = 16, 3
"""Experts that are computed together in a prompt, at most; such waves in memory at a time."""


@dataclass(slots=True)
class DialCounters:
    """Routing weight of generated tokens, summed over layers and tokens."""

    weight: float = 0.0
    replaced: float = 0.0
    """Of experts in whose place others have computed."""
    left_out: float = 0.0
    """Of experts in whose place nothing has."""


class RoutingDials:
    """Changes the routes of single tokens."""

    def __init__(
        self,
        experts: Experts,
        model: Model,
        find_scales: Callable[[int], F32 | None] = lambda layer: None,
    ) -> None:
        """``find_scales``: factors [experts] of a layer's weights, if the model has them."""
        assert model.moe is not None
        self._settings, self._moe, self._find_scales = experts, model.moe, find_scales
        self._read_best = experts.list_read_best(model.shape.layers)
        self.counters = DialCounters()

    def apply(
        self, layer: int, scores: F32, chosen: I32, weights: F32, there: Bits, *, begun: int = 0
    ) -> None:
        """Change the experts ``chosen`` and their ``weights`` [active] by a token's router
        ``scores`` [experts]; ``there`` [experts]: which are in memory; ``begun`` are being read.

        In the place of an expert that is left out, the best one stands again, with weight 0."""
        row = np.zeros(self._moe.experts, np.float32)
        row[chosen] = weights
        before, counters, total = row.copy(), self.counters, float(weights.sum())
        if self._settings.prefer_cached:
            self._prefer(row, scores, there, self._find_scales(layer))
        replaced = float(before[row == 0].sum())
        left_out = self._leave_out(row, self._list_left_out(layer, row, there, begun))
        counters.weight += total
        counters.replaced += replaced
        counters.left_out += left_out
        if (row != before).any():
            own = np.flatnonzero(row)
            chosen[:], weights[:] = row.argmax(), 0
            chosen[: len(own)], weights[: len(own)] = own, row[own]

    def _prefer(self, row: F32, scores: F32, there: Bits, factors: F32 | None) -> None:
        """Let experts that are ``there`` take the places of others with nearly their scores;
        ``factors`` [experts] of the experts' weights, if the model has them."""
        chosen = np.flatnonzero(row)
        count, keep = len(chosen), min(self._settings.keep_best, len(chosen))
        spread = float(scores.max() - scores.min())
        wanted = scores + np.float32(self._settings.prefer_cached * spread) * there
        wanted[np.argsort(-scores, kind="stable")[:keep]] = np.inf
        better = np.argsort(-wanted, kind="stable")[:count]
        if self._moe.router == "softmax":
            shares = np.exp(scores - scores.max())
        else:
            shares = 1 / (1 + np.exp(-scores))
        own = np.ones_like(row) if factors is None else factors
        total = (row[chosen] / own[chosen]).sum()
        scale = total / shares[better if self._moe.normalise_weights else chosen].sum()
        row[:] = 0
        row[better] = shares[better] * scale * own[better]

    def _list_left_out(self, layer: int, row: F32, there: Bits, begun: int) -> I64:
        settings, total = self._settings, float(row.sum())
        missing = (row != 0) & ~there
        gone = missing & (row < settings.least_weight * total)
        order = np.argsort(-row, kind="stable")
        read_best = self._read_best[layer]
        if read_best is not None:
            later = order[read_best:]
            gone[later] |= missing[later]
        if settings.most_reads is not None:
            left = order[(missing & ~gone)[order]]
            gone[left[max(0, settings.most_reads - begun) :]] = True
        return np.flatnonzero(gone)

    def _leave_out(self, row: F32, gone: I64) -> float:
        """Leave out the experts ``gone``, but not all that a token has; return their weight."""
        settings, total = self._settings, float(row.sum())
        if len(gone) == np.count_nonzero(row):
            # Something has to compute: the best of them.
            gone = gone[gone != row.argmax()]
        weight = float(row[gone].sum())
        row[gone] = 0
        if settings.renormalise and weight:
            row *= np.float32(total / (total - weight))
        return weight


class ExpertNeurons:
    """The stored indices of every expert's neurons, of each layer."""

    def __init__(self, layers: Sequence[I32], experts: int) -> None:
        """``layers``: stored indices [neurons] of each, expert by expert, ascending within each."""
        self.experts = experts
        self.size = len(layers[0]) // experts
        """Neurons of one."""
        self._groups = [layer.reshape(experts, -1) for layer in layers]
        # Then what experts have, one after the other, is ascending, too.
        self._by_expert = [bool((np.diff(layer) > 0).all()) for layer in layers]

    def list_neurons(self, layer: int, experts: I32, first: int = 0, end: int | None = None) -> I32:
        """Stored indices, ascending, of the neurons of ``experts`` (ascending) in ``layer``, from
        ``first`` on and before ``end``."""
        found = self._groups[layer][experts].reshape(-1)
        if not self._by_expert[layer]:
            found.sort()
        start = int(found.searchsorted(first)) if first else 0
        stop = len(found) if end is None else int(found.searchsorted(end))
        return found[start:stop]

    def list_runs(self, layer: int, experts: I32, wanted: range, shortest_gap: int) -> list[range]:
        """Ranges of stored order within ``wanted`` that cover the neurons of ``experts``; ranges
        with fewer than ``shortest_gap`` other neurons between them are joined."""
        found = self.list_neurons(layer, experts, wanted.start, wanted.stop)
        if len(found) == 0:
            return []
        cuts = np.flatnonzero(np.diff(found) > shortest_gap)
        firsts = found[np.concatenate([[0], cuts + 1])].tolist()
        lasts = found[np.concatenate([cuts, [len(found) - 1]])].tolist()
        return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def mark_experts(experts: I32, named: I32) -> Bits:
    """Which of ``experts`` are ``named``: for so few, `numpy.isin` takes twenty times as long."""
    known = set(named.tolist())
    return np.array([expert in known for expert in experts.tolist()], np.bool_)


def unite_experts(tokens: Sequence[I32]) -> I32:
    """Experts, ascending, that compute any of some tokens, of which each has its own."""
    return tokens[0] if len(tokens) == 1 else np.unique(np.concatenate(tokens)).astype(np.int32)


class ExpertCourse:
    """Computes the experts of the layers of a program, in the order in which they would be if all
    were resident: results have the same bits.

    Few tokens: outputs are added token by token, so those whose experts fit into the slots are
    computed together.  Many: outputs are added expert by expert, so experts pass in waves, the next
    ones are read while one computes."""

    def __init__(
        self, model: BlockModel, slots: ExpertSlots, dials: RoutingDials | None = None
    ) -> None:
        assert model.pairs is not None
        self._model = model
        self._pairs: PairTables = model.pairs
        self._slots = slots
        self._dials, self.is_step = dials, False
        # Dials ask what is in memory: if times decided that, a prompt would give other texts.
        from pi2.memory.expert_slots import ReadAhead

        self.pays = ReadAhead(is_measured=dials is None)
        """Whether reading ahead does."""
        self._pairs.may_repeat = dials is not None
        self._held: list[Held] = []
        """The current computation or read."""
        for own in model.routed:
            for number, place in zip(own.matrices, slots.locate(own.layer), strict=True):
                model.place_experts(number, *place)

    def begin(self, own: RoutedLayer, at: int) -> int:
        """Begin to read what a layer's tokens have chosen, as far as there are slots; then, for few
        tokens and while it pays, what the next layer's router would choose now."""
        self._give_up()  # what an interrupt has left
        pairs, (first, end) = self._pairs, own.prediction
        predicts = first < end and self.pays.is_on and not pairs.is_many
        if first < end and not predicts:
            self._model.run(at, first)
            at = end
        self._model.run(at, own.chosen)
        if self._dials is not None and self.is_step:
            self._turn(own, self._dials)
        self._by_expert = pairs.is_many and not pairs.keeps_order(own)
        if self._by_expert:
            self._order = pairs.list_by_expert()
            self._waves = self._cut_experts(own)
        else:
            self._waves = self._cut_tokens(own)
        self._next = next(self._waves)
        self._find(own, self._next[2])
        if predicts:
            self._slots.prefetch(own.layer + 1, pairs.list_predicted())
        return own.chosen

    def _turn(self, own: RoutedLayer, dials: RoutingDials) -> None:
        """Let ``dials`` change the choice of each token of a step."""
        pairs, layer = self._pairs, own.layer
        scores, there = self._model.view_scores(own), self._slots.find_there(layer)
        begun = self._slots.count_begun(layer)
        for token, first in enumerate(range(0, pairs.count, pairs.active)):
            part = slice(first, first + pairs.active)
            chosen, weights = pairs.chosen[part], pairs.weights[part]
            dials.apply(layer, scores[token], chosen, weights, there, begun=begun)

    def compute(self, own: RoutedLayer, at: int) -> int:
        """Compute a layer's experts, unless the program as it is does later: all are there."""
        pairs, held = self._pairs, self._held[0]
        try:
            if not held.waits and not pairs.is_many and self._next[1] == pairs.count:
                # Nothing takes their slots before the next layer has chosen.
                self._slots.release(self._held.pop())
                pairs.restore(own)
                return at
            self._model.run(at, own.begin)
            if self._by_expert:
                self._compute_many(own)
            else:
                self._compute_few(own)
        except BaseException:
            self._give_up()
            raise
        return own.end

    def _give_up(self) -> None:
        while self._held:
            self._slots.abandon(self._held.pop())

    def _find(self, own: RoutedLayer, experts: I32) -> None:
        self._held.append(self._slots.find(own.layer, experts))

    def _cut_tokens(self, own: RoutedLayer) -> Iterator[tuple[int, int, I32]]:
        """First and last pair of tokens whose experts fit into the slots, and these experts."""
        pairs, active = self._pairs, self._pairs.active
        room, begin = self._slots.count_slots(own.layer), 0
        if pairs.count <= room:
            yield begin, pairs.count, pairs.list_chosen()
            return
        named: set[int] = set()
        chosen = pairs.chosen.tolist()
        for first in range(0, pairs.count, active):
            both = named.union(chosen[first : first + active])
            if len(both) > room:
                yield begin, first, np.array(sorted(named), np.int32)
                begin, both = first, set(chosen[first : first + active])
            named = both
        yield begin, pairs.count, np.array(sorted(named), np.int32)

    def _cut_experts(self, own: RoutedLayer) -> Iterator[tuple[int, int, I32]]:
        """First and last entry of experts that are a wave, and these experts."""
        chosen = self._pairs.chosen.take(self._order)
        begins = np.flatnonzero(np.diff(chosen, prepend=-1))
        experts, ends = chosen[begins], np.append(begins, len(chosen))
        step = max(1, min(self._slots.count_slots(own.layer) // WAVES, WAVE_EXPERTS))
        for first in range(0, len(experts), step):
            last = min(first + step, len(experts))
            yield int(begins[first]), int(ends[last]), experts[first:last]

    def _compute_many(self, own: RoutedLayer) -> None:
        pairs, slots = self._pairs, self._slots
        pairs.set_pairs(self._order)
        begun, rest = deque([self._next]), deque(self._waves)
        while begun or rest:
            while rest and len(begun) < WAVES:
                if begun and len(rest[0][2]) > slots.count_slots(own.layer):
                    break
                begun.append(rest.popleft())
                self._find(own, begun[-1][2])
            if not rest and pairs.count >= 4 * pairs.experts:
                # So many tokens need nearly all experts of the next layer.
                first_ones = np.arange(min(WAVE_EXPERTS, pairs.experts), dtype=np.int32)
                slots.prefetch(own.layer + 1, first_ones)
            first, end, _ = begun.popleft()
            slots.wait_inputs(self._held[0])
            slots.wait_outputs(self._held[0])
            pairs.run_rows(own, first, end)
            slots.release(self._held.pop(0))

    def _compute_few(self, own: RoutedLayer) -> None:
        pairs, slots = self._pairs, self._slots
        rows = np.arange(pairs.count, dtype=np.int32)
        now: tuple[int, int, I32] | None = self._next
        while now is not None:
            begin, end, _ = now
            held = self._held[0]
            if not held.waits and not pairs.is_many:
                pairs.set_pairs(rows, rows)
                pairs.run_rows(own, begin, end)
            else:
                order, middle = self._sort(held, begin, end)
                rows_now = rows.copy()
                rows_now[begin:end] = order
                pairs.set_pairs(rows_now, rows_now)
                pairs.run_inputs(own, begin, middle)
                slots.wait_inputs(held)
                pairs.run_inputs(own, middle, end)
                slots.wait_outputs(held)
                pairs.run_outputs(own, begin, end)
            slots.release(self._held.pop(0))
            now = next(self._waves, None)
            if now is not None:
                self._find(own, now[2])

    def _sort(self, held: Held, begin: int, end: int) -> tuple[I32, int]:
        """Pairs ``begin`` to ``end``, those first whose experts are there, and where the others
        begin; many tokens are by expert, and wait for all."""
        chosen = self._pairs.chosen[begin:end]
        key = chosen if self._pairs.is_many else self._slots.list_missing(held, chosen)
        order = np.argsort(key, kind="stable").astype(np.int32) + np.int32(begin)
        present = 0 if self._pairs.is_many else int(len(key) - np.count_nonzero(key))
        return order, begin + present
