"""Projections and a head the first rows of which another unit computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.routed import view_floats
from pi2.backends.cpu.course import Course
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.units import DividedRows

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


class DividedRowsOfCourse:
    """Runs layers in the parts of `pi2.backends.executor.RowDivider`."""

    def __init__(self, request: BuildRequest, course: Course) -> None:
        self._course, self._model = course, request.model
        rows = request.rows or DividedRows(unit="")
        program = course.program
        self._projections: list[list[_Product]] = [[] for _ in course.exchange.layers]
        self._outputs: dict[int, _Product] = {}
        self._head: _Product | None = None
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

    def begin(self) -> None:
        """Leave the others' rows out of the calls that follow."""
        found = [own for layer in self._projections for own in layer]
        found += self._outputs.values()
        for own in [*found, *([] if self._head is None else [self._head])]:
            if own.others:
                self._course.program.take_rows(own.number, own.others, own.rows)

    def begin_attention(self, layer: int) -> F32:
        """Return what the projection reads [T, hidden]."""
        self._course.go_to(self._projections[layer][0].number)
        return self._course.view_input()

    def project(self, layer: int) -> None:
        self._course.go_to(self._projections[layer][-1].number + 1)

    def put_projected(self, layer: int, values: F32) -> None:
        done = 0
        for own in self._projections[layer]:
            self._put(own, values[:, done : done + own.others], is_added=False)
            done += own.others

    def mix(self, layer: int) -> F32:
        """Return the values that attention mixes [T, heads x head_dim]."""
        self._course.go_to(self._outputs[layer].number)
        return self._course.view_mixed(layer)

    def project_output(self, layer: int) -> None:
        self._course.finish_mixers(layer)

    def put_output(self, layer: int, values: F32) -> None:
        self._put(self._outputs[layer], values, is_added=True)

    def _put(self, own: _Product, values: F32, *, is_added: bool) -> None:
        """Put products [T, n] in the place of the first rows', with their biases."""
        program = self._course.program
        bias, has_bias = program.read_values(own.number, "bias", "has_bias")
        count = values.shape[1]
        if has_bias:
            values = values + view_floats(bias, count)
        target = self._course.view(own.y, count)[: len(values)]
        if is_added:
            target += values * np.float32(self._model.multipliers.residual)
        else:
            target[:] = values

    def put_logits(self, values: F32) -> F32:
        """Complete the last logits with the others' rows."""
        own, program = self._head, self._course.program
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
