"""Experts of a GGUF file that has more of them than memory: those in slots compute while missing
ones are read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pi2.arrays import I32
from pi2.backends.blocks.model import BlockModel
from pi2.backends.blocks.routed import PairTables, RoutedLayer
from pi2.memory.expert_slots import ExpertSlots, Held


class ExpertCourse:
    """Computes the experts of the layers of a program, in the order in which they would be if all
    were resident: results have the same bits.

    Few tokens: outputs are added token by token, so those whose experts fit into the slots are
    computed together.  Many: outputs are added expert by expert, so experts pass in two halves of
    the slots, one half is read while the other computes.
    """

    def __init__(self, model: BlockModel, slots: ExpertSlots) -> None:
        assert model.pairs is not None
        self._pairs: PairTables = model.pairs
        self._slots = slots
        self._held: list[Held] = []
        """What is being computed or read."""
        for own in model.routed:
            for number, place in zip(own.matrices, slots.locate(own.layer), strict=True):
                model.place_experts(number, *place)

    def begin(self, own: RoutedLayer) -> None:
        """Begin to read what a layer's tokens have chosen, as far as there are slots."""
        self._give_up()  # what an interrupt has left
        pairs = self._pairs
        self._by_expert = pairs.is_many and not pairs.keeps_order(own)
        if self._by_expert:
            self._order = pairs.list_by_expert()
            self._waves = self._cut_experts(own)
        else:
            self._waves = self._cut_tokens(own)
        self._next = next(self._waves)
        self._find(own, self._next[2])

    def compute(self, own: RoutedLayer) -> None:
        """Compute the layer's experts."""
        try:
            if self._by_expert:
                self._compute_many(own)
            else:
                self._compute_few(own)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        while self._held:
            self._slots.abandon(self._held.pop())

    def _find(self, own: RoutedLayer, experts: I32) -> None:
        self._held.append(self._slots.find(own.layer, experts))

    def _cut_tokens(self, own: RoutedLayer) -> Iterator[tuple[int, int, I32]]:
        """First and last pair of tokens whose experts fit into the slots, and these experts."""
        pairs, active = self._pairs, self._pairs.active
        room, begin = self._slots.count_slots(own.layer), 0
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
        """First and last entry of experts that take half of the slots, and these experts."""
        chosen = self._pairs.chosen.take(self._order)
        begins = np.flatnonzero(np.diff(chosen, prepend=-1))
        experts, ends = chosen[begins], np.append(begins, len(chosen))
        step = max(1, self._slots.count_slots(own.layer) // 2)
        for first in range(0, len(experts), step):
            last = min(first + step, len(experts))
            yield int(begins[first]), int(ends[last]), experts[first:last]

    def _compute_many(self, own: RoutedLayer) -> None:
        pairs, slots = self._pairs, self._slots
        pairs.set_pairs(self._order)
        now: tuple[int, int, I32] | None = self._next
        while now is not None:
            later = next(self._waves, None)
            if later is not None:
                self._find(own, later[2])
            slots.wait(self._held[0])
            pairs.run_rows(own, now[0], now[1])
            slots.release(self._held.pop(0))
            now = later

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
                slots.wait(held, inputs_only=True)
                pairs.run_inputs(own, middle, end)
                slots.wait(held)
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
