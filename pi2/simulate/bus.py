"""Units at work, main memory as they share it, and a meter of who is at work."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import simpy

from pi2.costs.description import Description
from pi2.costs.prompts import PromptLayer, list_prompt_layers, time_once

UnitName = Literal["cpu", "dense"]
_ROUNDING_S = 1e-13
"""Seconds below which a piece of work counts as done."""


@dataclass(slots=True, eq=False)
class _Job:
    unit: Literal["cpu", "dense", "flash"]
    left_s: float
    share: float
    bytes_s: float
    done: simpy.Event
    speed: float = 0.0


@dataclass(slots=True)
class Meter:
    """Seconds in which something was at work."""

    cpu_s: float = 0.0
    dense_s: float = 0.0
    flash_s: float = 0.0
    waiting_s: float = 0.0
    """Flash at work and no compute unit."""
    read_bytes: float = 0.0


class Bus:
    """Units that share memory bandwidth, inside one SimPy environment."""

    def __init__(
        self, env: simpy.Environment, *, shared_bytes_s: float, read_overlap: float = 1.0
    ) -> None:
        """``read_overlap``: part of the shorter of reading and computing that both at once save."""
        self.env = env
        self.meter = Meter()
        self._shared = shared_bytes_s
        self._slow = 1.0 / (2.0 - read_overlap)
        self._jobs: list[_Job] = []
        self._since = env.now
        self._version = 0

    def work(
        self, unit: UnitName, seconds: float, *, bytes_s: float = 0.0, share: float = 1.0
    ) -> simpy.Event:
        """Start work of ``seconds`` on a ``share`` of a unit, with ``bytes_s`` of main memory."""
        return self._start(_Job(unit, seconds, share, bytes_s, self.env.event()))

    def read(self, seconds: float, size_bytes: float) -> simpy.Event:
        self.meter.read_bytes += size_bytes
        return self._start(_Job("flash", seconds, 1.0, 0.0, self.env.event()))

    def _start(self, job: _Job) -> simpy.Event:
        if job.left_s <= 0.0:
            job.done.succeed()
            return job.done
        self._advance()
        self._jobs.append(job)
        self._schedule()
        return job.done

    def _advance(self) -> None:
        elapsed = self.env.now - self._since
        self._since = self.env.now
        if elapsed <= 0.0:
            return
        units = {job.unit for job in self._jobs}
        meter = self.meter
        meter.cpu_s += elapsed * ("cpu" in units)
        meter.dense_s += elapsed * ("dense" in units)
        meter.flash_s += elapsed * ("flash" in units)
        meter.waiting_s += elapsed * (units == {"flash"})
        for job in self._jobs:
            job.left_s -= job.speed * elapsed

    def _schedule(self) -> None:
        taken = {"cpu": 0.0, "dense": 0.0, "flash": 0.0}
        for job in self._jobs:
            taken[job.unit] += job.share
        asked = 0.0
        both = taken["cpu"] > 0.0 and taken["flash"] > 0.0
        for job in self._jobs:
            job.speed = job.share / max(taken[job.unit], 1.0)
            if both and job.unit != "dense":
                job.speed *= self._slow
            asked += job.speed * job.bytes_s
        scale = min(1.0, self._shared / asked) if asked > 0.0 else 1.0
        first = float("inf")
        for job in self._jobs:
            if job.bytes_s > 0.0:
                job.speed *= scale
            first = min(first, max(job.left_s, 0.0) / job.speed)
        self._version += 1
        if self._jobs:
            version = self._version
            timer = self.env.timeout(first)
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: self._wake(version))

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [job for job in self._jobs if job.left_s <= _ROUNDING_S]
        if not ended:  # rounding: the first one is due
            ended = [min(self._jobs, key=lambda job: job.left_s / job.speed)]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._schedule()
        for job in ended:
            job.done.succeed()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRun:
    """Outcome of a simulated prompt."""

    tokens: int
    duration_s: float
    compute_s: float
    flash_s: float
    read_bytes: float

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.duration_s


def simulate_prefill(description: Description, tokens: int) -> PrefillRun | None:
    """Process a prompt of ``tokens``; None where the device states no arithmetic rate."""
    assert tokens > 0, tokens
    kinds = list_prompt_layers(description, tokens)
    if kinds is None:
        return None
    layers = [layer for kind in kinds for layer in [kind] * kind.count]
    stream = description.prompts.stream
    env = simpy.Environment()
    # What prompts ask of memory is in their times; only reads and the cores meet here.
    bus = Bus(
        env, shared_bytes_s=float("inf"), read_overlap=1.0 if stream is None else stream.overlap
    )
    env.run(until=env.process(_Prompt(env, bus, layers).compute()))
    return PrefillRun(
        tokens=tokens,
        duration_s=float(env.now) + time_once(description, tokens),
        compute_s=sum(layer.before_s + layer.streamed_s for layer in layers),
        flash_s=sum(layer.read_s for layer in layers) + tokens * description.embedding_s,
        read_bytes=sum(layer.read_bytes for layer in layers),
    )


class _Prompt:
    def __init__(self, env: simpy.Environment, bus: Bus, layers: list[PromptLayer]) -> None:
        self._env, self._bus, self._layers = env, bus, layers
        self._ready = simpy.Store(env)
        self._taken = simpy.Store(env)

    def compute(self) -> Generator[simpy.Event, Any, None]:
        """Compute the layers in order, each piece on arrival."""
        self._env.process(self._read())
        for layer in self._layers:
            if layer.before_s > 0.0:
                yield self._bus.work("cpu", layer.before_s)
            for _ in range(layer.pieces):
                yield self._ready.get()
                self._taken.put(None)
                yield self._bus.work("cpu", layer.streamed_s / layer.pieces)

    def _read(self) -> Generator[simpy.Event, Any, None]:
        for layer in self._layers:
            for _ in range(layer.pieces):
                read_s = layer.read_s / layer.pieces
                yield self._bus.read(read_s, layer.read_bytes / layer.pieces)
                self._ready.put(None)
                yield self._taken.get()
