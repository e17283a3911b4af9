"""Projections and the head, computed by two units together: the one beside the executor has the
first rows of each matrix, the executor the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pi2.arrays import F32
from pi2.backends.dense_unit import UnitFailed
from pi2.backends.protocol import Executor, RowDivider
from pi2.diagnostics import UserError
from pi2.engine.dense_shares import BesideUnit
from pi2.plan.arithmetic.rows import DividedRows
from pi2.plan.weights.tensor_names import name_layer_tensor


class WholeRows:
    """All rows are the executor's."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block of a chunk."""
        self._executor.attend(layer, position)

    def attend_step(self, layer: int) -> None:
        """Add the attention block of a step of several sequences."""
        self._executor.attend_step(layer)

    def compute_logits(self, first: int) -> F32:
        """Logits of the tokens from ``first`` on, as many as the executor gives at once."""
        return self._executor.logits(first)


class SharedRows(WholeRows):
    """The first rows are another unit's."""

    def __init__(self, executor: Executor, unit: BesideUnit, rows: DividedRows, head: str) -> None:
        """``head``: name of the head's tensor."""
        super().__init__(executor)
        assert isinstance(executor, RowDivider), "this executor divides no rows"
        self._divider: RowDivider = executor
        self._unit = unit
        self._rows = rows
        self._head = head

    def attend(self, layer: int, position: int) -> None:
        """Add the attention block, each unit computing its rows of both projections."""
        if self._rows.qkv or self._rows.output:
            self._attend(layer, position)
        else:
            self._executor.attend(layer, position)

    def attend_step(self, layer: int) -> None:
        """Add the attention block of a step, each unit computing its rows."""
        if self._rows.qkv or self._rows.output:
            self._attend(layer, 0)
        else:
            self._executor.attend_step(layer)

    def _attend(self, layer: int, position: int) -> None:
        """Add the attention block in parts; in a step the executor knows the positions."""
        divider, rows = self._divider, self._rows
        inputs = divider.begin_attention(layer, position)
        with self._guard():
            job = self._begin(rows.qkv, name_layer_tensor(layer, "qkv"), inputs)
            divider.project(layer)
            if job is not None:
                divider.put_projected(layer, self._finish(job, layer))
            mixed = divider.mix(layer, position)
            job = self._begin(rows.output, name_layer_tensor(layer, "output"), mixed)
            divider.project_output(layer)
            if job is not None:
                divider.put_output(layer, self._finish(job, layer))

    def compute_logits(self, first: int) -> F32:
        """Logits of the tokens from ``first`` on, each unit computing its rows."""
        if self._rows.head == 0:
            return self._executor.logits(first)
        with self._guard():
            inputs = self._divider.read_head_input(first)
            job = self._unit.unit.multiply(self._head, inputs)
            self._executor.logits(first)
            return self._divider.put_logits(self._finish(job, None))
        raise AssertionError("a lost unit has ended the run")

    def _begin(self, rows: int, name: str, inputs: F32) -> int | None:
        return self._unit.unit.multiply(name, inputs) if rows else None

    def _finish(self, job: int, layer: int | None) -> F32:
        with self._unit.note_wait(layer):
            return self._unit.unit.finish(job)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """UserError P614 where the unit is lost: nobody else has its rows."""
        try:
            yield
        except UnitFailed as error:
            self._unit.lost = str(error)
            self._unit.unit.close()
            raise UserError.of(
                "P614",
                f"the unit {self._unit.name!r} has failed: {error}",
                help="give its rows of projections and head to another unit",
            ) from None
