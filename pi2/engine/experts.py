"""Which neurons of a layer belong to which expert of an MoE model, and which experts a plan's table
``[experts]`` lets a token leave out.

The settings apply in the order ``prefer_cached`` (the idea of cache-conditional routing,
arXiv 2412.00099), ``least_weight``, ``read_best``, ``most_reads``.  Prompts follow the router
exactly, and so do layers without a router, whose FFN counts as one expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32, I64, Bits
from pi2.backends.arithmetic import Router, make_routers, read_rows
from pi2.backends.protocol import Tensor
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

    def __init__(self, experts: Experts, model: Model, routers: Sequence[Router] | None) -> None:
        """``routers``: the routers of all layers, if other experts may be preferred."""
        assert model.moe is not None
        self._settings = experts
        self._moe = model.moe
        self._routed = frozenset(n for n, block in enumerate(model.blocks) if block.ffn.has_router)
        self._routers = routers
        self._read_best = experts.list_read_best(model.shape.layers)

    def apply(
        self,
        layer: int,
        inputs: F32,
        routes: F32,
        there: Bits,
        counters: DialCounters,
        *,
        begun: int = 0,
    ) -> None:
        """Change ``routes`` of tokens with router ``inputs`` [T, hidden]; ``there`` says which
        experts are in memory, ``begun`` how many of them are being read."""
        if layer not in self._routed:
            return
        router = None if self._routers is None else self._routers[layer]
        own, there = routes[:, : self._moe.experts], there[: self._moe.experts]
        for token, row in enumerate(own):
            before = row.copy()
            total = float(row.sum())
            if router is not None:
                scores = router.score(inputs[token : token + 1])[0]
                self._prefer(row, scores, there, router.expert_scale)
            replaced = float(before[row == 0].sum())
            gone = self._list_left_out(layer, row, there, begun)
            counters.weight += total
            counters.replaced += replaced
            counters.left_out += self._leave_out(row, gone)

    def _prefer(self, row: F32, scores: F32, there: Bits, factors: F32 | None) -> None:
        """Let experts that are ``there`` take the places of others with nearly their scores;
        ``factors`` [1, experts] of the experts' weights, if the model has them."""
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
        own = np.ones_like(row) if factors is None else factors[0]
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


def make_dials(
    experts: Experts, model: Model, tensors: Mapping[str, Tensor]
) -> RoutingDials | None:
    """The settings of a plan; None if routing is exact."""
    if model.moe is None or not experts.is_lossy:
        return None
    routers = None
    if experts.prefer_cached:
        routers = make_routers(model, lambda name: read_rows(tensors[name]))
    return RoutingDials(experts, model, routers)


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


def count_common(experts: I32, named: I32) -> int:
    return len(set(experts.tolist()).intersection(named.tolist()))


def unite_experts(tokens: Sequence[I32]) -> I32:
    """Experts, ascending, that compute any of some tokens, of which each has its own."""
    return tokens[0] if len(tokens) == 1 else np.unique(np.concatenate(tokens)).astype(np.int32)
