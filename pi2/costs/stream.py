"""Layers that stream by in pieces, all neurons of each being computed: prompts, and dense decoding.

What the engine does (`pi2.engine.neuron_stream`): a layer's neurons that are not hot are read in
pieces of a staging buffer's size.  One piece is read while the one before it is computed, never
more: so while attention and the hot neurons of a layer are computed, only its first piece comes.
A layer of n pieces takes

    both(before + piece, read) + (n - 1) both(piece, read)

where ``before`` is attention, norms and hot neurons, ``piece`` the arithmetic of a piece, ``read``
its way from flash, and both(a, b) = a + b - overlap min(a, b).  Of mixtures whose router names
experts, those in memory are computed between the others, and count as parts of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pi2.costs.rates import Rates, check_flash, find_stream_overlap, find_stream_rate
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import count_staged_neurons


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """How fast pieces come from flash."""

    byte_s: float
    """Seconds of a byte, in reads of a piece's size."""
    overlap: float
    """Part of the shorter one of reading and computing that both at once save."""
    neurons: int
    """Number of neurons of a piece."""
    stride: int

    def count_pieces(self, absent: float) -> float:
        """Number of pieces that hold ``absent`` neurons."""
        return float(ceil(absent / self.neurons - 1e-9)) if absent > 0.0 else 0.0

    def time_wait(self, absent: float, before_s: float, compute_s: float) -> float:
        """Seconds that a layer takes beyond its arithmetic: ``before_s`` first, then ``compute_s``
        for all ``absent`` neurons."""
        pieces = self.count_pieces(absent)
        if pieces == 0.0:
            return 0.0
        read_s, piece_s = self.time_read(absent) / pieces, compute_s / pieces
        first = read_s - self.overlap * min(before_s + piece_s, read_s)
        return first + (pieces - 1.0) * (read_s - self.overlap * min(piece_s, read_s))

    def time_read(self, absent: float) -> float:
        """Seconds of reading ``absent`` neurons, nothing else going on."""
        return absent * self.stride * self.byte_s


def find_stream(resolved: ResolvedPlan, rates: Rates) -> Stream:
    """The stream of a plan's layers; ``UserError`` P351 where reads were not measured."""
    flash = check_flash(rates, resolved.device)
    neurons = count_staged_neurons(resolved)
    stride = resolved.bundle.stride
    return Stream(
        byte_s=1.0 / find_stream_rate(flash, neurons * stride),
        overlap=find_stream_overlap(rates),
        neurons=neurons,
        stride=stride,
    )
