"""How the next token is drawn from logits, and when an answer only repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pi2.arrays import F32, I64
from pi2.diagnostics import UserError

Bias = NDArray[np.float32]
"""Added to logits [vocab]."""
_MOST_LOG = 88.72
"""Natural logarithm of the largest penalty of DRY: llama.cpp's have single precision."""
_MOST_PERIOD, _TIMES, _LEAST_TOKENS = 64, 8, 160


class Repeats:
    """Finds an answer that has repeated at most 64 tokens eight times, for 160 tokens or more."""

    def __init__(self) -> None:
        self._equal = np.zeros(_MOST_PERIOD, np.int64)
        """Last tokens, by period, each of which equals the token a period before."""
        self._needed = np.arange(1, _MOST_PERIOD + 1)
        self._needed = np.maximum(_TIMES * self._needed, _LEAST_TOKENS) - self._needed

    def note(self, ids: I64) -> bool:
        """Take notice of the last of ``ids`` [n]; whether they only repeat."""
        before = ids[-1 - _MOST_PERIOD : -1][::-1]
        is_equal = np.zeros(_MOST_PERIOD, bool)
        is_equal[: len(before)] = before == ids[-1]
        self._equal = np.where(is_equal, self._equal + 1, 0)
        return bool((self._equal >= self._needed).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is drawn; `pi2.plan.documents.common.Sampling` says it of each key."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    end_repeats: bool | None = None
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
            "penalty_window": (self.penalty_window >= -1, "-1 or more"),
            "dry_multiplier": (self.dry_multiplier >= 0, "0 or more"),
            "dry_base": (self.dry_base >= 1, "1 or more"),
            "dry_allowed_length": (self.dry_allowed_length >= 1, "1 or more"),
            "dry_penalty_last_n": (self.dry_penalty_last_n >= -1, "-1 or more"),
            "seed": (self.seed is None or self.seed >= 0, "0 or more"),
        }
        for name, (fine, expected) in checks.items():
            if not fine:
                raise UserError.of("P604", f"{name} must be {expected}, not {getattr(self, name)}")


class Sampler:
    """Draws tokens; the same options and logits give the same tokens."""

    def __init__(
        self, options: SamplingOptions, read_token: Callable[[int], str] = lambda token: ""
    ) -> None:
        """``read_token``: the text of a token, for sequence breakers."""
        self._options = options
        self._breaks = lru_cache(None)(
            lambda token: any(text in read_token(token) for text in options.dry_sequence_breakers)
        )
        has_dry = bool(options.dry_multiplier and options.dry_penalty_last_n)
        has_penalties = options.penalty_window != 0 and (
            options.repetition_penalty != 1.0
            or bool(options.presence_penalty or options.frequency_penalty)
        )
        self._takes_best = not (
            options.temperature or has_penalties or has_dry or options.logit_bias
        )

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self._options.seed)

    def sample(
        self, logits: F32, seen: I64, *, prompt: int | None = None, bias: Bias | None = None
    ) -> int:
        """A token id for ``logits`` [vocab]; ``seen`` begins with ``prompt`` ids; ``bias`` [vocab]
        may be minus infinity."""
        options = self._options
        if self._takes_best and bias is None:
            return int(logits.argmax())
        scores = logits.astype(np.float64)
        first = max(0, len(seen) - options.penalty_window) if options.penalty_window >= 0 else 0
        own = seen[max(first, len(seen) if prompt is None else prompt) :]
        if options.dry_multiplier:
            self._subtract_dry(scores, seen)
        seen = seen[first:]
        if options.repetition_penalty != 1.0 and len(seen):
            # An id that is seen twice gets the same score twice.  np.unique would import numpy.ma,
            # which is never freed: 1 MB.
            penalty, found = options.repetition_penalty, scores[seen]
            scores[seen] = np.where(found > 0, found / penalty, found * penalty)
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
        if 0 < (count := options.top_k) < len(scores):
            # A few are found in a tenth of the time in which all are sorted.
            kept = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
            order = kept[np.argsort(-scores[kept], kind="stable")][:count]
        else:
            order = np.argsort(-scores, kind="stable")
        ranked = np.exp(scores[order] - scores[order[0]])
        ranked /= ranked.sum()
        if options.top_p < 1.0:
            before = np.cumsum(ranked) - ranked
            ranked = ranked[before < options.top_p]
        if options.min_p > 0.0:
            ranked = ranked[ranked >= options.min_p * ranked[0]]
        ranked = ranked / ranked.sum()
        drawn = int(np.searchsorted(np.cumsum(ranked), self._random.random(), side="right"))
        return int(order[min(drawn, len(ranked) - 1)])

    def _subtract_dry(self, scores: NDArray[np.float64], seen: I64) -> None:
        """Lower tokens that continue the longest sequences that ``seen`` ends with for a second
        time, as llama.cpp does."""
        options = self._options
        window = options.dry_penalty_last_n
        seen = seen[max(0, len(seen) - window) :] if window >= 0 else seen
        longest = next(
            (n for n, token in enumerate(reversed(seen.tolist())) if self._breaks(token)), len(seen)
        )
        if longest < options.dry_allowed_length:
            return
        # ``ends``: places of the last token's other occurrences, whose sequences are compared.
        ends = np.flatnonzero(seen[:-1] == seen[-1])
        lengths = np.ones(len(ends), np.int64)
        going = np.arange(len(ends))
        while len(going) and (length := int(lengths[going[0]])) < longest:
            going = going[ends[going] >= length]
            going = going[seen[ends[going] - length] == seen[-1 - length]]
            lengths[going] += 1
        powers: dict[int, int] = {}
        for token, length in zip(seen[ends + 1].tolist(), lengths.tolist(), strict=True):
            if length >= options.dry_allowed_length:
                powers[token] = max(powers.get(token, 0), length - options.dry_allowed_length)
        most = _MOST_LOG / max(np.log(options.dry_base), 1e-9)
        for token, power in powers.items():
            scores[token] -= options.dry_multiplier * options.dry_base ** min(power, most)
