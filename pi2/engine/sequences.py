"""Sequences under way, and who takes their tokens through the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from pi2.arrays import F32, I32
from pi2.diagnostics import UserError
from pi2.memory.lending import ContextLoan


class Sequences(ABC):
    """Holds the position in every sequence; what derives from it computes."""

    def __init__(
        self,
        *,
        context: int,
        sequences: int,
        loan: ContextLoan | None = None,
        has_states: bool = False,
    ) -> None:
        """``context``: tokens of each of the ``sequences`` that there is room for; ``loan``: memory
        of the contexts that is lent while it is not used; ``has_states``: whether layers keep
        states, which a step that failed has taken further than the sequence's tokens."""
        self._context = context
        self._loan = loan
        self.positions = [0] * sequences
        """Tokens of each sequence whose keys and values are kept."""
        self._touched = [0] * sequences
        """Most tokens that each has had since all of them were empty."""
        self._has_states = has_states
        self._interrupted: set[int] = set()
        """Sequences whose states some layers have taken further than others."""

    @property
    def position(self) -> int:
        """Tokens of the first sequence whose keys and values are kept."""
        return self.positions[0]

    def reset(self, sequence: int = 0) -> None:
        """Begin a new sequence in the place of another."""
        self.abandon()
        self.positions[sequence] = 0
        self._interrupted.discard(sequence)
        if self._loan is not None and not any(self.positions):
            self._touched = [0] * len(self.positions)
            self._loan.begin()

    def go_on_from(self, sequence: int, position: int) -> None:
        """Let a sequence go on after its first ``position`` tokens, whose keys and values somebody
        has put there, or left."""
        if position == 0:
            self.reset(sequence)
            return
        self.abandon()
        self.positions[sequence] = 0
        self._interrupted.discard(sequence)
        self._check_room(sequence, position)
        self.positions[sequence] = position

    def reset_all(self) -> None:
        """Begin all sequences anew."""
        for sequence in range(len(self.positions)):
            self.reset(sequence)

    @abstractmethod
    def abandon(self) -> None:
        """Forget what was begun and has not ended."""

    @abstractmethod
    def prefill(
        self,
        tokens: I32,
        *,
        all_logits: bool = False,
        take: Callable[[F32], None] | None = None,
        progress: Callable[[float], None] = lambda share: None,
        end: int = 0,
        sequence: int = 0,
    ) -> F32:
        """Process ``tokens`` [n], n >= 1, densely in chunks; ``progress`` is told the share done.

        ``end``: tokens of the whole prompt, where ``tokens`` are a part of it.  ``take`` is given
        the logits after all of them, a few rows at a time, valid during the call.

        Returns the logits after the last one, [1, vocab], or of all, [n, vocab], as a copy.
        """

    def decode(self, token: int) -> F32:
        """Process one token of the first sequence with the plan's predictor.

        Returns its logits [vocab], valid until the next call.
        """
        logits: F32 = self.step([token], [0])[0]
        return logits

    @abstractmethod
    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        """Process ``tokens``, the next ones of ``sequences``, with the plan's predictor.

        A sequence that comes several times in a row has several tokens, each of which sees those
        before it.  Returns their logits [n, vocab], valid until the next call.
        """

    @property
    def copies(self) -> bool:
        """Whether what a sequence has can be copied to another one."""
        return False

    def copy(self, source: int, target: int) -> None:
        """Let a sequence go on where another one is."""
        raise AssertionError("nothing can be copied")

    def mark(self, sequence: int) -> None:
        """Let steps of a sequence that follow be taken back."""
        assert self.positions[sequence] > 0, "a prompt cannot be taken back"

    def take_back(self, sequence: int, position: int) -> None:
        """Forget the tokens of a sequence from ``position`` on, which steps have brought since
        `mark`."""
        self.positions[sequence] = position

    def _find_positions(self, sequences: Sequence[int]) -> list[int]:
        """Where the tokens of a step stand."""
        following: dict[int, int] = {}
        found = []
        for sequence in sequences:
            position = following.get(sequence, self.positions[sequence])
            found.append(position)
            following[sequence] = position + 1
        return found

    def _interrupt(self, sequences: Sequence[int]) -> None:
        """Give up what is under way in ``sequences``; states cannot be taken back."""
        if self._has_states:
            self._interrupted.update(sequences)
        self.abandon()

    def _check_room(self, sequence: int, count: int) -> None:
        """UserError P602 if a sequence has no room for ``count`` tokens more, P616 if it was
        interrupted and cannot go on."""
        if sequence in self._interrupted:
            raise UserError.of(
                "P616",
                "this sequence was interrupted, and its layers' states are of different tokens",
                help="begin it anew",
            )
        end = self.positions[sequence] + count
        if end > self._context:
            raise UserError.of(
                "P602",
                f"the sequence needs more than the {self._context} tokens of kv.context",
                help="raise kv.context and memory.segments.kv, or shorten the prompt",
            )
        if self._loan is not None:
            self._touched[sequence] = max(self._touched[sequence], end)
            self._loan.claim(sum(self._touched))


def tell_share(
    progress: Callable[[float], None], before: int, count: int, total: int, share: float
) -> None:
    """Report the share of ``total`` tokens that is done, with ``share`` of these ``count``."""
    progress((before + count * share) / total)


def read_rows(
    read: Callable[[int], F32], count: int, all_rows: bool, take: Callable[[F32], None] | None
) -> list[F32]:
    """Copies of the rows that ``read`` gives of a chunk's ``count`` tokens, some from a first one
    on: of all, or of the last; ``take`` is given all of them."""
    parts, first = [], 0 if all_rows or take is not None else count - 1
    while first < count:
        rows = read(first)
        first += len(rows)
        if take is not None:
            take(rows)
        if all_rows or first == count:
            parts.append((rows if all_rows else rows[-1:]).copy())
    return parts
