"""What is timed: prompts and answers of fixed lengths, and the tokens they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pi2.arrays import I32

Kind = Literal["pp", "tg"]
"""``pp``: a prompt is processed; ``tg``: tokens are generated one by one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One test, as in llama-bench: ``pp512``, ``tg64``, ``tg64 @ d512``."""

    kind: Kind
    tokens: int
    """Tokens that are timed."""
    depth: int
    """Tokens that are in the KV cache before the clock starts."""
    sequences: int | None = None
    """Sequences that generate at the same time; None: as many as the plan says."""

    @property
    def name(self) -> str:
        """Name of the workload in tables."""
        times = "" if self.sequences is None else f" x {self.sequences}"
        behind = f" @ d{self.depth}" if self.depth else ""
        return f"{self.kind}{self.tokens}{times}{behind}"

    @property
    def mean_position(self) -> float:
        """Tokens in the KV cache while one is computed, on average."""
        return self.depth + (self.tokens + 1) / 2


def list_workloads(
    prompts: Sequence[int],
    answers: Sequence[int],
    depths: Sequence[int],
    sequences: Sequence[int | None] = (None,),
) -> list[Workload]:
    """All prompts at all depths, then all answers at all depths, each for all numbers of
    ``sequences``; lengths of 0 are left out."""
    return [
        *(Workload("pp", length, depth) for depth in depths for length in prompts if length),
        *(
            Workload("tg", length, depth, count)
            for depth in depths
            for length in answers
            if length
            for count in sequences
        ),
    ]


class TokenSource:
    """Tokens without end: the same for every program that is given the same list.

    Walks through the vocabulary, or through a text.  Repetitions go on where the last one
    stopped: a run that saw the same tokens again would find their neurons in the cache.
    """

    def __init__(self, tokens: I32) -> None:
        assert len(tokens) > 0
        self._tokens = tokens
        self._place = 0

    @classmethod
    def walk_vocabulary(cls, vocab: int, without: Sequence[int] = ()) -> TokenSource:
        """Every token of the vocabulary in order, but for some; not from the beginning, where
        bytes and marks are."""
        tokens = np.setdiff1d(np.arange(vocab, dtype=np.int32), np.array(without, np.int32))
        return cls(np.roll(tokens, -min(1000, len(tokens) // 4)))

    def take(self, count: int) -> I32:
        """The next ``count`` tokens, int32 [count]."""
        places = (self._place + np.arange(count)) % len(self._tokens)
        self._place = (self._place + count) % len(self._tokens)
        return self._tokens[places]
