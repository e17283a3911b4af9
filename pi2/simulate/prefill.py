"""Prompt processing: dense, layer by layer, weights streamed where they are not in memory."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from pi2.costs.description import Description
from pi2.costs.prompts import PromptLayer, list_prompt_layers, time_once
from pi2.simulate.bus import Bus


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
        """Tokens per second."""
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
        env,
        shared_bytes_s=float("inf"),
        read_overlap=1.0 if stream is None else stream.overlap,
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
    """A thread that reads pieces, one ahead of the one that is computed."""

    def __init__(self, env: simpy.Environment, bus: Bus, layers: list[PromptLayer]) -> None:
        self._env, self._bus, self._layers = env, bus, layers
        self._ready = simpy.Store(env)
        self._taken = simpy.Store(env)

    def compute(self) -> Generator[simpy.Event, Any, None]:
        """Compute the layers in order, each piece when it is there."""
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
