"""An executor whose program computes everything but neurons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32, I32, U8
from pi2.backends.arithmetic import list_chosen
from pi2.backends.cpu.course import Course, DividedRowsOfCourse
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest

_NONE: I32 = np.zeros(0, np.int32)


class ProgramExecutor:
    """The calls of `pi2.backends.executor.Executor` that are not about neurons."""

    _observer: ExecutorObserver | None = None

    def __init__(self, request: BuildRequest, course: Course) -> None:
        self._model, self._course = request.model, course
        self._rows = DividedRowsOfCourse(request, course)
        self._token = 0

    def select_sequence(self, number: int) -> None:
        self._course.select_sequence(number)

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        self._course.select_chunk(number)
        if self._observer is not None:
            self._observer.select_chunk(number)

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        self.select_chunk(0)
        self._course.begin_step(tokens, sequences, positions)
        self._begin_call()

    def attend_step(self, layer: int) -> None:
        self._course.attend(layer)

    def embed(self, tokens: I32) -> None:
        self._course.embed(tokens)
        self._begin_call()

    def _begin_call(self) -> None:
        if self._token:
            self.select_token(0)
        self._rows.begin()

    def join(self, given: F32) -> None:
        self._course.program.join(given[:, : self._model.shape.hidden])

    def attend(self, layer: int, position: int) -> None:
        if layer == 0:
            self._course.begin_layers(position)
        self._course.attend(layer)

    def begin_attention(self, layer: int, position: int) -> F32:
        if layer == 0:
            self._course.begin_layers(position)
        return self._rows.begin_attention(layer)

    def project(self, layer: int) -> None:
        self._rows.project(layer)

    def put_projected(self, layer: int, values: F32) -> None:
        self._rows.put_projected(layer, values)

    def mix(self, layer: int, position: int) -> F32:
        return self._rows.mix(layer)

    def project_output(self, layer: int) -> None:
        self._rows.project_output(layer)

    def put_output(self, layer: int, values: F32) -> None:
        self._rows.put_output(layer, values)

    def read_head_input(self, first: int) -> F32:
        return self._course.read_head_input(first)

    def put_logits(self, values: F32) -> F32:
        return self._rows.put_logits(values)

    def logits(self, first: int) -> F32:
        """Return logits of the tokens from ``first`` on, as many as there is room for."""
        return self._course.run_head(first)

    def read_router_input(self) -> F32:
        return self._course.read_router_input()

    def read_routes(self) -> F32:
        """Return the weights of an MoE model's experts."""
        raise NotImplementedError

    def list_experts(self) -> I32:
        return _NONE if self._model.moe is None else list_chosen(self.read_routes()[self._token])

    def list_chunk_experts(self) -> I32:
        """Return the experts that the router chose for any token."""
        if self._model.moe is None:
            return _NONE
        return np.flatnonzero(self.read_routes().any(axis=0)).astype(np.int32)

    def expect(self, end: int) -> None:
        """Choose the positions of a sequence of ``end`` tokens."""
        self._course.program.expect(end)

    def read_context(self, sequence: int, first: int, end: int) -> U8:
        return self._course.program.read_context(sequence, first, end)

    def put_context(self, sequence: int, first: int, end: int, kept: U8) -> None:
        self._course.program.put_context(sequence, first, end, kept)

    def read_state(self, sequence: int) -> F32:
        return self._course.program.read_state(sequence)

    def put_state(self, sequence: int, state: F32) -> None:
        self._course.program.put_state(sequence, state)

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of every kernel and of the neurons of prompts."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        self._course.program.observe(None if observer is None else observer.note_kernel)

    def close(self) -> None:
        self._course.close()
