"""How long a layer takes for a token's work, simulated once for each kind of work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import simpy

from pi2.costs.description import Description, LayerKind
from pi2.costs.reads import ALONE
from pi2.costs.terms import LayerTerms
from pi2.simulate.bus import Bus, Meter
from pi2.simulate.layer_run import LayerPlan, LayerRun, LayerWork
from pi2.tracing import Recorder


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
            neuron_bytes=sizes.whole_neuron,
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
        """Simulate one layer's FFN from the end of its attention to its sum."""
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
        """Whether attention is played with the layer."""
        return self.plan.settings.stream is not None and self.plan.streamed >= 1.0

    @property
    def looks_ahead(self) -> bool:
        """Whether reads begin before the FFN that they are for."""
        return self.plan.settings.look_ahead != "none"

    def run_ahead(self, work: LayerWork) -> LayerTimes:
        """Run the layer where reads begin earlier, as the plan's ``look_ahead`` says.

        A layer takes as long as if everything were in memory, unless the flash needs longer: from
        the attention before it on, or, with ``layer``, without ever resting.  What reading takes of
        the cores is not hidden.
        """
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
