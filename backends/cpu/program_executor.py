"""An executor whose program computes everything but neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.arithmetic import list_chosen
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.routed import view_floats
from pi2.backends.cpu.course import Course
from pi2.backends.executor import ExecutorObserver
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.units import DividedRows

_NONE: I32 = np.zeros(0, np.int32)
PARTS = ("query", "key", "value", "query_gate")
"""Keys of the matrices that are rows of a projection, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Rows of a matrix that another unit computes: the first ones."""

    number: int
    """The instruction's."""
    rows: int
    others: int
    y: Area


class ProgramExecutor(Course):
    """The calls of `pi2.backends.executor.Executor` that are not about neurons, and of
    `RowDivider`."""

    _observer: ExecutorObserver | None = None

    def __init__(self, request: BuildRequest, **settings: Any) -> None:
        """``settings``: see `Course`."""
        super().__init__(request, **settings)
        self._token = 0
        rows, program = request.rows or DividedRows(unit=""), self.program
        self._projections: list[list[_Product]] = [[] for _ in self.exchange.layers]
        self._outputs: dict[int, _Product] = {}
        self._head: _Product | None = None
        self._divided: list[_Product] = []
        """With rows of others."""
        if not (rows.qkv or rows.output or rows.head):
            return
        before = [0] * len(self._projections)
        for matrix in program.matrices:
            number, layer, count = matrix.instructions[0], matrix.layer, matrix.weight.rows
            area = Area(*program.read_values(number, "y", "y_stride"))
            if layer is not None and matrix.key in PARTS:
                others = min(max(rows.qkv - before[layer], 0), count)
                before[layer] += count
                own = _Product(number=number, rows=count, others=others, y=area)
                self._projections[layer].append(own)
            elif layer is not None and matrix.key == "output":
                others = rows.output
                self._outputs[layer] = _Product(number=number, rows=count, others=others, y=area)
            elif number >= program.head:
                self._head = _Product(number=number, rows=count, others=rows.head, y=area)
        found = [own for layer in self._projections for own in layer]
        found += self._outputs.values()
        found += [] if self._head is None else [self._head]
        self._divided = [own for own in found if own.others]

    def select_chunk(self, number: int) -> None:
        """Let the calls that follow be about another chunk."""
        super().select_chunk(number)
        if self._observer is not None:
            self._observer.select_chunk(number)

    def select_token(self, number: int) -> None:
        """Let calls for one token be about another one of a step."""
        self._token = number

    def begin_step(self, tokens: I32, sequences: Sequence[int], positions: Sequence[int]) -> None:
        super().begin_step(tokens, sequences, positions)
        self._begin_call()

    def embed(self, tokens: I32) -> None:
        super().embed(tokens)
        self._begin_call()

    def _begin_call(self) -> None:
        if self._token:
            self.select_token(0)
        # Other units compute the first rows.
        for own in self._divided:
            self.program.take_rows(own.number, own.others, own.rows)

    def join(self, given: F32) -> None:
        self.program.join(given[:, : self._model.shape.hidden])

    def attend(self, layer: int, position: int) -> None:
        if layer == 0:
            self.begin_layers(position)
        self.attend_step(layer)

    def begin_attention(self, layer: int, position: int) -> F32:
        """Return what the projection reads [T, hidden]."""
        if layer == 0:
            self.begin_layers(position)
        self.go_to(self._projections[layer][0].number)
        return self.view_input()

    def project(self, layer: int) -> None:
        self.go_to(self._projections[layer][-1].number + 1)

    def put_projected(self, layer: int, values: F32) -> None:
        done = 0
        for own in self._projections[layer]:
            self._put(own, values[:, done : done + own.others], is_added=False)
            done += own.others

    def mix(self, layer: int, position: int) -> F32:
        """Return the values that attention mixes [T, heads x head_dim]."""
        self.go_to(self._outputs[layer].number)
        return self.view_mixed(layer)

    def project_output(self, layer: int) -> None:
        self.finish_mixers(layer)

    def put_output(self, layer: int, values: F32) -> None:
        self._put(self._outputs[layer], values, is_added=True)

    def _put(self, own: _Product, values: F32, *, is_added: bool) -> None:
        """Put products [T, n] in the place of the first rows', with their biases."""
        program = self.program
        bias, has_bias = program.read_values(own.number, "bias", "has_bias")
        count = values.shape[1]
        if has_bias:
            values = values + view_floats(bias, count)
        target = self.view(own.y, count)[: len(values)]
        if is_added:
            target += values * np.float32(self._model.multipliers.residual)
        else:
            target[:] = values

    def put_logits(self, values: F32) -> F32:
        """Complete the last logits with the others' rows."""
        own, program = self._head, self.program
        assert own is not None
        logits, count = program.read_logits(), values.shape[1]
        bias, has_bias = program.read_values(own.number, "bias", "has_bias")
        if has_bias:
            values = values + view_floats(bias, count)
        values = values * np.float32(self._model.multipliers.logits)
        limit = self._model.logit_softcap
        if limit is not None:
            values = np.tanh(values / np.float32(limit)) * np.float32(limit)
        logits[:, :count] = values
        return logits

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

    def observe(self, observer: ExecutorObserver | None) -> None:
        """Tell ``observer`` of every kernel and of the neurons of prompts."""
        assert self._observer is None or observer is None, "one observer at a time"
        self._observer = observer
        self.program.observe(None if observer is None else observer.note_kernel)
