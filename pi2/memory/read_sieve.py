"""Which missing neurons are worth a read: neurons whose scores reach a limit.

The limit is a score that a plan states (``decode.missing_threshold``), or it is found while the
model runs. Then ``decode.leave_out`` is the share of all scores' mass to leave out.

The *mass* of a neuron is its predictor's score above ``decode.threshold``, from which neurons are
named. A layer earns the stated share of its named mass as allowance, and left-out neurons spend it;
the share left out is therefore never above the stated one. After every step the limit follows the
step's balance: spending equals earnings, and a small reserve stays.

A missing neuron next to one that is read for its own score shares its request. So it has a lower
limit, by the cost of both reads."""

from math import exp, inf, isfinite, log, sqrt
from typing import NamedTuple

import numpy as np

from pi2.arrays import F32, I32, Bits

REQUEST_BYTES = 20 << 10
"""Bytes that are read in the time that a request takes by itself (notes/reads.md)."""
_RESERVE_STEPS = 2.0
"""Steps whose allowance is kept in reserve, to avoid cutting off the limit."""
_HORIZON_STEPS = 16.0
"""Steps in which a reserve that is too small or too large is made up for."""
_MOST_RESERVE_STEPS = 8.0
"""Steps whose allowance is kept at most: a time of few misses must not pay for later ones."""
_GAIN = 0.25
"""Exponent of wanted over left out mass that the limit follows: mass below a limit grows with its
square or faster."""
_MOST_STEP = log(1.5)
"""Largest change of the limit's logarithm in a step."""
_MOST_LIMIT = 16.0
"""Highest limit, in mean masses of named neurons: with few missing ones it would grow forever."""


class ReadLimits(NamedTuple):
    """What `ReadSieve.choose` goes by; compiled loops take the numbers in this order."""

    least: float
    """Score from which a missing neuron is read."""
    beside: float
    """Score from which it is read next to one that is read for its own score."""
    zero: float
    """Score whose mass is 0."""
    allowance: float
    """Mass that may be left out."""


class ReadSieve:
    """Chooses among missing neurons, and finds the limit if a share is stated."""

    def __init__(
        self,
        threshold: float,
        *,
        least: float | None = None,
        share: float | None = None,
        neuron_bytes: int,
    ) -> None:
        """``least``: score from which missing neurons are read, or ``share``: mass that may be left
        out. ``threshold`` names neurons; ``neuron_bytes``: a read of one."""
        assert (least is None) != (share is None), (least, share)
        self.share = share
        self.mass = 0.0
        """Mass of predicted neurons."""
        self.left_out = 0.0
        """Mass of skipped neurons."""
        self._threshold = threshold
        self._beside = neuron_bytes / (neuron_bytes + REQUEST_BYTES) if share is not None else 1.0
        self._margin: float | None = None if least is None else max(least - threshold, 0.0)
        """The limit's distance from ``threshold``, or None until something has been named."""
        self._allowance = inf if share is None else 0.0
        self._neurons = 0
        self._step_mass = self._step_tried = 0.0
        self.limits = self._make_limits()

    def _make_limits(self) -> ReadLimits:
        margin = self._margin or 0.0
        zero = self._threshold
        return ReadLimits(zero + margin, zero + margin * self._beside, zero, self._allowance)

    def choose(self, indices: I32, missing: Bits, scores: F32) -> tuple[Bits, float]:
        """Which of ``indices`` [n] stay: present ones, and missing ones that have to be read."""
        least, beside, zero, allowance = self.limits
        sure = missing & (scores >= np.float32(least))
        left = missing & ~sure
        near = np.zeros(len(indices), np.bool_)
        follows = np.diff(indices) == 1
        near[1:] |= follows & sure[:-1]
        near[:-1] |= follows & sure[1:]
        left &= ~(near & (scores >= np.float32(beside)))
        (places,) = left.nonzero()
        tried = np.cumsum(_weigh(scores.take(places), zero))
        left[places[int(np.searchsorted(tried, allowance, "right")) :]] = False
        return ~left, float(tried[-1]) if len(tried) else 0.0

    def note(self, named: F32, left_out: F32, tried: float) -> None:
        """Note the scores of all neurons that were named [n], of those left out [m], and what
        `choose` has returned."""
        zero = self._threshold
        mass, gone = float(_weigh(named, zero).sum()), float(_weigh(left_out, zero).sum())
        self.count(len(named), mass, gone, tried)

    def count(self, neurons: int, mass: float, left_out: float, tried: float) -> None:
        """Count the mass of named ``neurons``, the mass ``left_out``, and the mass that any
        allowance would have left out."""
        if not isfinite(mass):
            # Nothing was computed: there are no scores.
            return
        self.mass += mass
        self.left_out += left_out
        if self.share is None:
            return
        self._neurons += neurons
        self._step_mass += mass
        self._step_tried += tried
        self._allowance += self.share * mass - left_out
        if self._margin is None and mass > 0.0:
            # If scores are spread evenly and all are missing, that leaves out the share.
            self._margin = 2.0 * sqrt(self.share) * mass / neurons
        self.limits = self._make_limits()

    def end_step(self) -> None:
        """Let the limit follow what a step has left out."""
        if self.share is None or self._margin is None or self._step_mass <= 0.0:
            return
        earned = self.share * self._step_mass
        reserve = self._allowance / earned
        wanted = 1.0 + (reserve - _RESERVE_STEPS) / _HORIZON_STEPS
        # Not what was left out: the allowance may have cut that off.
        spent = self._step_tried / earned
        change = _MOST_STEP if spent <= 0.0 else _GAIN * log(max(wanted, 0.1) / spent)
        highest = _MOST_LIMIT * self._step_mass / self._neurons
        self._margin = min(self._margin * exp(max(-_MOST_STEP, min(change, _MOST_STEP))), highest)
        self._allowance = min(self._allowance, _MOST_RESERVE_STEPS * earned)
        self._neurons, self._step_mass, self._step_tried = 0, 0.0, 0.0
        self.limits = self._make_limits()


def _weigh(scores: F32, zero: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Mass [n] of ``scores`` [n]."""
    return np.asarray((scores - np.float32(zero)).astype(np.float64))
