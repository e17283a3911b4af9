"""How long a layer takes for a token's work, simulated once for each kind of work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import simpy

from pi2.simulate.bus import Bus, Meter
from pi2.simulate.inputs import SimulationInput
from pi2.simulate.layer_run import LayerRun, LayerWork
from pi2.simulate.read_costs import compute_read_costs
from pi2.tracing import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Outcome of a layer's FFN."""

    duration_s: float
    meter: Meter


class LayerSimulation:
    """Simulates layers of one plan; equal work takes equal time, and is simulated once."""

    def __init__(self, inputs: SimulationInput) -> None:
        self._inputs = inputs
        self.costs = compute_read_costs(inputs)
        self._known: dict[LayerWork, LayerTimes] = {}

    def run(self, work: LayerWork, recorder: Recorder | None = None) -> LayerTimes:
        """Simulate one layer's FFN from the end of its attention to its sum."""
        if recorder is None and work in self._known:
            return self._known[work]
        machine = self._inputs.machine
        env = simpy.Environment()
        bus = Bus(
            env,
            cpu_bytes_s=machine.cpu_bytes_s,
            dense_bytes_s=machine.dense_bytes_s or 1.0,
            shared_bytes_s=machine.shared_bytes_s,
            read_overlap=machine.read_overlap,
        )
        run = LayerRun(env, bus, self._inputs, self.costs, work, recorder)
        policies = {
            "neuron-cluster": run.flow_clusters,
            "layer-barrier": run.wait_for_layer,
            "mmap": run.fault_pages,
        }
        env.run(until=env.process(policies[self._inputs.choices.policy]()))
        times = LayerTimes(duration_s=env.now, meter=bus.meter)
        if recorder is None:
            self._known[work] = times
        return times

    @property
    def looks_ahead(self) -> bool:
        """Whether reads begin before the FFN that they are for."""
        return self._inputs.choices.look_ahead != "none"

    def run_ahead(self, work: LayerWork, attention_s: float) -> LayerTimes:
        """Run the layer where reads begin earlier, as the plan's ``look_ahead`` says.

        A layer takes as long as if everything were in memory, unless the flash needs longer: from
        the attention before it on, or, with ``layer``, without ever resting.  What reading takes of
        the cores is not hidden.
        """
        times, mode = self.run(work), self._inputs.choices.look_ahead
        if mode == "none" or work.missing <= 0:
            return times
        resident = replace(work, resident=work.resident + work.missing, missing=0.0)
        ready = self.run(resident)
        overlap = self._inputs.machine.read_overlap
        if mode == "attention":
            duration_s = max(ready.duration_s, times.duration_s - overlap * attention_s)
        else:
            read_s, busy_s = times.meter.flash_s, attention_s + ready.duration_s
            duration_s = ready.duration_s + read_s - overlap * min(read_s, busy_s)
        meter = replace(
            ready.meter,
            flash_s=times.meter.flash_s,
            read_bytes=times.meter.read_bytes,
            waiting_s=max(0.0, duration_s - ready.duration_s),
        )
        return LayerTimes(duration_s=duration_s, meter=meter)
