"""Which neurons of a layer belong to which expert of an MoE model, and which experts a plan's table
``[experts]`` lets a token leave out.

The settings apply in the order ``prefer_cached`` (the idea of cache-conditional routing,
arXiv 2412.00099), ``least_weight``, ``read_best``, ``most_reads``.  Prompts follow the router
exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_units import Experts


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
