"""Reads the counters of a loaded model: what its parts have done since loading."""

from __future__ import annotations

from pi2.backends.dense_unit import FixedShapes
from pi2.engine.parts import Parts
from pi2.engine.speculation import Speculation
from pi2.engine.speculation_counters import SpeculationCounters
from pi2.engine.statistics import RunStatistics, UnitUse
from pi2.engine.waves import NeuronCounters
from pi2.engine.whole_forward import WholeForward


def count_run(parts: Parts, speculation: Speculation | None) -> RunStatistics:
    """Counters since loading; those of guessed tokens are in ``speculation``, if there is one."""
    if isinstance(parts.forward, WholeForward):
        return _count_whole(parts, parts.forward.counters, speculation)
    reader = parts.reader
    counters, size = parts.cache.counters, parts.cache.granule
    feed_forward = parts.feed_forward
    neurons = feed_forward.counters
    sieve = feed_forward.sieve
    weights = feed_forward.dial_counters
    return RunStatistics(
        predicted_neurons=neurons.predicted,
        active_neurons=neurons.active,
        possible_neurons=neurons.possible,
        dense_neurons=feed_forward.shares.computed,
        cache_hits=size * sum(layer.hits for layer in counters),
        cache_misses=size * sum(layer.misses for layer in counters),
        cache_skips=size * sum(layer.skips for layer in counters),
        cache_evictions=size * sum(layer.evictions for layer in counters),
        flash_read_bytes=reader.read_bytes,
        waited_s=reader.waited_s + feed_forward.waited_s,
        routed_experts=neurons.routed,
        foreseen_experts=neurons.foreseen,
        tokens_without_ahead=neurons.without_ahead,
        expert_weight=weights.weight,
        replaced_weight=weights.replaced,
        left_out_weight=weights.left_out,
        score_mass=0.0 if sieve is None else sieve.mass,
        left_out_mass=0.0 if sieve is None else sieve.left_out,
        gate_reads=reader.gate_reads,
        flash_saved_bytes=reader.saved_bytes,
        speculation=SpeculationCounters() if speculation is None else speculation.counters,
    )


def _count_whole(
    parts: Parts, neurons: NeuronCounters, speculation: Speculation | None
) -> RunStatistics:
    """Counters of a model that is computed as a whole, which does not say what neurons were
    active."""
    return RunStatistics(
        predicted_neurons=neurons.predicted,
        active_neurons=None,
        possible_neurons=neurons.possible,
        cache_hits=0,
        cache_misses=0,
        cache_skips=0,
        cache_evictions=0,
        flash_read_bytes=parts.reader.read_bytes,
        waited_s=getattr(parts.whole, "waited_s", 0.0),
        speculation=SpeculationCounters() if speculation is None else speculation.counters,
    )


def describe_units(parts: Parts) -> tuple[UnitUse, ...]:
    """What each unit beside the sparse one has done since loading."""
    if parts.layers is None:
        return ()
    resolved = parts.resolved
    return tuple(
        UnitUse(
            name=unit.name,
            owned_share=resolved.find_owned_share(unit.name),
            computed_neurons=unit.computed,
            busy_s=unit.unit.busy_s,
            lost=unit.lost,
            padding=unit.unit.padding.share if isinstance(unit.unit, FixedShapes) else None,
            emulated=bool(resolved.device.units[unit.name].emulated),
        )
        for unit in parts.feed_forward.shares.units.values()
    )
