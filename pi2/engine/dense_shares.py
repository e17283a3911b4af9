"""Units next to the executor compute the first neurons of each layer. If a unit is lost and the
plan allows it, its neurons are cached and read like others."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.routed import view_floats
from pi2.backends.executor import Executor
from pi2.backends.units import DenseUnit, UnitFailed
from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.model.tensor import name_layer_tensor
from pi2.plan.arithmetic.resolved import DenseShare
from pi2.plan.arithmetic.units import DividedRows, name_head
from pi2.plan.documents.model import Model


class ShareObserver:
    """Observes shares in the thread that drives them, doing nothing itself; times are of
    `time.perf_counter`."""

    def note_work(self, unit: str, name: str, start_s: float, end_s: float) -> None:
        """A unit has computed something; it is told when the job is finished."""

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        """The caller has waited for a unit, which had work of ``layer``, or of the head."""


@dataclass(slots=True, kw_only=True)
class BesideUnit:
    """A unit next to the executor."""

    name: str
    unit: DenseUnit
    goes_on: bool
    """Whether the run goes on without it when it is lost."""
    streams: bool
    """Whether it computes neurons of prompts that it does not keep."""
    lost: str | None = None
    """Why it is not there any more."""
    computed: int = 0
    """Neurons that it has computed in steps, summed over layers and tokens."""
    observer: ShareObserver | None = None
    """Who is told of waiting for it."""

    def observe(self, observer: ShareObserver | None) -> None:
        """Tell ``observer`` of its work and of waiting for it; None ends it."""
        assert self.observer is None or observer is None, "one observer at a time"
        self.observer = observer
        if self.lost is None:
            self.unit.observe(None if observer is None else partial(observer.note_work, self.name))

    @contextmanager
    def note_wait(self, layer: int | None) -> Iterator[None]:
        """Tell the observer how long the caller waits for a job of ``layer``, or of none."""
        if self.observer is None:
            yield
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.observer.note_unit_wait(self.name, layer, start_s, time.perf_counter())


@dataclass(slots=True)
class Job:
    """What a unit computes of a layer for a chunk or a step."""

    unit: BesideUnit
    layer: int
    first: int
    end: int
    """Stored indices of the neurons that it computes: from ``first`` to before ``end``."""
    streams: bool
    """Whether some of them are added to the job as they come."""
    number: int = -1
    """The unit's name of it."""
    counted: int = 0
    """Neurons of a step that it computes, summed over tokens; 0 in a prompt."""


Jobs = tuple[Job, ...]


class DenseShares:
    """The units' shares of all layers, and the jobs that they have been given."""

    def __init__(
        self,
        executor: Executor,
        units: Mapping[str, BesideUnit],
        layers: Sequence[DenseShare | None],
        neurons: int,
    ) -> None:
        """``layers``: who owns what of each; ``neurons``: FFN neurons of a layer."""
        self._executor = executor
        self.units = units
        self._layers = layers
        self._neurons = neurons
        streaming = [unit for unit in units.values() if unit.streams]
        self._streaming = streaming[0] if streaming else None
        self._owners = [None if share is None else units.get(share.unit) for share in layers]

    @property
    def computed(self) -> int:
        """Neurons that units have computed in steps, summed over layers and tokens."""
        return sum(unit.computed for unit in self.units.values())

    def count_owned(self, layer: int, sequences: int = 0) -> int:
        """Neurons of ``layer`` that its unit computes in a step of so many sequences, or of a
        prompt where ``sequences`` is 0."""
        owner, share = self._owners[layer], self._layers[layer]
        if owner is None or share is None or owner.lost is not None:
            return 0
        return share.by_sequences[sequences - 1] if sequences else share.kept

    def check(self) -> None:
        """UserError P614 if a unit is lost that the run does not go on without."""
        for unit in self.units.values():
            if unit.lost is not None and not unit.goes_on:
                raise _explain_loss(unit)

    def start(self, layer: int, owned: int, sequences: int = 0) -> Jobs:
        """Let units begin with the executor's FFN input, after ``begin_ffn``; ``owned`` as counted
        before the layer's first chunk, since lost units' neurons must be computed too."""
        owner = self._owners[layer] if owned else None
        streaming = None if sequences else self._streaming
        if streaming is not None and streaming.lost is not None:
            streaming = None
        jobs = []
        if owner is not None:
            end = self._neurons if owner is streaming else owned
            jobs.append(Job(owner, layer, 0, end, owner is streaming))
        if streaming is not None and streaming is not owner:
            jobs.append(Job(streaming, layer, owned, self._neurons, True))
        if not jobs:
            return ()
        inputs, routes = self._executor.share_input()
        for job in jobs:
            kept = owned if job.unit is owner else 0
            job.counted = kept * len(inputs) if sequences else 0
            if job.unit.lost is None:
                with self._guard(job.unit):
                    job.number = job.unit.unit.start(layer, inputs, routes, kept)
        return tuple(jobs)

    def add(self, jobs: Jobs, bundles: U8, first: int) -> bool:
        """Let a unit compute ``bundles`` [n, stride] too; False if no job takes them."""
        taking = [job for job in jobs if job.streams]
        for job in taking:
            if job.unit.lost is None:
                with self._guard(job.unit):
                    job.unit.unit.add(job.number, bundles, first)
        return bool(taking)

    def wait(self, jobs: Jobs) -> None:
        """Return when the memory of added arrays may be changed."""
        for job in jobs:
            if job.streams and job.unit.lost is None:
                with self._guard(job.unit), job.unit.note_wait(job.layer):
                    job.unit.unit.wait(job.number)

    def finish(self, jobs: Jobs) -> list[range]:
        """Add what the jobs have computed to the executor's sum; return the stored indices of
        neurons of lost units, which were not computed."""
        missed = []
        for job in jobs:
            if job.unit.lost is None:
                with self._guard(job.unit):
                    with job.unit.note_wait(job.layer):
                        total = job.unit.unit.finish(job.number)
                    self._executor.add_sum(total)
                    job.unit.computed += job.counted
            if job.unit.lost is not None:
                missed.append(range(job.first, job.end))
        return missed

    def abandon(self) -> None:
        """Forget all jobs after an error or an interrupt, when none is under way any more."""
        for unit in self.units.values():
            if unit.lost is None:
                try:
                    unit.unit.give_up()
                except UnitFailed as error:
                    self._note_loss(unit, error)

    @contextmanager
    def _guard(self, unit: BesideUnit) -> Iterator[None]:
        """Go on without a unit that fails; UserError P614 if the plan forbids it."""
        try:
            yield
        except UnitFailed as error:
            self._note_loss(unit, error)
            if not unit.goes_on:
                raise _explain_loss(unit) from None

    def _note_loss(self, unit: BesideUnit, error: UnitFailed) -> None:
        unit.lost = str(error)
        unit.unit.close()
        if unit.goes_on:
            get_logger().warning("the run goes on without a unit", unit=unit.name, reason=unit.lost)

    def close(self) -> None:
        for unit in self.units.values():
            unit.unit.close()


def _explain_loss(unit: BesideUnit) -> UserError:
    return UserError.of(
        "P614",
        f"the unit {unit.name!r} has failed: {unit.lost}",
        help=f'set units.{unit.name}.on_failure = "cpu" to go on without it, or give its '
        "share of layers.split to another unit",
    )


PARTS = ("query", "key", "value", "query_gate")
"""Keys of the matrices that are rows of a projection, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A matrix of which another unit computes the first rows."""

    number: int
    """The instruction's."""
    rows: int
    others: int
    y: Area


class SharedRows:
    """Computes projections and head; the first rows are another unit's."""

    def __init__(
        self, executor: Executor, unit: BesideUnit, rows: DividedRows, model: Model
    ) -> None:
        self._executor, self._program = executor, executor.program
        self._unit, self._rows, self._model = unit, rows, model
        self._projections: list[list[_Product]] = [[] for _ in range(model.shape.layers)]
        self._outputs: dict[int, _Product] = {}
        for matrix in self._program.matrices:
            number, layer = matrix.instructions[0], matrix.layer
            area = Area(*self._program.read_values(number, "y", "y_stride"))
            found = partial(_Product, number=number, rows=matrix.weight.rows, y=area)
            if layer is not None and matrix.key in PARTS:
                before = sum(own.rows for own in self._projections[layer])
                others = min(max(rows.qkv - before, 0), matrix.weight.rows)
                self._projections[layer].append(found(others=others))
            elif layer is not None and matrix.key == "output":
                self._outputs[layer] = found(others=rows.output)
            elif number >= self._program.head:
                self._head = found(others=rows.head)
        every = [*(own for layer in self._projections for own in layer), *self._outputs.values()]
        executor.taken = [
            (own.number, own.others, own.rows) for own in (*every, self._head) if own.others
        ]

    def attend(self, layer: int, position: int) -> None:
        """Add the mixers, each unit computing its rows of both projections."""
        executor, rows, model = self._executor, self._rows, self._model
        if not (rows.qkv or rows.output):
            executor.attend(layer, position)
            return
        executor.place(layer, position)
        parts, output, attention = (
            self._projections[layer],
            self._outputs[layer],
            model.blocks[layer].attention,
        )
        assert attention is not None, layer
        with self._guard():
            executor.go_to(parts[0].number)
            area = self._program.u if model.norm.inputs else self._program.x
            job = self._begin(layer, "qkv", rows.qkv, area, model.shape.stored_hidden)
            executor.go_to(parts[-1].number + 1)
            if job is not None:
                values, done = self._finish(job, layer), 0
                for own in parts:
                    self._put(own, values[:, done : done + own.others], is_added=False)
                    done += own.others
            executor.go_to(output.number)
            area = self._program.take_area("mixed", attention.query)
            job = self._begin(layer, "output", rows.output, area, attention.stored_query)
            executor.finish_mixers(layer)
            if job is not None:
                self._put(output, self._finish(job, layer), is_added=True)

    def _begin(self, layer: int, key: str, rows: int, area: Area, width: int) -> int | None:
        """Let the unit begin its rows of a layer's matrix, which reads ``area`` [T, width]."""
        if not rows:
            return None
        inputs = self._executor.view(area, width)[: self._executor.tokens]
        return self._unit.unit.multiply(name_layer_tensor(layer, key), inputs)

    def _finish(self, job: int, layer: int | None) -> F32:
        with self._unit.note_wait(layer):
            return self._unit.unit.finish(job)

    def _add_bias(self, own: _Product, values: F32) -> F32:
        """Products [T, n] with the first rows, and their biases."""
        bias, has_bias = self._program.read_values(own.number, "bias", "has_bias")
        return values + view_floats(bias, values.shape[1]) if has_bias else values

    def _put(self, own: _Product, values: F32, *, is_added: bool) -> None:
        """Put products [T, n] in the place of the first rows'."""
        values = self._add_bias(own, values)
        target = self._executor.view(own.y, values.shape[1])[: len(values)]
        if is_added:
            target += values * np.float32(self._model.multipliers.residual)
        else:
            target[:] = values

    def logits(self, first: int) -> F32:
        """Logits of the tokens from ``first`` on, each unit computing its rows."""
        executor, own, model = self._executor, self._head, self._model
        if not own.others:
            return executor.logits(first)
        with self._guard():
            inputs = executor.read_head_input(first)
            job = self._unit.unit.multiply(name_head(model), inputs)
            logits = executor.logits(first)
            values = self._add_bias(own, self._finish(job, None))
            values = values * np.float32(model.multipliers.logits)
            limit = model.logit_softcap
            if limit is not None:
                values = np.tanh(values / np.float32(limit)) * np.float32(limit)
            logits[:, : values.shape[1]] = values
            return logits
        raise AssertionError("a lost unit has ended the run")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """UserError P614 where the unit is lost: no other unit has its rows."""
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
