"""One layer of one token as SimPy processes: what each policy does with the same work."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from pi2.simulate.bus import Bus
from pi2.simulate.inputs import SimulationInput
from pi2.simulate.read_costs import ReadCosts
from pi2.tracing import Recorder

Process = Generator[simpy.Event, Any, None]

READ_LANE, DENSE_LANE, CPU_LANE = "flash", "dense unit", "cpu"
_TASKS_PER_THREAD = 2
"""Resident neurons are handed out in at most this many tasks for every thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What a token asks of one layer's FFN, in neurons."""

    dense: float
    """Computed by the dense unit, whether active or not."""
    resident: float
    """Neurons that the CPU computes from memory."""
    missing: float
    """Neurons that are read, then computed by the CPU."""
    cold: float
    """All neurons that are not hot: where the missing ones lie in the file."""


@dataclass(slots=True)
class _Task:
    """A cluster's computation, and what it makes possible."""

    name: str
    size_bytes: float
    ready_s: float | None = None
    """When a read ended that it waited for."""
    rest_neurons: float = 0.0
    """Neurons whose up and down parts are to be read afterwards."""


class LayerRun:
    """Processes of one layer; each policy is one of the public methods."""

    def __init__(
        self,
        env: simpy.Environment,
        bus: Bus,
        inputs: SimulationInput,
        costs: ReadCosts,
        work: LayerWork,
        recorder: Recorder | None,
    ) -> None:
        self._env, self._bus, self._costs, self._work = env, bus, costs, work
        self._inputs = inputs
        self._machine = inputs.machine
        self._choices = inputs.choices
        self._constants = inputs.constants
        self._recorder = recorder
        self._neuron = inputs.workload.neuron_bytes
        self._gathered = 1.0 / self._constants.gather_efficiency
        self._slow_down = self._find_slow_down()
        self._streamed = self._prefers_stream()
        # What streams by is computed where it arrives; what is read singly goes into the cache.
        kept = self._choices.cold_neurons > 0 and not self._streamed
        self._place_s = self._constants.place_s if kept else 0.0
        self._phases = 1 if self._streamed else self._choices.phases
        self._tasks: deque[_Task] = deque()
        self._wishes: deque[tuple[float, bool]] = deque()
        self._open = 0
        self._news = env.event()
        self._io_news = env.event()

    def _find_slow_down(self) -> float:
        """How much longer single reads take because several threads issue them."""
        flash = self._machine.flash
        if flash is None or self._choices.io_threads == 1:
            return 1.0
        return 1.0 / (1.0 - flash.reader_penalty)

    def _prefers_stream(self) -> bool:
        """Whether all cold neurons in one sequential read come sooner than the missing ones."""
        if not self._choices.predicted:
            return self._work.missing > 0
        single_s = self._costs.first_s
        if self._choices.phases == 2:
            single_s += self._costs.rest_s * self._constants.up_down_share
        stream_s = self._work.cold * self._choices.stride_bytes * self._costs.sequential_byte_s
        return stream_s < self._work.missing * single_s * self._slow_down

    def _price_stream(self) -> tuple[float, float]:
        """Seconds and bytes per missing neuron where all cold ones are read."""
        read = self._work.cold if self._choices.predicted else self._work.missing
        size = read * self._choices.stride_bytes / self._work.missing
        return size * self._costs.sequential_byte_s, size

    # ---------------------------------------------------------- neuron clusters

    def flow_clusters(self) -> Process:
        """Clusters flow: predict, read gate, compute gate, read up and down, compute."""
        dense = self._env.process(self._compute_dense())
        yield from self._predict()
        self._plan_clusters()
        if self._open:
            workers = [
                self._env.process(self._compute(number))
                for number in range(self._choices.compute_threads)
            ]
            if self._wishes:
                self._env.process(self._read_clusters())
            yield self._env.all_of(workers)
        yield dense
        yield from self._meet(self._constants.cluster_barriers / 2 - 2, "sum")

    def _plan_clusters(self) -> None:
        """Queue what is resident as tasks and what is missing as reads."""
        size = self._choices.cluster
        resident, missing = self._work.resident, self._work.missing
        most = _TASKS_PER_THREAD * self._choices.compute_threads
        count = min(-(-int(resident) // size), most) if resident >= 1 else 0
        gathered = self._gathered if self._choices.predicted else 1.0
        for _ in range(count):
            share = resident / count * self._neuron * gathered
            self._tasks.append(_Task("compute resident", share))
        self._open += count
        left = missing
        while left > 0:
            taken = min(size, left)
            self._wishes.append((taken, True))
            self._open += 1
            left -= taken

    def _compute(self, number: int) -> Process:
        """A compute thread: takes tasks until no cluster of the layer is open."""
        lane = f"{CPU_LANE} thread {number}"
        limit = self._machine.cpu_bytes_s / self._choices.compute_threads
        while self._open:
            if not self._tasks:
                yield self._news
                continue
            task = self._tasks.popleft()
            start = self._env.now
            if task.ready_s is not None and self._recorder is not None:
                self._recorder.add_flow(READ_LANE, task.ready_s, lane, start)
            yield self._bus.move("cpu", task.size_bytes, limit)
            self._note(lane, task.name, start)
            if task.rest_neurons > 0:
                self._wishes.append((task.rest_neurons, False))
                self._io_news = self._ring(self._io_news)
            else:
                self._open -= 1
                if not self._open:
                    self._news = self._ring(self._news)
                    self._io_news = self._ring(self._io_news)

    def _read_clusters(self) -> Process:
        """The reading thread: requests in order, first gates, then what gates asked for."""
        idle = True
        while self._open:
            if not self._wishes:
                idle = True
                yield self._io_news
                continue
            neurons, first = self._wishes.popleft()
            self._bus.begin_read()
            start = self._env.now
            name, seconds, size = self._price_read(first)
            seconds *= neurons
            if first:
                seconds += neurons * self._place_s
            yield self._env.timeout(seconds + (self._costs.latency_s if idle else 0.0))
            idle = False
            self._bus.end_read(neurons * size)
            self._note(READ_LANE, name, start)
            self._queue_compute(neurons, first)

    def _price_read(self, first: bool) -> tuple[str, float, float]:
        """Name, seconds and bytes per neuron of a read."""
        if self._streamed:
            return ("stream cold neurons", *self._price_stream())
        first_s, rest_s = (x * self._slow_down for x in (self._costs.first_s, self._costs.rest_s))
        if self._phases == 1:
            return "read bundle", first_s, self._choices.gate_read_bytes
        if first:
            return "read gate", first_s, self._choices.gate_read_bytes
        return "read up and down", rest_s, self._choices.rest_read_bytes

    def _queue_compute(self, neurons: float, first: bool) -> None:
        """Queue the computation that a finished read makes possible."""
        gathered = self._gathered if self._choices.predicted else 1.0
        size, now = self._neuron * gathered, self._env.now
        if self._phases == 1:
            task = _Task("compute bundle", neurons * size, now)
        elif first:
            open_neurons = neurons * self._constants.up_down_share
            task = _Task("compute gate", neurons * size / 3, now, open_neurons)
        else:
            task = _Task("compute up and down", neurons * size * 2 / 3, now)
        self._tasks.append(task)
        self._news = self._ring(self._news)

    # ------------------------------------------------------------ other policies

    def wait_for_layer(self) -> Process:
        """Read all that the layer misses, then compute everything."""
        dense = self._env.process(self._compute_dense())
        yield from self._predict()
        missing = self._work.missing
        if missing > 0:
            yield from self._read_batch(missing, first=True)
            if self._phases == 2:
                yield from self._meet(1, "gate")
                open_neurons = missing * self._constants.up_down_share
                yield from self._read_batch(open_neurons, first=False)
        yield from self._compute_together(self._work.resident + missing)
        yield dense
        yield from self._meet(self._constants.graph_barriers / 2 - 2, "operations")

    def _read_batch(self, neurons: float, *, first: bool) -> Process:
        """Blocking reads by several threads; neighbours in the file are read together."""
        choices = self._choices
        start = self._env.now
        self._bus.begin_read()
        _, seconds, size = self._price_read(first)
        seconds *= neurons
        if not self._streamed:
            seconds = self._time_blocking_reads(neurons, seconds / neurons, size)
        if first:
            seconds += neurons * self._place_s
        yield self._env.timeout(seconds + self._costs.latency_s)
        self._bus.end_read(neurons * size)
        threads = "1 thread" if choices.io_threads == 1 else f"{choices.io_threads} threads"
        self._note(READ_LANE, f"{threads} read", start)

    def _time_blocking_reads(self, neurons: float, read_s: float, size_bytes: float) -> float:
        """Time until threads that read one block after the other have read all."""
        flash, threads = self._machine.flash, self._choices.io_threads
        assert flash is not None
        density = min(neurons / self._inputs.workload.step_neurons, 1.0)
        reads = neurons * (1.0 - density)  # the others continue a neighbour's read
        blocking_s = reads * max(read_s, flash.latency_s / threads)
        stream_s = neurons * size_bytes * self._costs.sequential_byte_s
        return threads * self._constants.reader_wake_s + max(blocking_s, stream_s)

    def fault_pages(self) -> Process:
        """Touch mapped weights: every page that is not in memory stops the computation."""
        missing = self._work.missing
        if missing > 0:
            start = self._env.now
            self._bus.begin_read()
            size = missing * self._neuron
            yield self._env.timeout(size * self._costs.fault_byte_s)
            self._bus.end_read(size)
            self._note(READ_LANE, "page faults", start)
        yield from self._compute_together(self._work.resident + missing)
        yield from self._meet(self._constants.graph_barriers / 2, "operations")

    # ------------------------------------------------------------------- common

    def _compute_dense(self) -> Process:
        if self._work.dense <= 0:
            return
        start = self._env.now
        yield self._env.timeout(self._constants.dense_launch_s)
        size = self._inputs.workload.dense_neuron_bytes
        yield self._bus.move("dense", self._work.dense * size)
        self._note(DENSE_LANE, "hot neurons", start)

    def _predict(self) -> Process:
        size = self._inputs.workload.predictor_bytes
        if size <= 0:
            return
        start = self._env.now
        yield self._bus.move("cpu", size)
        self._note_threads("predict", start)
        yield from self._meet(2, "predict")

    def _compute_together(self, neurons: float) -> Process:
        if neurons <= 0:
            return
        start = self._env.now
        gathered = self._gathered if self._choices.predicted else 1.0
        yield self._bus.move("cpu", neurons * self._neuron * gathered)
        self._note_threads("compute", start)

    def _meet(self, barriers: float, name: str) -> Process:
        start = self._env.now
        yield self._env.timeout(max(barriers, 0.0) * self._constants.barrier_s)
        self._note_threads(f"meet: {name}", start)

    def _note_threads(self, name: str, start_s: float) -> None:
        """Something that all compute threads did together."""
        for number in range(self._choices.compute_threads):
            self._note(f"{CPU_LANE} thread {number}", name, start_s)

    def _ring(self, event: simpy.Event) -> simpy.Event:
        """Wake who waits for ``event``; the next wait is for a new one."""
        event.succeed()
        return self._env.event()

    def _note(self, lane: str, name: str, start_s: float) -> None:
        if self._recorder is not None:
            self._recorder.add_slice(lane, name, start_s, self._env.now)
