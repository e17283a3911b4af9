"""Which neurons of a layer belong to which expert of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import I32, Bits


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

    def divide(self, granule: int) -> ExpertNeurons:
        """Make the same of granules: so many neighbours each, of one expert."""
        if granule == 1:
            return self
        layers = [group[:, ::granule].reshape(-1) // granule for group in self._groups]
        return ExpertNeurons([layer.astype(np.int32) for layer in layers], self.experts)

    def list_neurons(self, layer: int, experts: I32, first: int = 0, end: int | None = None) -> I32:
        """Stored indices, ascending, of the neurons of ``experts`` (ascending) in ``layer``, from
        ``first`` on and before ``end``."""
        found = self._groups[layer][experts].reshape(-1)
        if not self._by_expert[layer]:
            found.sort()
        start = int(found.searchsorted(first)) if first else 0
        stop = len(found) if end is None else int(found.searchsorted(end))
        return found[start:stop]

    def list_all(self, layer: int, values: I32) -> I32:
        """``values`` [neurons] in stored order by expert, [experts, neurons of one]."""
        return values.take(self._groups[layer])

    def list_runs(self, layer: int, experts: I32, wanted: range, shortest_gap: int) -> list[range]:
        """Stretches of stored order within ``wanted`` that have the neurons of ``experts``; those
        of which fewer than ``shortest_gap`` others lie in between are one."""
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


def count_common(experts: I32, named: I32) -> int:
    """How many of ``experts`` are ``named``."""
    return len(set(experts.tolist()).intersection(named.tolist()))


def unite_experts(tokens: Sequence[I32]) -> I32:
    """Experts, ascending, that compute any of some tokens, of which each has its own."""
    return tokens[0] if len(tokens) == 1 else np.unique(np.concatenate(tokens)).astype(np.int32)
