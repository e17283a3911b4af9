"""Time of a generated token and of a prompt, as a sum of terms that can be looked at.

Every term names where it comes from; docs/lab/cost-model.md explains them.  A layer of a token:

    attention  weights of the projections, and keys and values of the context
    norm       what the FFN begins and ends with, and a mixture's router
    predict    finding the active neurons
    look up    the neuron cache: a fixed part, and one for every missing neuron
    python     what the engine does between these steps
    compute    active neurons in memory, then those that were read
    dense      neurons that an NPU or GPU computes beside the CPU
    read       missing neurons from flash
    wait       the part of ``read`` that no computation hides

Once a token there are the head, and the row of an embedding that is read from flash.  A layer
takes attention + norm + predict + look up + python + max(compute, dense) + wait.  Expected values
stand for what varies from token to token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pi2.memory.context import count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import find_block_bytes, reads_embedding
from pi2.plan.weights.layout import round_up
from pi2.planning.activity import (
    LayerActivity,
    PredictorMode,
    describe_activity,
    describe_cut_activity,
)
from pi2.planning.bundle_layout import find_range_bytes, read_stored
from pi2.planning.cost_layer import LayerCost, Settings, cost_layer, time_head, time_row
from pi2.planning.cost_memory import POSITION, count_memory
from pi2.planning.cost_sizes import measure_sizes
from pi2.planning.cost_stream import PROMPT, cost_prefill, find_stream, uses_dense
from pi2.planning.rates import Rates, check_flash, read_rates
from pi2.planning.storage_choice import Phases, find_reads
from pi2.simulate.assumptions import list_assumptions, list_dense_units
from pi2.simulate.constants import Constants

Activity = tuple[tuple[LayerActivity, ...], str]
"""Activity of every layer, and its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted time, memory and energy of a plan."""

    layers: tuple[LayerCost, ...]
    head_s: float
    prefill_tokens_s: float | None
    """None where no arithmetic rate is known."""
    memory_bytes: int
    """Expected peak: everything that is resident once the caches are full."""
    activity: str
    """Source of the neurons' activity."""
    sources: dict[str, str]
    predictor: PredictorMode = "none"
    batch: int = 1
    power_w: float | None = None
    """Power of the processor; None where the device does not state it."""
    both_w: float | None = None
    """Power of the whole device while the dense unit computes, too."""
    assumptions: tuple[str, ...] = ()
    """What is taken to be otherwise than the engine does it, a sentence each."""
    embedding_s: float = 0.0
    """Reading a token's row of the embedding, where it does not stay in memory."""

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of a sequence."""
        return sum(layer.total_s for layer in self.layers) + self.head_s + self.embedding_s

    @property
    def tokens_s(self) -> float:
        """Generated tokens per second, in all sequences."""
        return self.batch / self.token_s

    @property
    def token_j(self) -> float | None:
        """Joules of a generated token: the processor takes its power all the time, the other unit
        adds its own while it computes."""
        if self.power_w is None:
            return None
        dense_s = sum(layer.dense_s for layer in self.layers)
        added = ((self.both_w or self.power_w) - self.power_w) * min(dense_s, self.token_s)
        return (self.power_w * self.token_s + added) / self.batch

    @property
    def hit_rate(self) -> float:
        """Share of the neurons used that are in memory."""
        used = sum(layer.used for layer in self.layers)
        return 1.0 - sum(layer.missing for layer in self.layers) / used if used else 1.0


def cost_plan(
    resolved: ResolvedPlan,
    rates: Rates | None = None,
    *,
    position: int = POSITION,
    prompt: int = PROMPT,
) -> Cost:
    """What a plan costs on its device: a token with ``position`` tokens of context before it, and
    a prompt of ``prompt`` tokens.

    Raises `UserError` P351 where the device lacks figures.
    """
    rates = rates or read_rates(resolved.device, resolved.model.shape.stored_hidden)
    return cost_resolved(
        resolved, rates, store=resolved.store_path, position=position, prompt=prompt
    )


def cost_resolved(
    resolved: ResolvedPlan,
    rates: Rates,
    *,
    store: Path | None = None,
    activity: Activity | None = None,
    position: int = POSITION,
    prompt: int = PROMPT,
) -> Cost:
    """Predict the cost of a plan that has no file yet.

    ``store`` is the folder of its neuron store; ``activity`` is what `describe_activity` says of
    it, where that is known already.
    """
    plan, model = resolved.plan, resolved.model
    rates = rates.choose(plan.kv.type, plan.decode.activations)
    mode = plan.decode.predictor
    sizes = measure_sizes(model, mode, plan.kv.type, resolved.bundle)
    batch = plan.decode.batch
    if activity is None and mode == "gate" and resolved.thresholds is not None:
        activity = describe_cut_activity(model, resolved.thresholds, batch=batch)
    elif activity is None:
        activity = describe_activity(model, mode, store, batch=batch)
    uses, source = activity
    settings = read_settings(resolved, rates, position, store)
    head_s = time_head(rates, sizes, batch) / rates.scale(settings.threads) + rates.token_s
    row_s = time_row(rates, model) if reads_embedding(plan, model) else 0.0
    colds = share_cold(resolved, position)
    layers = []
    known: dict[tuple[int, float, float, float], LayerCost] = {}
    for number, layer in enumerate(resolved.layers):
        dense = layer.find_dense_share(batch)
        key = (id(uses[number]), layer.hot, colds[number], dense)
        if key not in known:
            known[key] = cost_layer(
                rates,
                sizes,
                settings,
                uses[number],
                hot=layer.hot,
                cold=colds[number],
                dense=min(dense, layer.hot),
            )
        layers.append(known[key])
    return Cost(
        layers=tuple(layers),
        head_s=head_s,
        prefill_tokens_s=cost_prefill(
            resolved, rates, sizes, uses, head_s + prompt * row_s, prompt
        ),
        memory_bytes=count_memory(resolved),
        activity=source,
        sources=rates.sources,
        predictor=mode,
        batch=batch,
        power_w=rates.power_w,
        both_w=rates.both_w if uses_dense(resolved) else rates.power_w,
        embedding_s=batch * row_s,
        assumptions=_list_assumptions(resolved, rates),
    )


def _list_assumptions(resolved: ResolvedPlan, rates: Rates) -> tuple[str, ...]:
    known = None if rates.dense is None else rates.dense.name
    takes = "no time, the device has no rates of it" if known is None else f"{known}'s time"
    others = [name for name in list_dense_units(resolved) if name != known]
    return (*list_assumptions(resolved), *(f"{name} takes {takes}" for name in others))


def read_settings(
    resolved: ResolvedPlan, rates: Rates, position: int = POSITION, store: Path | None = None
) -> Settings:
    """A plan's settings, with the time that reading a neuron takes; ``store``: its folder, whose
    order of neurons says whether neighbours share a read."""
    plan = resolved.plan
    whole = all(layer.hot >= 1.0 for layer in resolved.layers)
    reads = stream = None
    if plan.decode.predictor == "none":
        # What does not stay streams by, whatever the cache has room for.
        stream = None if whole else find_stream(resolved, rates)
    elif not whole and not _fits_cache(resolved, position):
        reads = find_reads(
            check_flash(rates, resolved.device),
            resolved.bundle.stride,
            find_range_bytes(resolved.model, resolved.bundle.stride, store),
            engine=plan.io.engine,
            threads=plan.io.threads,
            depth=plan.io.depth,
            cluster=plan.pipeline.cluster,
            overlap=rates.overlap,
            place_s=rates.room_s,
            phases=_divide_bundle(resolved, rates),
            merge_gap=_find_merge_gap(resolved, store),
        )
    return Settings(
        predictor=plan.decode.predictor,
        kv=plan.kv.type,
        threads=plan.threads.compute or rates.cores,
        look_ahead=plan.decode.look_ahead,
        policy=plan.cache.policy,
        reads=reads,
        stream=stream,
        position=min(position, plan.kv.context),
        batch=plan.decode.batch,
    )


def _find_merge_gap(resolved: ResolvedPlan, store: Path | None) -> int | None:
    """The plan's, where a mixture's neurons lie by expert.

    In other orders neighbours are missing together so rarely that rates of reads, which differ by
    more, say as much: 2 to 10 % of the requests (docs/lab/io.md).
    """
    plan = resolved.plan
    if resolved.model.moe is None or plan.pipeline.phases != 1:
        return None
    stored = read_stored(store)
    return plan.io.merge_gap if stored is not None and stored.order == "expert" else None


def _divide_bundle(resolved: ResolvedPlan, rates: Rates) -> Phases | None:
    """Two reads of a neuron, where the plan has them; pi2's own engine reads it at once."""
    bundle = resolved.bundle
    if resolved.plan.pipeline.phases == 1 or rates.measured or not bundle.is_gated:
        return None
    first = round_up(bundle.first_bytes, find_block_bytes(resolved.device))
    if first >= bundle.stride:
        return None
    return Phases(gate_bytes=first, open_share=Constants().up_down_share)


def share_cold(resolved: ResolvedPlan, position: int = POSITION) -> list[float]:
    """Part of each layer's neurons that the cache holds, with ``position`` tokens of context: in
    proportion to what is not hot."""
    neurons = resolved.model.layer_neurons
    absent = [neurons - layer.hot_neurons for layer in resolved.layers]
    room = resolved.plan.memory.segments.cold + count_lent_bytes(resolved, position)
    slots = min(room // resolved.bundle.stride, sum(absent))
    return [count * slots / sum(absent) / neurons if sum(absent) else 0.0 for count in absent]


def _fits_cache(resolved: ResolvedPlan, position: int) -> bool:
    colds = share_cold(resolved, position)
    return all(
        layer.hot + cold >= 1.0 - 1e-9 for layer, cold in zip(resolved.layers, colds, strict=True)
    )
