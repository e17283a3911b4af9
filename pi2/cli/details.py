"""What ``-vv`` says of a run besides its summary: every segment, every layer, every counter."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from pi2.logging import get_logger

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel


def log_plan(model: LoadedModel) -> None:
    """Say how memory and neurons are divided."""
    log = get_logger(plan_digest=model.plan.digest[:12])
    sizes = dict(model.plan.plan.memory.segments)
    for name, need in model.plan.needs.items():
        log.debug("segment", segment=name, size_bytes=sizes[name], needed_bytes=need.bytes)
    for number, layer in enumerate(model.plan.layers):
        log.debug("layer", layer=number, split=dict(layer.split), hot_neurons=layer.hot_neurons)


def log_counters(model: LoadedModel) -> None:
    """Say what the neuron cache and the reads did since the model was loaded."""
    log = get_logger(plan_digest=model.plan.digest[:12])
    log.debug("counters", io_engine=model.io_engine, **asdict(model.stats))
