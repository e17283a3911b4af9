"""Records a run as a trace: lanes for the driver, compute threads, readers, queues and units.
Arrows lead from the end of a read to the next kernel."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from pi2.arrays import F32
from pi2.backends.executor import ExecutorObserver
from pi2.engine.dense_shares import ShareObserver
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.opening import Parts
from pi2.measuring.contestant import observe_parts
from pi2.measuring.report import TokenSource
from pi2.memory.bundle_files import ReadObserver
from pi2.memory.flash import PendingRead
from pi2.memory.io_engine import ReadBatch
from pi2.tracing import Recorder

DRIVER = "driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Shares of the driving thread's time."""

    tokens: int
    total_s: float
    kernels_s: float
    wait_s: float
    """Time of waiting for reads."""
    read_bytes: int
    reading_s: float
    """Time in which at least one read was on its way."""
    unit_wait_s: float = 0.0
    """Time of waiting for units next to the executor."""
    busy_s: Mapping[str, float] = field(default_factory=dict)
    """Time in which each unit next to the executor worked, by its name."""
    overlap_s: float = 0.0
    """Time in which at least two units computed; the executor, while a kernel ran, is one."""
    hidden_s: float = 0.0
    """Time in which a unit next to the executor worked without being waited for."""

    @property
    def overhead_s(self) -> float:
        """Time of everything else: Python."""
        return self.total_s - self.kernels_s - self.wait_s - self.unit_wait_s

    def describe(self) -> str:
        total = self.total_s or 1.0
        reading = min(self.reading_s / total, 1.0)
        waiting = units = ""
        if self.busy_s:
            waiting = f"waiting for units {self.unit_wait_s / total:.1%}, "
            busy = [f"{name} busy {busy_s / total:.1%}" for name, busy_s in self.busy_s.items()]
            units = (
                f"; {', '.join(busy)}, {self.hidden_s / total:.1%} without anybody waiting for it, "
                f"{self.overlap_s / total:.1%} beside kernels"
            )
        return (
            f"{self.tokens} token{'s' if self.tokens != 1 else ''} in {self.total_s:.3f} s: "
            f"kernels {self.kernels_s / total:.1%}, "
            f"waiting for reads {self.wait_s / total:.1%}, {waiting}"
            f"Python {self.overhead_s / total:.1%}; "
            f"{self.read_bytes / 1e6 / max(self.tokens, 1):.1f} MB read per token, reads on their "
            f"way in {reading:.1%} of the time{units}"
        )


Span = tuple[float, float]
"""When something began and ended, in seconds."""


@dataclass
class _Tape(ExecutorObserver, ShareObserver, ReadObserver):
    """The current recording, from ``start_s`` on, of kernels, units and reads."""

    recorder: Recorder
    threads: int
    start_s: float
    kernels_s: float = 0.0
    wait_s: float = 0.0
    read_spans: list[Span] = field(default_factory=list)
    kernel_spans: list[Span] = field(default_factory=list)
    unit_wait_spans: list[Span] = field(default_factory=list)
    unit_spans: dict[str, list[Span]] = field(default_factory=dict)
    readers: dict[int, str] = field(default_factory=dict)
    queues: dict[str, list[float]] = field(default_factory=dict)
    """When the last read of every lane of a queue ended."""
    arrivals: list[tuple[str, float]] = field(default_factory=list)
    """Lane and end of reads that no kernel has come after."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: Parts | None = None
    """Whose reads are recorded."""
    submitted: dict[int, float] = field(default_factory=dict)
    """When reads were asked for, by their identity."""
    exact: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    """Lane and end of parts that a thread of ours has read."""

    def now(self) -> float:
        return time.perf_counter() - self.start_s

    def since(self, start_s: float, end_s: float) -> Span:
        return start_s - self.start_s, end_s - self.start_s

    def note_work(self, unit: str, name: str, start_s: float, end_s: float) -> None:
        span = self.since(start_s, end_s)
        self.unit_spans.setdefault(unit, []).append(span)
        self.recorder.add_slice(unit, name, *span)

    def note_unit_wait(self, unit: str, layer: int | None, start_s: float, end_s: float) -> None:
        span = self.since(start_s, end_s)
        self.unit_wait_spans.append(span)
        name = f"wait for {unit}" if layer is None else f"wait for {unit} {layer}"
        self.recorder.add_slice(DRIVER, name, *span)

    def note_kernel(self, name: str, layer: int | None, start_s: float, end_s: float) -> None:
        name = name if layer is None else f"{name} {layer}"
        start_s, end = self.since(start_s, end_s)
        self.kernels_s += end - start_s
        self.kernel_spans.append((start_s, end))
        self.recorder.add_slice(DRIVER, name, start_s, end)
        for lane, ready_s in self.arrivals:
            self.recorder.add_flow(lane, ready_s, DRIVER, start_s)
        self.arrivals.clear()
        for thread in range(self.threads):
            self.recorder.add_slice(f"compute {thread}", name, start_s, end)

    def add_read(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        with self.lock:
            self.read_spans.append((start_s, end_s))
            self.recorder.add_slice(lane, name, start_s, end_s)

    def add_queued_read(self, queue: str, name: str, start_s: float, end_s: float) -> str:
        """Add a read to a lane of ``queue`` in which nothing else was under way; return it."""
        ends = self.queues.setdefault(queue, [])
        free = [number for number, end in enumerate(ends) if end <= start_s]
        if not free:
            free = [len(ends)]
            ends.append(0.0)
        ends[free[0]] = end_s
        lane = f"{queue} {free[0]}"
        self.add_read(lane, name, start_s, end_s)
        return lane

    def forget_sums(self) -> None:
        self.kernels_s = self.wait_s = 0.0
        for spans in (
            self.read_spans,
            self.kernel_spans,
            self.unit_wait_spans,
            *self.unit_spans.values(),
        ):
            spans.clear()

    def name_reader(self) -> str:
        """Name of the calling thread's lane."""
        with self.lock:
            return self.readers.setdefault(threading.get_ident(), f"read {len(self.readers)}")

    def note_start(self, pending: PendingRead, start_s: float) -> None:
        now = start_s - self.start_s
        self.submitted[id(pending)] = now
        if pending.batch is not None and pending.batch.content in ("rest", "run"):
            return
        assert self.parts is not None
        cache, add = self.parts.cache, self.recorder.add_counter
        hits, misses = (
            sum(getattr(x, kind) for x in cache.counters) for kind in ("hits", "misses")
        )
        add("neuron cache", now, hits=hits, misses=misses)
        add("slots", now, hot=sum(map(len, cache.hot_slots)), cold=cache.cold_capacity)

    def note_wait(self, pending: PendingRead, number: int, start_s: float, end_s: float) -> None:
        start, end = self.since(start_s, end_s)
        self.wait_s += end - start
        name = f"wait {_name_read(pending.layer, pending.number + number, pending.batch)}"
        self.recorder.add_slice(DRIVER, name, start, end)
        self._note_read(pending, number, end)
        assert self.parts is not None
        read, saved = self.parts.reader.read_bytes, self.parts.reader.saved_bytes
        self.recorder.add_counter("bytes read", end, **{"bytes": read, "left out": saved})
        if number + 1 == len(pending.clusters):
            self.submitted.pop(id(pending), None)

    def note_reads(self, batch: ReadBatch, size: int, start_s: float, end_s: float) -> None:
        (start, end), name = self.since(start_s, end_s), f"{size / 1e6:.1f} MB"
        self.wait_s += end - start
        self.recorder.add_slice(DRIVER, f"wait for {name}", start, end)
        begun = max(batch.submitted_s - self.start_s, 0.0) if batch.submitted_s else start
        self.arrivals.append((self.add_queued_read("queue", name, begun, end), end))

    def note_part(self, batch: ReadBatch, part: int, start_s: float, end_s: float) -> None:
        if batch.content == "run":
            return
        lane, (begin, end) = self.name_reader(), self.since(start_s, end_s)
        self.exact[id(batch), part] = (lane, end)
        name = f"layer {_name_read(batch.file, part, batch)}"
        self.add_read(lane, name, begin, end)

    def _note_read(self, pending: PendingRead, number: int, noticed_s: float) -> None:
        exact = self.exact.pop((id(pending.batch), number), None)
        if exact is None:
            place = pending.number + number
            name = _name_read(pending.layer, place, pending.batch)
            start = self.submitted.get(id(pending), noticed_s)
            is_run = pending.batch is not None and pending.batch.content == "run"
            queue = "read runs" if is_run else "queue"
            lane = self.add_queued_read(queue, f"layer {name}", start, noticed_s)
            exact = (lane, noticed_s)
        self.arrivals.append(exact)


def _name_read(layer: int, number: int, batch: ReadBatch | None) -> str:
    """What a part of a batch is called: ``3.0``, ``3.0 gates``, ``3.0 rest``."""
    whole = batch is None or batch.content == "neurons"
    return f"{layer}.{number}" + ("" if whole or batch is None else f" {batch.content}")


def record_run(
    model: LoadedModel, prompt: list[int], tokens: int, *, warm_up: int = 0
) -> tuple[Recorder, TraceSummary]:
    """Process ``prompt`` and ``warm_up`` tokens, then record ``tokens`` greedy ones. Synthetic
    models walk the vocabulary: greedy tokens would repeat, with their neurons cached."""
    model._check_ids(prompt, answer=tokens)
    parts = model._parts
    forward, context = parts.forward, model.plan.plan.kv.context
    warm_up = max(0, min(warm_up, context - len(prompt) - tokens))
    choose = _choose_tokens(model)
    sequences = range(len(forward.positions))
    forward.reset_all()
    tape = _Tape(Recorder(), model.compute_threads, time.perf_counter(), parts=parts)
    with observe_parts(parts, tape, tape, tape):
        logits = [forward.prefill(np.array(prompt, np.int32), sequence=n)[0] for n in sequences]
    paused = time.perf_counter()
    chosen = [choose(row, rank) for rank, row in enumerate(logits)]
    for _ in range(warm_up):
        chosen = [choose(row, 0) for row in forward.step(chosen, sequences)]
    tape.start_s += time.perf_counter() - paused
    with observe_parts(parts, tape, tape, tape):
        before, begun = parts.reader.read_bytes, tape.now()
        tape.forget_sums()
        for _ in range(tokens):
            chosen = [choose(row, 0) for row in forward.step(chosen, sequences)]
        total = tape.now() - begun
        read_bytes = parts.reader.read_bytes - before
    of_units = list(chain.from_iterable(tape.unit_spans.values()))
    waited_s = measure_overlap([of_units, tape.unit_wait_spans], at_once=2)
    return tape.recorder, TraceSummary(
        tokens=tokens * len(sequences),
        total_s=total,
        kernels_s=tape.kernels_s,
        wait_s=tape.wait_s,
        read_bytes=read_bytes,
        reading_s=measure_overlap([tape.read_spans], at_once=1),
        unit_wait_s=measure_overlap([tape.unit_wait_spans], at_once=1),
        busy_s={
            name: measure_overlap([spans], at_once=1) for name, spans in tape.unit_spans.items()
        },
        overlap_s=measure_overlap([tape.kernel_spans, *tape.unit_spans.values()], at_once=2),
        hidden_s=measure_overlap([of_units], at_once=1) - waited_s,
    )


def _choose_tokens(model: LoadedModel) -> Callable[[F32, int], int]:
    """What names the next token, given logits [vocabulary]: the likeliest but for some."""
    if not model.texts.is_synthetic:
        return lambda logits, rank: int(np.argsort(-logits, kind="stable")[rank])
    document = model.plan.model
    source = TokenSource.walk_vocabulary(document.shape.vocab, document.tokenizer.eos)
    return lambda logits, rank: int(source.take(1)[0])


def measure_overlap(lanes: Sequence[Sequence[Span]], *, at_once: int) -> float:
    """Seconds in which at least ``at_once`` of ``lanes`` are busy; spans of a lane may overlap."""
    changes: list[tuple[float, int, int]] = []
    for number, spans in enumerate(lanes):
        for start, end in spans:
            changes += [(start, 1, number), (end, -1, number)]
    depths, busy, total, before = [0] * len(lanes), 0, 0.0, 0.0
    for time_s, change, number in sorted(changes):
        if busy >= at_once:
            total += time_s - before
        was = depths[number] > 0
        depths[number] += change
        busy += (depths[number] > 0) - was
        before = time_s
    return total
