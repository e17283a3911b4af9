"""How long a layer takes for a token's work, simulated once for each kind of work."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import simpy

from pi2.costs.activity import MergedReads
from pi2.costs.description import Description, LayerKind
from pi2.costs.reads import ALONE
from pi2.costs.settings import Settings
from pi2.costs.terms import LayerTerms
from pi2.simulate.bus import Bus, Meter
from pi2.tracing import Recorder

Process = Generator[simpy.Event, Any, None]

READ_LANE, DENSE_LANE, CPU_LANE = "flash", "dense unit", "cpu"
_TASKS_PER_WORKER = 2
"""Tasks of resident neurons for each worker, at most."""
_MERGED = 0.95
"""Requests for each missing neuron below which neighbours are taken to share them."""
_GATE_SHARE = 1.0 / 3.0
"""Part of a neuron's arithmetic that its gate is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What a token asks of one layer's FFN, in neurons."""

    resident: float
    """Neurons that the CPU computes from memory."""
    missing: float
    """Neurons that are read, then computed by the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Values that are the same for every token of a layer."""

    terms: LayerTerms
    settings: Settings
    stride: int
    cluster: int
    absent: float
    """Neurons of the computing experts that are not hot."""
    possible: float
    """Neurons of the computing experts."""
    streamed: float = 0.0
    """Neurons that are streamed, if every neuron is computed: in an MoE model, of all experts."""
    merged: MergedReads = ALONE


@dataclass(slots=True)
class _Task:
    name: str
    neurons: float
    fixed_s: float = 0.0
    ready_s: float | None = None
    """When a read ended that it waited for."""
    rest_neurons: float = 0.0
    """Neurons whose up and down parts are to be read afterwards."""


class LayerRun:
    """Processes of one layer."""

    def __init__(
        self,
        env: simpy.Environment,
        bus: Bus,
        plan: LayerPlan,
        work: LayerWork,
        threads: int,
        recorder: Recorder | None,
    ) -> None:
        self._env, self._bus, self._plan, self._work = env, bus, plan, work
        self._terms, self._settings = plan.terms, plan.settings
        self._threads = threads
        self._recorder = recorder
        self._tasks: deque[_Task] = deque()
        self._wishes: deque[tuple[float, bool]] = deque()
        self._open = 0
        self._news = env.event()
        self._io_news = env.event()

    # ---------------------------------------------------------- neuron clusters

    def flow_clusters(self) -> Process:
        """Clusters flow: predict, read gate, compute gate, read up and down, compute."""
        if self._settings.stream is not None:
            yield from self._stream_pieces()
            return
        dense = self._env.process(self._compute_dense())
        yield from self._find_neurons()
        yield from self._plan_clusters()
        if self._open:
            workers = [
                self._env.process(self._compute(number)) for number in range(self._terms.workers)
            ]
            if self._wishes:
                self._env.process(self._read_clusters())
            yield self._env.all_of(workers)
        yield dense

    def _plan_clusters(self) -> Process:
        resident, missing = self._work.resident, self._work.missing
        size, workers = self._plan.cluster, self._terms.workers
        if resident >= 1:
            yield from self._use_threads(self._terms.call_s, "begin")
            count = min(-(-int(resident) // size), _TASKS_PER_WORKER * workers)
            count = 1 if workers == 1 else count
            for _ in range(count):
                self._tasks.append(_Task("compute resident", resident / count))
            self._open += count
        reads = self._settings.reads
        if missing > 0 and reads is not None:
            parts = max(int(reads.count_parts(missing)), 1)
            for _ in range(parts):
                self._wishes.append((missing / parts, True))
            self._open += parts

    def _compute(self, number: int) -> Process:
        terms = self._terms
        waited = False
        while self._open:
            if not self._tasks:
                waited = True
                yield self._news
                continue
            task = self._tasks.popleft()
            start = self._env.now
            if task.ready_s is not None and self._recorder is not None:
                lane = f"{CPU_LANE} thread {number}"
                self._recorder.add_flow(READ_LANE, task.ready_s, lane, start)
            fixed_s = task.fixed_s + (terms.wake_s if waited and task.ready_s is not None else 0.0)
            waited = False
            share = 1.0 / terms.workers
            if fixed_s > 0.0:
                yield self._bus.work("cpu", fixed_s, share=share)
            neuron = terms.neuron
            yield self._bus.work(
                "cpu", task.neurons * neuron.seconds, bytes_s=neuron.bytes_s, share=share
            )
            self._note_worker(number, task.name, start)
            if task.rest_neurons > 0:
                self._wishes.append((task.rest_neurons, False))
                self._io_news = self._ring(self._io_news)
            else:
                self._open -= 1
                if not self._open:
                    self._news = self._ring(self._news)
                    self._io_news = self._ring(self._io_news)

    def _read_clusters(self) -> Process:
        while self._open:
            if not self._wishes:
                yield self._io_news
                continue
            neurons, first = self._wishes.popleft()
            start = self._env.now
            name, seconds, size = self._price_read(first)
            yield self._bus.read(neurons * seconds, neurons * size)
            self._note(READ_LANE, name, start)
            self._queue_compute(neurons, first)

    @property
    def _is_whole(self) -> bool:
        stretches = self._stretches
        return stretches is not None and stretches.requests < _MERGED

    @property
    def _stretches(self) -> MergedReads | None:
        reads = self._settings.reads
        return None if reads is None else reads.merge_dense(self._work.missing, self._plan.absent)

    def _price_read(self, first: bool) -> tuple[str, float, float]:
        """Name, seconds and bytes per neuron of a read."""
        reads, missing = self._settings.reads, self._work.missing
        assert reads is not None
        seconds = reads.time(missing, self._plan.merged, self._plan.absent) / missing
        stretches = self._stretches
        if stretches is not None and self._is_whole:
            return "read stretches", seconds, (1.0 + stretches.unwanted) * reads.stride
        if reads.phases is None:
            return "read bundle", seconds, reads.stride * (1.0 + self._plan.merged.unwanted)
        if first:
            return "read gate", seconds * reads.first_share, reads.phases.gate_bytes
        rest_s = seconds * (1.0 - reads.first_share) / reads.phases.open_share
        return "read up and down", rest_s, reads.stride - reads.phases.gate_bytes

    def _queue_compute(self, neurons: float, first: bool) -> None:
        reads, now, fixed_s = self._settings.reads, self._env.now, self._terms.part_call_s
        assert reads is not None
        if reads.phases is None or self._is_whole:
            task = _Task("compute bundle", neurons, fixed_s, now)
        elif first:
            open_neurons = neurons * reads.phases.open_share
            task = _Task("compute gate", neurons * _GATE_SHARE, fixed_s, now, open_neurons)
        else:
            # With the gates, all neurons' arithmetic: rates are of whole ones.
            rest = neurons / reads.phases.open_share * (1.0 - _GATE_SHARE)
            task = _Task("compute up and down", rest, fixed_s, now)
        self._tasks.append(task)
        self._news = self._ring(self._news)

    # ------------------------------------------------------------- dense streams

    def _stream_pieces(self) -> Process:
        """All neurons, cold ones in pieces: one is read while the one before it is computed."""
        stream, terms, work = self._settings.stream, self._terms, self._work
        assert stream is not None
        dense = self._env.process(self._compute_dense())
        pieces = int(stream.count_pieces(self._plan.streamed))
        if not pieces:
            yield from self._compute_together(work.resident)
            yield dense
            return
        read_s = stream.time_read(self._plan.streamed) / pieces
        size = self._plan.streamed * self._plan.stride / pieces
        for piece in range(pieces):
            start = self._env.now
            reading = self._bus.read(read_s, size)
            if piece == 0:
                yield self._bus.work("cpu", terms.before_s)
                self._note_threads("attention", start)
                if work.resident >= 1:
                    yield from self._compute_together(work.resident)
            yield from self._compute_together(work.missing / pieces)
            yield reading
            self._note(READ_LANE, "stream neurons", start)
        yield dense

    # ------------------------------------------------------------------- common

    def _compute_dense(self) -> Process:
        dense = self._terms.dense
        if dense.seconds <= 0:
            return
        start = self._env.now
        yield self._env.timeout(self._terms.launch_s)
        yield self._bus.work("dense", dense.seconds, bytes_s=dense.bytes_s)
        self._note(DENSE_LANE, "hot neurons", start)

    def _find_neurons(self) -> Process:
        start, predict = self._env.now, self._terms.predict
        if predict.seconds > 0:
            yield self._bus.work("cpu", predict.seconds, bytes_s=predict.bytes_s)
            self._note_threads("predict", start)
        yield from self._use_threads(self._terms.time_look_up(self._work.missing, 0.0), "look up")

    def _compute_together(self, neurons: float) -> Process:
        if neurons <= 0:
            return
        yield from self._use_threads(self._terms.call_s, "begin")
        start, neuron = self._env.now, self._terms.neuron
        yield self._bus.work("cpu", neurons * neuron.seconds, bytes_s=neuron.bytes_s)
        self._note_threads("compute", start)

    def _use_threads(self, seconds: float, name: str) -> Process:
        if seconds <= 0:
            return
        start = self._env.now
        yield self._bus.work("cpu", seconds)
        self._note_threads(name, start)

    def _note_worker(self, number: int, name: str, start_s: float) -> None:
        if self._terms.workers == 1:
            self._note_threads(name, start_s)
        else:
            self._note(f"{CPU_LANE} thread {number}", name, start_s)

    def _note_threads(self, name: str, start_s: float) -> None:
        for number in range(self._threads):
            self._note(f"{CPU_LANE} thread {number}", name, start_s)

    def _ring(self, event: simpy.Event) -> simpy.Event:
        """Wake who waits for ``event``; the next wait is for a new one."""
        event.succeed()
        return self._env.event()

    def _note(self, lane: str, name: str, start_s: float) -> None:
        if self._recorder is not None:
            self._recorder.add_slice(lane, name, start_s, self._env.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Outcome of a layer's FFN."""

    duration_s: float
    meter: Meter


class LayerSimulation:
    """Simulates layers of one kind; equal work takes equal time, and is simulated once."""

    def __init__(self, description: Description, kind: LayerKind) -> None:
        self.terms: LayerTerms = description.find_terms(kind)
        sizes, settings = description.choose(kind)
        activity = kind.activity
        reads = settings.reads
        possible = activity.neurons * activity.chosen
        merged = ALONE
        if reads is not None and reads.merge_gap is not None:
            merged = activity.merge_reads(kind.hot, kind.cold, reads.merge_gap)
        self.plan = LayerPlan(
            terms=self.terms,
            settings=settings,
            stride=sizes.stride,
            cluster=64 if reads is None else reads.cluster,
            absent=possible * (1.0 - kind.hot),
            possible=possible,
            streamed=activity.neurons * (1.0 - kind.hot),
            merged=merged,
        )
        self.threads = settings.threads
        streams = settings.stream is not None
        self._overlap = 1.0
        if streams and settings.stream is not None:
            self._overlap = settings.stream.overlap
        elif reads is not None:
            self._overlap = reads.overlap
        self._known: dict[LayerWork, LayerTimes] = {}

    def run(self, work: LayerWork, recorder: Recorder | None = None) -> LayerTimes:
        if recorder is None and work in self._known:
            return self._known[work]
        env = simpy.Environment()
        bus = Bus(env, shared_bytes_s=self.terms.shared_bytes_s, read_overlap=self._overlap)
        run = LayerRun(env, bus, self.plan, work, self.threads, recorder)
        env.run(until=env.process(run.flow_clusters()))
        duration_s, meter = env.now, bus.meter
        if self.streams:
            # Attention was played with the layer, because the first piece is read behind it.
            before_s = self.terms.before_s
            duration_s -= before_s
            meter = replace(meter, cpu_s=max(meter.cpu_s - before_s, 0.0))
            meter.flash_s = min(meter.flash_s, duration_s)
        times = LayerTimes(duration_s=duration_s, meter=meter)
        if recorder is None:
            self._known[work] = times
        return times

    @property
    def streams(self) -> bool:
        return self.plan.settings.stream is not None and self.plan.streamed >= 1.0

    def run_ahead(self, work: LayerWork) -> LayerTimes:
        """Run the layer with ``look_ahead``: computing hides what flash needs, if it can."""
        times, mode = self.run(work), self.plan.settings.look_ahead
        if mode == "none" or work.missing <= 0 or self.plan.settings.reads is None:
            return times
        resident = replace(work, resident=work.resident + work.missing, missing=0.0)
        ready = self.run(resident)
        added_s = self.terms.time_look_up(work.missing, 0.0) - self.terms.time_look_up(0.0, 0.0)
        ready_s = ready.duration_s + added_s
        if mode == "attention":
            duration_s = max(ready_s, times.duration_s - self._overlap * self.terms.attention_s)
        else:
            reads, plan = self.plan.settings.reads, self.plan
            read_s = reads.time(work.missing, plan.merged, plan.absent)
            busy_s = self.terms.before_s + ready_s
            duration_s = ready_s + read_s - self._overlap * min(read_s, busy_s)
        meter = replace(
            ready.meter,
            flash_s=min(times.meter.flash_s, duration_s + self.terms.before_s),
            read_bytes=times.meter.read_bytes,
            waiting_s=max(0.0, duration_s - ready_s),
        )
        return LayerTimes(duration_s=duration_s, meter=meter)
