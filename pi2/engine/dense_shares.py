"""Units next to the executor compute the first neurons of each layer. If a unit is lost and the
plan allows it, its neurons are cached and read like others."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pi2.arrays import F32, U8
from pi2.backends.executor import Executor
from pi2.backends.units import DenseUnit, UnitFailed
from pi2.diagnostics import UserError
from pi2.engine.parts import ShareObserver
from pi2.model.tensor import name_layer_tensor
from pi2.plan.arithmetic.resolved import DenseShare
from pi2.plan.arithmetic.units import DividedRows


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
        *,
        on_lost: Callable[[BesideUnit], None] = lambda unit: None,
    ) -> None:
        """``layers``: who owns what of each; ``neurons``: FFN neurons of a layer; ``on_lost`` is
        told of a unit that the run goes on without."""
        self._executor = executor
        self.units = units
        self._layers = layers
        self._neurons = neurons
        self._on_lost = on_lost
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
        try:
            yield
        except UnitFailed as error:
            self._lose(unit, error)

    def _lose(self, unit: BesideUnit, error: UnitFailed) -> None:
        """Go on without a unit; UserError P614 if the plan forbids it."""
        self._note_loss(unit, error)
        if not unit.goes_on:
            raise _explain_loss(unit) from None

    def _note_loss(self, unit: BesideUnit, error: UnitFailed) -> None:
        unit.lost = str(error)
        unit.unit.close()
        if unit.goes_on:
            self._on_lost(unit)

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


class SharedRows:
    """Computes projections and head; the first rows are another unit's."""

    def __init__(self, executor: Executor, unit: BesideUnit, rows: DividedRows, head: str) -> None:
        """``head``: name of the head's tensor."""
        self._executor = executor
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
        divider, rows = self._executor, self._rows
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

    def logits(self, first: int) -> F32:
        """Logits of the tokens from ``first`` on, each unit computing its rows."""
        if self._rows.head == 0:
            return self._executor.logits(first)
        with self._guard():
            inputs = self._executor.read_head_input(first)
            job = self._unit.unit.multiply(self._head, inputs)
            self._executor.logits(first)
            return self._executor.put_logits(self._finish(job, None))
        raise AssertionError("a lost unit has ended the run")

    def _begin(self, rows: int, name: str, inputs: F32) -> int | None:
        return self._unit.unit.multiply(name, inputs) if rows else None

    def _finish(self, job: int, layer: int | None) -> F32:
        with self._unit.note_wait(layer):
            return self._unit.unit.finish(job)

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
