"""From logits to a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pi2.arrays import F32, I64
from pi2.diagnostics import UserError

Bias = NDArray[np.float32]
"""What is added to logits [vocab]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn.

    In this order: repetition penalty, presence and frequency penalty, bias, temperature, top-k,
    top-p, min-p.
    """

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities reach p."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens already seen by it, multiply the negative ones."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated already."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens, times how often each was generated already."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens, by their ids."""
    seed: int | None = None
    """Start of the random numbers; None draws one."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
        }
        for name, (fine, expected) in checks.items():
            if not fine:
                raise UserError.of("P604", f"{name} must be {expected}, not {getattr(self, name)}")


class Sampler:
    """Draws tokens; the same options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    def sample(
        self, logits: F32, seen: I64, *, prompt: int | None = None, bias: Bias | None = None
    ) -> int:
        """Return a token id for ``logits`` [vocab]; ``seen`` holds the ids so far, those of the
        prompt first, which are ``prompt``, by default all; ``bias`` [vocab] is added, and is minus
        infinity for tokens that must not come."""
        options = self._options
        scores = logits.astype(np.float64)
        if options.repetition_penalty != 1.0 and len(seen):
            ids = np.unique(seen)
            penalty = options.repetition_penalty
            scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)
        own = seen[len(seen) if prompt is None else prompt :]
        if len(own) and (options.presence_penalty or options.frequency_penalty):
            ids, counts = np.unique(own, return_counts=True)
            scores[ids] -= options.presence_penalty + options.frequency_penalty * counts
        for token, value in options.logit_bias.items():
            scores[token] += value
        if bias is not None:
            scores += bias[: len(scores)]
        if options.temperature == 0.0:
            return int(np.argmax(scores))
        scores /= options.temperature
        probabilities = np.exp(scores - scores.max())
        order = np.argsort(-probabilities, kind="stable")
        ranked = probabilities[order] / probabilities.sum()
        if options.top_k:
            ranked = ranked[: options.top_k] / ranked[: options.top_k].sum()
        if options.top_p < 1.0:
            before = np.cumsum(ranked) - ranked
            ranked = ranked[before < options.top_p]
        if options.min_p > 0.0:
            ranked = ranked[ranked >= options.min_p * ranked[0]]
        ranked = ranked / ranked.sum()
        drawn = int(np.searchsorted(np.cumsum(ranked), self._random.random(), side="right"))
        return int(order[min(drawn, len(ranked) - 1)])
