"""A model whose weights stay as they lie in a file: `BlockModel`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.blocks.code import Program
from pi2.backends.blocks.contract import Ring
from pi2.backends.blocks.instructions import FindWeight
from pi2.backends.blocks.interpreter import Interpret
from pi2.backends.blocks.layers import count_program, start_layers
from pi2.backends.blocks.operands import Area, Extent, Matrix
from pi2.backends.blocks.room import Allocate, Memory
from pi2.backends.blocks.routed import PairTables, RoutedLayer, list_routed, view_floats
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model

PANEL_ROWS = 16
"""Streamed pieces have whole multiples of so many rows, a panel's on any processor."""
NoteKernel = Callable[[str, int | None, float, float], None]
"""Takes a kernel's name, its layer if it has one, and when it began and ended."""


class BlockModel:
    """Computes chunks of a sequence (`prefill`, then `logits`) and steps of ``step_tokens`` at most
    (`step`), each the next one of one of ``sequences``.  One calling thread.

    ``find(key, layer)`` gives tensors: vectors with their bytes, and matrices without, if they are
    streamed: `set_tensor` then says where they are before `run` computes instructions that read
    them."""

    def __init__(
        self,
        model: Model,
        find: FindWeight,
        extent: Extent,
        *,
        allocate: Allocate,
        interpret: Interpret,
    ) -> None:
        self._model, self.extent = model, extent
        matrices = count_program(model, find, extent).matrices
        formats = sorted({own.weight.format for own in matrices})
        self.interpreter = interpret(model, formats, extent.kv)
        self._lanes = self.interpreter.lanes
        self.memory = memory = Memory(allocate)
        """The program's arrays."""
        self.layers = layers = start_layers(model, find, self.interpreter, memory, extent)
        self._builder = builder = layers.builder
        self._cache, self._states = builder.cache, layers.memory
        self.scratch = layers.add_model()
        """What threads write to and forget."""
        self.looked_up = layers.looked_up
        """The first instruction after rows of the call's tokens are looked up."""
        self.exchange = None if layers.outside is None else layers.outside.exchange
        """What the program shares with neurons that are computed elsewhere."""
        self.head = layers.head
        """The first instruction of the head."""
        self._program = Program(
            builder.instructions, self.head, extent.planes, keeps_bits=extent.outside
        )
        self.matrices: list[Matrix] = builder.matrices
        self._firsts = {matrix.instructions[0]: matrix for matrix in self.matrices}
        groups = [n for n, own in enumerate(builder.instructions) if own.kernel == "group"]
        self.routed = list_routed(self.matrices, groups, layers.predictions)
        """Layers with experts."""
        self.pairs: PairTables | None = None
        """Order in which their experts are computed, if the caller runs them in parts."""
        if builder.routed is not None:
            self.pairs = PairTables(self._program, builder.routed, extent.tokens, self.run)
        self._chunk = extent.chunk
        self.most_threads = extent.threads
        """1: only the caller computes, which wakes no thread: quicker if it will wait anyway."""
        self._count = 0
        self._given: dict[int, U8] = {}
        self._note: NoteKernel | None = None
        self._watch: Callable[[int], None] | None = None
        logits = layers.logits
        found = view_floats(logits.address, extent.rows, logits.stride)
        self._logits = found[:, : model.shape.vocab]
        self.u, self.x = layers.u, layers.x
        """What operators and the head read, and the residual stream."""
        self._hidden = view_floats(layers.u.address, extent.tokens, layers.u.stride)

    def step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> F32:
        """Return logits [T, vocab] of ``tokens`` [T], each the next one of its sequence or of
        those before it; valid until the next call."""
        self.begin_step(tokens, sequences, positions)
        self.run(0, self.end)
        return self.read_logits()

    def prefill(self, tokens: I32, sequence: int, position: int) -> None:
        """Compute a chunk of a sequence, the first token of which stands at ``position``."""
        self.begin_chunk(tokens, sequence, position)
        self.run(0, self.head)

    @property
    def end(self) -> int:
        return len(self._program.instructions)

    def read_values(self, number: int, *names: str) -> tuple[int, ...]:
        return tuple(self._program.read_value(number, name) for name in names)

    def view_scores(self, own: RoutedLayer) -> F32:
        """Return the scores [T, experts] by which the router of a layer has chosen, until the next
        layer's is computed."""
        before = self._program.instructions[: own.chosen]
        number = max(n for n, instruction in enumerate(before) if instruction.kernel == "route")
        names = ("scores", "scores_stride", "experts")
        address, stride, experts = self.read_values(number, *names)
        found: F32 = view_floats(address, self._count, stride)[:, :experts]
        return found

    def take_rows(self, number: int, first: int, end: int) -> None:
        """Let an instruction of the call compute rows ``first`` to ``end`` of its matrix, and
        perhaps a few before them."""
        self._program.set_rows(number, first // self._lanes * self._lanes, end)

    def take_area(self, name: str, width: int) -> Area:
        return self._builder.take_area(name, width)

    def run_rows(self, number: int, first: int, end: int, address: int) -> None:
        """Compute rows ``first`` to ``end`` of a matrix, all of a part in several; row 0 would be
        at ``address``."""
        matrix = self.find_matrix(number)
        count, weight = len(matrix.instructions), matrix.weight
        if count == 1:
            self._program.set_value(number, "weights", address)
            self._program.set_rows(number, first, end)
            self.run(number, number + 1)
            return
        rows = weight.rows // count
        parts = range(first // rows, end // rows)
        for part in parts:
            place = address + part * rows * weight.row_bytes
            self._program.set_value(number + part, "weights", place)
        self.run(number + parts.start, number + parts.stop)

    def list_rows(self, number: int) -> I32:
        """Return the rows that the call's tokens look up in matrix ``number``."""
        matrix = self.matrices[number]
        assert matrix.numbers is not None
        return matrix.numbers[: self._count * matrix.each]

    def put_rows(self, number: int, rows: U8) -> None:
        """Give the rows [n, bytes] of `list_rows`."""
        self._given[number] = rows  # compiled code reads it until the step ends
        self.set_tensor(number, rows.ctypes.data)
        self.list_rows(number)[:] = np.arange(len(rows))

    def find_matrix(self, number: int) -> Matrix:
        """Return the matrix whose first instruction is ``number``."""
        return self._firsts[number]

    def choose_logits(self, first: int) -> None:
        """Let the head compute the chunk's tokens from ``first`` on, `LOGIT_ROWS` at most."""
        self.set_logits(first, min(self._count - first, LOGIT_ROWS))

    def logits(self, first: int) -> F32:
        """Return logits [n, vocab] of the last chunk's tokens from ``first`` on, n at most
        `LOGIT_ROWS`; valid until the next call."""
        self.choose_logits(first)
        self.run(self.head, self.end)
        return self.read_logits()

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        """Write the inputs of a step; logits are those after every token."""
        self._begin(tokens, sequences, positions, is_chunk=False)
        self.set_logits(0, len(tokens))

    def _begin(
        self, tokens: I32, sequences: Sequence[int], positions: Sequence[int], *, is_chunk: bool
    ) -> None:
        count = self._count = len(tokens)
        builder = self._builder
        builder.numbers[:count] = builder.listed[:count] = tokens
        builder.sequences[:count] = sequences
        builder.positions[:count] = positions
        model = self._model
        if model.positions is not None:
            builder.places[:count] = builder.positions[:count] + model.positions.offset
        if self.exchange is not None:
            # Rows of the layers' embeddings come with the call.
            builder.known_numbers[:count] = np.arange(count)
        elif model.layer_embedding is not None:
            known = model.layer_embedding.vocab or model.shape.vocab
            builder.known_numbers[:count] = np.where(tokens < known, tokens, 0)
        if self.layers.ngrams is not None:
            own = (builder.numbers, builder.sequences, builder.positions)
            self.layers.ngrams.number_rows(*(part[:count] for part in own))
        self._program.set_tokens(count, is_chunk=is_chunk)
        if self.pairs is not None:
            self.pairs.begin(count)

    def begin_chunk(self, tokens: I32, sequence: int, position: int) -> None:
        """Write the inputs of a chunk; its logits follow the last token."""
        count = len(tokens)
        assert count <= self._chunk, f"a chunk has at most {self._chunk} tokens, not {count}"
        places = list(range(position, position + count))
        self._begin(tokens, [sequence] * count, places, is_chunk=True)
        self.set_logits(count - 1, 1)

    def begin_piece(self, tokens: I32) -> None:
        """Write the inputs of a chunk, which may be a single token; `place` says the rest."""
        count = len(tokens)
        self._begin(tokens, [0] * count, [0] * count, is_chunk=count > 1)

    def place(self, sequence: int, position: int) -> None:
        """Say where the call's tokens stand, the first of them at ``position``."""
        builder, count, model = self._builder, self._count, self._model
        builder.sequences[:count] = sequence
        builder.positions[:count] = np.arange(position, position + count)
        if model.positions is not None:
            builder.places[:count] = builder.positions[:count] + model.positions.offset

    def set_logits(self, first: int, count: int) -> None:
        """Let the head compute ``count`` tokens from ``first`` on."""
        x = self.layers.x
        self._program.set_value(self.head, "x", x.address + 4 * first * x.stride)
        self._program.set_head_tokens(count)
        self._rows = count

    def read_logits(self) -> F32:
        """Return what the head gave last [n, vocab]."""
        return self._logits[: self._rows]

    def read_head_input(self, first: int, width: int | None = None) -> F32:
        """Return what the head reads of the chunk's tokens from ``first`` on [n, hidden], n at
        most `LOGIT_ROWS`, or ``width`` elements; valid until the next call."""
        self.choose_logits(first)
        self.run(self.head, self.head + 1)
        return self._hidden[: self._rows, : width or self._model.shape.hidden]

    def join(self, given: F32) -> None:
        """Join the embeddings of the call's tokens with ``given`` [T, hidden], what the head of an
        MTP head's main model reads."""
        hidden = self._model.shape.hidden
        area = self._builder.take_area("stream", hidden)
        view_floats(area.address, len(given), area.stride)[:, :hidden] = given

    def run(self, begin: int, end: int) -> None:
        if self._note is None and self._watch is None:
            self.interpreter.run(self._program.address, begin, end, self.most_threads)
            return
        for number in range(begin, end):
            own = self._program.instructions[number]
            start_s = time.perf_counter()
            self.interpreter.run(self._program.address, number, number + 1, self.most_threads)
            if self._note is not None:
                self._note(own.label, own.layer, start_s, time.perf_counter())
            if self._watch is not None:
                self._watch(number)

    def set_tensor(self, number: int, address: int) -> None:
        """Say where the bytes of matrix ``number`` are from now on."""
        matrix = self.matrices[number]
        part = matrix.weight.size_bytes // len(matrix.instructions)
        for place, instruction in enumerate(matrix.instructions):
            own = address + place * part + matrix.skip
            self._program.set_value(instruction, "weights", own)

    def place_experts(self, number: int, address: int, places: I32, unit: int) -> None:
        """Say where experts of matrix ``number`` are from now on: ``places`` [experts], which the
        caller changes, counts them in ``unit`` bytes from ``address`` on."""
        own = {"weights": address, "place_of": places.ctypes.data, "expert_bytes": unit}
        for instruction in self.matrices[number].instructions:
            for name, value in own.items():
                self._program.set_value(instruction, name, value)

    def expect(self, end: int) -> None:
        """Tell that the calls that follow bring a sequence to ``end`` tokens at most."""
        for tables in self._builder.ropes:
            tables.expect(end)

    def observe(self, note: NoteKernel | None) -> None:
        """Call ``note`` after every instruction, each then a call of its own; None ends it."""
        self._note = note

    def watch(self, see: Callable[[int], None] | None) -> None:
        """Call ``see`` with every instruction that has run, each in a call of its own; None ends
        it."""
        self._watch = see

    @property
    def choices(self) -> Mapping[int, int]:
        """The layer of each instruction that chooses the experts of `pairs`."""
        routed = self._builder.routed
        return {
            number: own.layer
            for number, own in enumerate(self._program.instructions)
            if own.kernel == "route" and own.layer is not None
            if routed is not None and own.values["chosen"] == routed.expert_of
        }

    def read_code(self, number: int) -> tuple[int, int, int, int]:
        """Return kernel and address of the arguments of an instruction, and its items."""
        kernel, arguments, end, *_, first, _ = self._program.code[number].tolist()
        return kernel, arguments, first, end

    @property
    def ring(self) -> Ring | None:
        """What layers with a window keep of a sequence; None if all keep the whole context.

        To go on from an earlier token, all positions of its window must be there.  `read_context`
        copies places: pieces that are put back in order leave the last positions."""
        return self._cache.ring

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        """Return a copy [n] of the KV cache of a sequence's tokens from ``first`` to ``end``,
        multiples of `CONTEXT_BLOCK`."""
        return self._cache.read(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        """Put back what `read_context` gave for these tokens, of this sequence or another one."""
        self._cache.put(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        """Return a copy [n] of all states of a sequence; empty for a model without states.

        The KV cache of a position stays as it is when later ones come; a state is that after the
        last token. A sequence that begins at position 0 begins with an empty state."""
        return self._states.read(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        self._states.put(sequence, state)

    def close(self) -> None:
        """End the threads.  Never fails, and may be called twice."""
        self.interpreter.close()
