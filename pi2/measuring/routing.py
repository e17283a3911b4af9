"""Which experts compute which tokens: recorded from real runs, kept in a file, and described.

``routing.parquet`` has a row for each expert that a token's router chose: sequence, token, layer,
expert, weight; of each layer of a token the expert with the largest weight first.  Layers without
routers are not counted, nor shared experts, which compute every token."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.backends.blocks.model import BlockModel
from pi2.backends.host import load_host_loops
from pi2.diagnostics import UserError
from pi2.engine.loaded_model import LoadedModel
from pi2.importing.conversion_job import encode_table, read_table
from pi2.measuring.texts import Window, run_windows
from pi2.memory.cache import NeuronCache
from pi2.memory.policy import PolicyName
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.progress import Progress, ignore_progress

ROUTING = "routing.parquet"
DISTANCES = (1, 4, 16)
"""Tokens that are looked back at."""
MOST_USED = 0.8
"""Share of uses that popular experts make up."""
_EXPERTS_NOTE, _BYTES_NOTE = "pi2.experts", "pi2.expert_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The experts of every token and layer."""

    experts: int
    """Experts of a layer."""
    expert_bytes: int
    """Bytes of one, the mean of all layers; 0 where that is not known."""
    sequences: I32
    """Sequence of each token [tokens], ascending."""
    chosen: I32
    """Experts [tokens, layers, k], the one with the largest weight first."""
    weights: F32
    """Their weights [tokens, layers, k]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How routing repeats itself; means over layers unless ``layer`` says which."""

    popular: float
    """Share of a layer's experts that make up 80 % of its uses."""
    touched: float
    """Share of a layer's experts that any token used."""
    reuse: Mapping[int, float]
    """Share of a token's experts that one of so many earlier tokens used as well."""
    shuffled: Mapping[int, float]
    """The same with tokens in random order: the effect of popularity."""


def observe_routing(
    model: LoadedModel, windows: Sequence[Window], progress: Progress = ignore_progress
) -> RoutingTrace:
    """Note the routing of every token of ``windows``.  UserError P524 without experts, P662 if the
    unit keeps its program to itself."""
    resolved, program = model.plan, model._parts.model.program
    moe = resolved.model.moe
    if moe is None:
        raise UserError.of("P524", f"{resolved.model.id!r} is not an MoE model")
    if program is None or program.pairs is None or not model.account.is_timed:
        raise UserError.of(
            "P662",
            f"unit {resolved.sparse_unit!r} keeps the routing of {resolved.model.id!r} to itself",
            help="take a plan in which a CPU computes the model",
        )
    pairs, layers = program.pairs, program.choices
    found: dict[int, list[tuple[I32, F32]]] = {layer: [] for layer in sorted(layers.values())}

    def note(number: int) -> None:
        if number in layers:
            found[layers[number]].append((pairs.chosen.copy(), pairs.weights.copy()))

    program.watch(note)
    try:
        for _ in run_windows(model, windows, partial(progress, "recording")):
            pass
    finally:
        program.watch(None)
    by_layer = [
        [np.concatenate(own) for own in zip(*calls, strict=True)] for calls in found.values()
    ]
    chosen, weights = (
        np.stack([own.reshape(-1, pairs.active) for own in kind], axis=1)
        for kind in zip(*by_layer, strict=True)
    )
    order = np.argsort(-weights, axis=2, kind="stable")
    sizes = [len(window.tokens) for window in windows]
    return RoutingTrace(
        experts=moe.experts,
        expert_bytes=_count_expert_bytes(resolved, program, len(layers) * moe.experts),
        sequences=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        chosen=np.take_along_axis(chosen, order, axis=2),
        weights=np.take_along_axis(weights, order, axis=2),
    )


def _count_expert_bytes(resolved: ResolvedPlan, program: BlockModel, experts: int) -> int:
    matrices = [own.weight for own in program.matrices if own.weight.experts > 1]
    if matrices:
        return sum(weight.size_bytes for weight in matrices) // experts
    return resolved.model.shape.ffn * resolved.bundle.stride


def encode_trace(trace: RoutingTrace, notes: Mapping[str, str]) -> bytes:
    tokens, layers, chosen = trace.chosen.shape
    columns = {
        "sequence": np.repeat(trace.sequences, layers * chosen),
        "token": np.repeat(np.arange(tokens, dtype=np.int32), layers * chosen),
        "layer": np.tile(np.repeat(np.arange(layers, dtype=np.int32), chosen), tokens),
        "expert": trace.chosen.reshape(-1),
        "weight": trace.weights.reshape(-1),
    }
    own = {_EXPERTS_NOTE: str(trace.experts), _BYTES_NOTE: str(trace.expert_bytes)}
    return encode_table(columns, {**notes, **own})


def read_trace(path: Path) -> RoutingTrace:
    """Read a trace; `UserError` P540 if the file is none."""

    def refuse(problem: str) -> UserError:
        return UserError.of(
            "P540",
            f"{path} has no routing: {problem}",
            help="give the routing.parquet of `pi2 activations --routing`",
        )

    types = dict.fromkeys(("sequence", "token", "layer", "expert"), "int64")
    try:
        columns, notes = read_table(path, {**types, "weight": "float"}, refuse)
        experts, expert_bytes = int(notes[_EXPERTS_NOTE]), int(notes[_BYTES_NOTE])
        sequence, token, layer, expert, weight = columns.values()
        tokens, layers = int(token.max()) + 1, int(layer.max()) + 1
        shape = (tokens, layers, len(token) // (tokens * layers))
        order = np.lexsort((-weight, layer, token))
        places = np.repeat(np.arange(tokens * layers), shape[2])
        if (token[order] * layers + layer[order] != places).any():
            raise ValueError("tokens or layers have different numbers of experts")
        if expert.min() < 0 or expert.max() >= experts or expert_bytes < 0:
            raise ValueError("an expert that there is not")
    except FileNotFoundError:
        raise UserError.of(
            "P540",
            f"no routing at {path}",
            help="record it: `pi2 activations PLAN --text FILE --routing -o STATS`",
        ) from None
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise refuse(str(error) or type(error).__name__) from None
    return RoutingTrace(
        experts=experts,
        expert_bytes=expert_bytes,
        sequences=sequence[order].reshape(shape)[:, 0, 0].astype(np.int32),
        chosen=expert[order].reshape(shape).astype(np.int32),
        weights=weight[order].reshape(shape).astype(np.float32),
    )


def measure_locality(trace: RoutingTrace, layer: int | None = None) -> Locality:
    layers = range(trace.chosen.shape[1]) if layer is None else [layer]
    order = np.random.default_rng(0).permutation(len(trace.chosen))
    popular, touched = [], []
    reuse: dict[int, list[float]] = {distance: [] for distance in DISTANCES}
    shuffled: dict[int, list[float]] = {distance: [] for distance in DISTANCES}
    for number in layers:
        chosen = trace.chosen[:, number]
        counts = np.sort(np.bincount(chosen.reshape(-1), minlength=trace.experts))[::-1]
        popular.append(_find_popular(counts) / trace.experts)
        touched.append(float((counts > 0).mean()))
        for distance in DISTANCES:
            reuse[distance].append(_measure_reuse(chosen, trace.sequences, distance))
            mixed = _measure_reuse(chosen[order], np.zeros(len(order), np.int32), distance)
            shuffled[distance].append(mixed)
    return Locality(
        popular=float(np.mean(popular)),
        touched=float(np.mean(touched)),
        reuse={distance: float(np.mean(values)) for distance, values in reuse.items()},
        shuffled={distance: float(np.mean(values)) for distance, values in shuffled.items()},
    )


def _find_popular(counts: I64) -> float:
    """Experts that make up `MOST_USED` of ``counts`` (descending), a part of the last one."""
    running = np.cumsum(counts)
    wanted = MOST_USED * running[-1]
    place = int(np.searchsorted(running, wanted))
    before = running[place - 1] if place else 0
    return float(place + (wanted - before) / counts[place])


def _measure_reuse(chosen: I32, sequences: I32, distance: int) -> float:
    """Share of ``chosen`` [tokens, k] that a token within ``distance`` before also chose."""
    tokens = len(chosen)
    used = np.zeros((tokens, int(chosen.max()) + 1), bool)
    np.put_along_axis(used, chosen, True, axis=1)
    again = np.zeros_like(used)
    for back in range(1, min(distance, tokens - 1) + 1):
        again[back:] |= used[back:] & used[:-back]
    counts = np.zeros(tokens, bool)
    counts[distance:] = sequences[distance:] == sequences[: max(0, tokens - distance)]
    total = used[counts].sum()
    return float(again[counts].sum() / total) if total else 0.0


ReplayPolicy = Literal["lru", "lfu", "lru-layer", "lfu-layer", "belady", "belady-layer"]
POLICIES: tuple[ReplayPolicy, ...] = get_args(ReplayPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a cache did with a trace."""

    policy: ReplayPolicy
    slots: int
    """Experts that it has room for."""
    share: float
    """The same as a share of all experts."""
    hit_rate: float
    """Share of the chosen experts that were in memory, of the tokens that count."""
    reads_token: float
    """Experts read per token."""


def replay_trace(trace: RoutingTrace, policy: ReplayPolicy, slots: int, *, skip: int = 0) -> Replay:
    """Take ``trace`` through an empty cache of ``slots``; the first ``skip`` tokens do not count. A
    cache by layer divides the slots evenly, the rest going to the first layers."""
    tokens, layers, _ = trace.chosen.shape
    requests = np.sort(trace.chosen, axis=2)
    parts = [(requests, slots)]
    if policy.endswith("layer"):
        counts = [slots // layers + (layer < slots % layers) for layer in range(layers)]
        parts = [(requests[:, [layer]], count) for layer, count in enumerate(counts)]
    replay = _foresee if policy.startswith("belady") else _replay_engine
    name: PolicyName = "lru" if policy.startswith("lru") else "lfu"
    hits = np.concatenate([replay(own, trace.experts, n, name) for own, n in parts], axis=1)
    counted = hits[skip:]
    chosen = requests[skip:].size
    found = int(counted.sum())
    return Replay(
        policy=policy,
        slots=slots,
        share=slots / (layers * trace.experts),
        hit_rate=found / max(1, chosen),
        reads_token=(chosen - found) / max(1, tokens - skip),
    )


def _replay_engine(requests: I32, experts: int, slots: int, policy: PolicyName) -> I32:
    """Hits [tokens, layers]; experts for which a token leaves no slot are missed, not kept."""
    tokens, layers, _ = requests.shape
    loops, arena = load_host_loops(ignore_progress), np.zeros((slots, 1), np.uint8)
    cache = NeuronCache(arena, [range(0)] * layers, experts, loops, policy=policy)
    hits = np.zeros((tokens, layers), np.int32)
    for token in range(tokens):
        for layer in range(layers):
            found = cache.look_up(layer, requests[token, layer][: cache.cold_capacity])
            hits[token, layer] = len(found.resident_slots)
    return hits


def _foresee(requests: I32, experts: int, slots: int, _: PolicyName) -> I32:
    """Hits [tokens, layers] if the latest needed leaves, or does not enter."""
    tokens, layers, _chosen = requests.shape
    requests = requests + np.arange(layers, dtype=np.int32)[:, None] * np.int32(experts)
    count, requests = tokens * layers, requests.reshape(tokens * layers, -1)
    following = np.full(requests.shape, count, np.int64)
    last: dict[int, int] = {}
    for number in range(count - 1, -1, -1):
        for place, key in enumerate(requests[number].tolist()):
            following[number, place] = last.get(key, count)
            last[key] = number
    hits = np.zeros(count, np.int32)
    next_use: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    for number in range(count):
        keys = requests[number].tolist()
        hits[number] = sum(key in next_use for key in keys)
        for key, use in zip(keys, following[number].tolist(), strict=True):
            if key not in next_use and len(next_use) >= slots:
                while heap and next_use.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if not heap or -heap[0][0] <= use:
                    continue
                del next_use[heapq.heappop(heap)[1]]
            next_use[key] = use
            heapq.heappush(heap, (-use, key))
    return hits.reshape(tokens, layers)
