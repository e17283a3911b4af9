"""Sequences through a model: prompts in pieces, then steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.blocks.contract import CONTEXT_BLOCK, Ring
from pi2.diagnostics import UserError
from pi2.plan.weights.layout import round_up

if TYPE_CHECKING:
    from pi2.backends.units import SequenceModel
    from pi2.memory.arena import ContextLoan


COPIED_TOKENS = 16 * CONTEXT_BLOCK
"""Tokens of the KV cache that are copied at once."""


@dataclass(slots=True)
class _Mark:
    position: int
    state: F32
    """Copy of the states of its layers."""
    tokens: list[int] = field(default_factory=list)
    """Tokens read since."""


@dataclass(frozen=True, slots=True)
class KeptContext:
    """A sequence's KV cache and states, apart from the model that made them."""

    position: int
    blocks: Iterable[U8]
    state: F32 | None
    earliest: int
    """See `Sequences.earliest`."""


class Sequences:
    """Holds the position in every sequence of a model, and gives it their tokens."""

    def __init__(
        self,
        model: SequenceModel,
        *,
        context: int,
        sequences: int = 1,
        piece: int,
        loan: ContextLoan | None = None,
        has_states: bool = False,
    ) -> None:
        """``context``: tokens of each sequence; ``piece``: tokens of a prompt that are run
        together; ``loan``: context memory that is lent while it is unused; ``has_states``: whether
        layers keep states, which a failed step has changed."""
        self.model = model
        self.program = model.program
        """Keeps the contexts of sequences and shows what the head reads; None if a unit keeps
        everything to itself."""
        self.ring: Ring | None = None if self.program is None else self.program.ring
        """What layers with a window keep; None if all layers keep the whole context."""
        self._context = context
        self._piece = piece
        self._loan = loan
        self.positions = [0] * sequences
        """Tokens of each sequence that are in the KV cache."""
        self.earliest = [0] * sequences
        """Earliest position from which each may go on: windows may lack what earlier tokens see."""
        self._touched = [0] * sequences
        """Most tokens that each has had since all of them were empty."""
        self._has_states = has_states
        self._marks: dict[int, _Mark] = {}
        """Positions to which sequences with states may be taken back."""
        self._interrupted: set[int] = set()
        """Sequences whose states some layers have taken further than others."""
        self.watch: Callable[[int, int, I32, F32], None] | None = None
        """Called with sequence, first position, tokens that went through the layers, and what the
        head reads of them [n, hidden].  Needs a `program`."""
        self.given: F32 | None = None
        """Of an MTP head, what the main model's head reads of the next tokens [n, hidden]."""
        self.attended_tokens = 0
        """Sum over all tokens of steps: the tokens that each attended to."""
        self.steps = 0

    def reset(self, sequence: int = 0) -> None:
        """Begin a new sequence in the place of another."""
        self.go_on_from(sequence, 0)

    def go_on_from(self, sequence: int, position: int) -> None:
        """Continue a sequence after its first ``position`` tokens, which its KV cache has."""
        self.model.abandon()
        self.positions[sequence] = 0
        self._marks.pop(sequence, None)
        self._interrupted.discard(sequence)
        if position:
            self._check_room(sequence, position)
            self.positions[sequence] = position
            return
        self.earliest[sequence] = 0
        if self._loan is not None and not any(self.positions):
            self._touched = [0] * len(self.positions)
            self._loan.begin()

    def reset_all(self) -> None:
        for sequence in range(len(self.positions)):
            self.reset(sequence)

    def read_inputs(self, count: int) -> F32:
        """What the head reads of the ``count`` tokens of the last piece or step [count, hidden]."""
        return np.concatenate(read_rows(self.model.read_head_input, count, True, None))

    def _join(self, count: int) -> None:
        """Join embeddings of ``count`` tokens with what an MTP head is given."""
        if self.given is not None:
            self.model.join(self.given[:count])
            self.given = self.given[count:]

    def _show_step(self, sequences: Sequence[int], positions: Sequence[int], tokens: I32) -> None:
        assert self.watch is not None
        inputs = self.read_inputs(len(tokens))
        for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
            self.watch(sequence, position, tokens[row : row + 1], inputs[row : row + 1])

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
        """Process ``tokens`` [n] densely in chunks of a prompt of ``end`` tokens; ``take`` gets
        logits a few rows at a time. Returns the last logits [1, vocab], or all [n, vocab],
        copied."""
        read = self.model.logits
        return self._run_prompt(tokens, read, all_logits, take, progress, end, sequence)

    def read_hidden(self, tokens: I32, *, end: int = 0, sequence: int = 0) -> F32:
        """Process ``tokens`` as `prefill` does; the head's inputs [tokens, hidden], zero-padded."""
        read = self.model.read_head_input
        return self._run_prompt(tokens, read, True, None, lambda share: None, end, sequence)

    def _run_prompt(
        self,
        tokens: I32,
        read: Callable[[int], F32],
        all_rows: bool,
        take: Callable[[F32], None] | None,
        progress: Callable[[float], None],
        end: int,
        sequence: int,
    ) -> F32:
        """What ``read`` gives of a piece's tokens from a first one on: of all, or of the last."""
        parts: list[F32] = []
        self.model.expect(max(end, self.positions[sequence] + len(tokens)))
        for start in range(0, len(tokens), self._piece):
            piece = tokens[start : start + self._piece]
            self._check_room(sequence, len(piece))

            def tell(share: float, start: int = start, count: int = len(piece)) -> None:
                progress((start + share * count) / len(tokens))

            self._run_piece(piece, sequence, tell)
            if all_rows or take is not None or start + len(piece) == len(tokens):
                parts += read_rows(read, len(piece), all_rows, take)
        return np.concatenate(parts if all_rows else parts[-1:])

    def _run_piece(self, tokens: I32, sequence: int, progress: Callable[[float], None]) -> None:
        """Compute the next ``tokens`` [n] of a sequence with all neurons."""
        position = self.positions[sequence]
        try:
            self._join(len(tokens))
            self.model.prefill(tokens, sequence, position, progress)
            if self.watch is not None:
                self.watch(sequence, position, tokens, self.read_inputs(len(tokens)))
        except BaseException:
            self._interrupt([sequence])
            raise
        self.positions[sequence] += len(tokens)
        progress(1.0)

    def decode(self, token: int) -> F32:
        """Process one token of the first sequence; logits [vocab], valid until the next call."""
        logits: F32 = self.step([token], [0])[0]
        return logits

    def step(self, tokens: Sequence[int], sequences: Sequence[int]) -> F32:
        """Process ``tokens`` of ``sequences``, a repeated sequence having several; logits [n,
        vocab], valid until the next call."""
        for sequence in set(sequences):
            self._check_room(sequence, sequences.count(sequence))
        return self._step(np.array(tokens, np.int32), sequences)

    def _step(self, tokens: I32, sequences: Sequence[int]) -> F32:
        positions = self._find_positions(sequences)
        self.model.expect(max(positions) + 1)
        try:
            if self.given is not None:
                self._join(len(tokens))
            logits = self.model.step(tokens, sequences, positions)
            if self.watch is not None:
                self._show_step(sequences, positions, tokens)
        except BaseException:
            self._interrupt(sequences)
            raise
        self._note_step(tokens, sequences, positions)
        return logits

    def copy(self, source: int, target: int) -> None:
        """Let a sequence go on where another stands, with a copy of its KV cache and states."""
        self.put_context(target, self._read_context(source))

    def _read_context(self, sequence: int) -> KeptContext:
        """The context of a sequence, its blocks read one by one as they are taken."""
        keeper, position, state = self.program, self.positions[sequence], None
        assert keeper is not None, "nothing can be copied"
        read, whole = keeper.read_context, round_up(position, CONTEXT_BLOCK)
        blocks = (
            read(sequence, first, min(whole, first + COPIED_TOKENS))
            for first in range(0, whole, COPIED_TOKENS)
        )
        if self._has_states:
            state = keeper.read_state(sequence)
        return KeptContext(position, blocks, state, self.earliest[sequence])

    def take_context(self, sequence: int) -> KeptContext:
        found = self._read_context(sequence)
        state = None if found.state is None else found.state.copy()
        return replace(found, blocks=[block.copy() for block in found.blocks], state=state)

    def put_context(self, sequence: int, kept: KeptContext) -> None:
        """Let a sequence go on where `take_context` was called."""
        keeper = self.program
        assert keeper is not None, "nothing can be copied"
        self.go_on_from(sequence, kept.position)
        self.earliest[sequence] = max(kept.earliest, self.earliest[sequence])
        whole = round_up(kept.position, CONTEXT_BLOCK)
        for first, block in zip(range(0, whole, COPIED_TOKENS), kept.blocks, strict=True):
            keeper.put_context(sequence, first, min(whole, first + COPIED_TOKENS), block)
        if kept.state is not None and kept.position:
            keeper.put_state(sequence, kept.state)

    def mark(self, sequence: int) -> None:
        """Let steps of a sequence that follow be taken back."""
        assert self.positions[sequence] > 0, "a prompt cannot be taken back"
        if self._has_states:
            assert self.program is not None, "states cannot be taken back"
            state = self.program.read_state(sequence)
            self._marks[sequence] = _Mark(self.positions[sequence], state)

    def take_back(self, sequence: int, position: int) -> None:
        """Forget the tokens of a sequence from ``position`` on, which came since `mark`; states go
        on from the mark once more."""
        if position == self.positions[sequence]:
            return
        self.positions[sequence] = position
        if not self._has_states:
            return
        assert self.program is not None
        mark = self._marks[sequence]
        self.program.put_state(sequence, mark.state)
        self.positions[sequence] = mark.position
        kept, mark.tokens = mark.tokens[: position - mark.position], []
        if kept:
            self._step(np.array(kept, np.int32), [sequence] * len(kept))

    def _note_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Take notice that tokens have been read, which stand at ``positions``."""
        self.steps += 1
        self.attended_tokens += sum(positions) + len(positions)
        for token, sequence in zip(tokens.tolist(), sequences, strict=True):
            self.positions[sequence] += 1
            if sequence in self._marks:
                self._marks[sequence].tokens.append(token)

    def _find_positions(self, sequences: Sequence[int]) -> list[int]:
        if len(sequences) == 1:
            return [self.positions[sequences[0]]]
        following: dict[int, int] = {}
        found = []
        for sequence in sequences:
            position = following.get(sequence, self.positions[sequence])
            found.append(position)
            following[sequence] = position + 1
        return found

    def _interrupt(self, sequences: Sequence[int]) -> None:
        """Give up the work under way in ``sequences``; states cannot be taken back."""
        if self._has_states:
            self._interrupted.update(sequences)
        self.model.abandon()

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
        if self.ring is not None:
            self.earliest[sequence] = max(self.earliest[sequence], end - self.ring.slack)
        if self._loan is not None:
            self._touched[sequence] = max(self._touched[sequence], end)
            self._loan.claim(sum(self._touched))


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
