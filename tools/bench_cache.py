"""Compare the replacement policies of the neuron cache on traces of activations.

    python tools/bench_cache.py                      synthetic statistics, skew 0.26 and 0.43
    python tools/bench_cache.py --plan PLAN --text FILE   activations of a real model

Synthetic: neurons fire as in stores of tools/synthesize.py (a gate is a normal variable around its
neuron's bias; a layer shares a part of it), independently from token to token; a predictor that
finds 98 % names 1.4 times as many.  Real: what the plan's predictor names for the tokens of a text.

Prints the share of the named neurons that were in memory, after the cache has filled, and the
time that look-ups took per layer and token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from pi2.arrays import I32
from pi2.backends.host import load_host_loops
from pi2.memory.cache import NeuronCache
from pi2.memory.policy import PolicyName, expect_uses
from pi2.progress import ignore_progress
from synthesis.hotness import find_biases, normal_cdf, solve_chances

Trace = list[list[I32]]
"""Named neurons of every token and layer, ascending stored indices."""

ACTIVE, PREDICTED, SHARED_PART = 0.10, 0.14, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A trace and what is known of it beforehand."""

    name: str
    neurons: int
    layers: int
    trace: Trace


def draw_synthetic(skew: float, *, layers: int, neurons: int, tokens: int) -> Workload:
    """A trace with the statistics of a synthetic store."""
    random = np.random.default_rng(0)
    biases = find_biases(solve_chances(neurons, ACTIVE, skew))
    low, high = 0.0, 2.0
    for _ in range(40):
        margin = (low + high) / 2
        wanted = float(normal_cdf(biases + margin).mean()) < PREDICTED
        low, high = (margin, high) if wanted else (low, margin)
    biases = (biases + margin).astype(np.float32)
    alone = np.float32(np.sqrt(1 - SHARED_PART**2))
    trace = [
        [
            np.flatnonzero(
                biases
                + np.float32(SHARED_PART * random.standard_normal())
                + alone * random.standard_normal(neurons, np.float32)
                > 0
            ).astype(np.int32)
            for _ in range(layers)
        ]
        for _ in range(tokens)
    ]
    return Workload(name=f"synthetic, skew {skew}", neurons=neurons, layers=layers, trace=trace)


def record_real(plan: Path, text: Path, tokens: int) -> Workload:
    """What a plan's predictor names for the tokens of a text, as one sequence after the other."""
    import pi2.orchestrator

    model = pi2.orchestrator.load(plan, set={"backends.cpu": "reference"})
    parts = model._parts
    cache, named = parts.cache, list[tuple[int, I32]]()
    look_up = cache.look_up

    def record(layer: int, indices: I32) -> object:
        named.append((layer, indices.copy()))
        return look_up(layer, indices)

    cache.look_up = record  # type: ignore[method-assign, assignment]
    ids = model.encode(text.read_text("utf-8"))[:tokens]
    context = model.plan.plan.kv.context
    with model:
        for first in range(0, len(ids), context):
            parts.forward.reset()
            for token in ids[first : first + context]:
                parts.forward.decode(token)
    layers, neurons = len(model.plan.layers), cache.neurons
    trace: Trace = []
    for layer, indices in named:
        if layer == 0 and (not trace or len(trace[-1]) == layers):
            trace.append([])
        if len(trace[-1]) == layer + 1:  # another wave of the same layer
            trace[-1][layer] = np.concatenate([trace[-1][layer], indices])
        else:
            trace[-1].append(indices)
    name = f"{plan.name}, {text.name}"
    return Workload(name=name, neurons=neurons, layers=layers, trace=trace)


def measure(
    workload: Workload, policy: PolicyName, *, room: float, hot: float, seeded: bool, filled: bool
) -> tuple[float, float, float]:
    """Hit rates of the first 64 tokens and of the second half, and seconds per look-up."""
    layers, neurons = workload.layers, workload.neurons
    hot_count = int(hot * neurons)
    slots = int(room * neurons * layers)
    cache = NeuronCache(
        np.zeros((slots, 1), np.uint8),
        [range(hot_count)] * layers,
        neurons,
        load_host_loops(ignore_progress),
        policy=policy,
        expected=expect_uses(layers, neurons) if seeded else None,
    )
    if filled:
        list(cache.fill())
    tokens = len(workload.trace)
    early, late, spent = [0, 0], [0, 0], 0.0
    for number, token in enumerate(workload.trace):
        for layer, indices in enumerate(token):
            for first in range(0, len(indices), max(1, cache.cold_capacity)):
                wave = indices[first : first + cache.cold_capacity]
                start = time.perf_counter()
                found = cache.look_up(layer, wave)
                spent += time.perf_counter() - start
                for part, counted in ((early, number < 64), (late, number >= tokens // 2)):
                    if counted:
                        part[0] += len(found.resident_slots)
                        part[1] += len(wave)
    return early[0] / early[1], late[0] / late[1], spent / tokens / layers


def list_variants() -> Iterator[tuple[PolicyName, bool, bool]]:
    """Policy, seeded by the stored order, cold region filled with the next hottest at the start."""
    for policy in get_args(PolicyName):
        yield policy, False, False
        yield policy, False, True
        if policy == "lfu":
            yield policy, True, True


def report(workloads: Sequence[Workload], rooms: Sequence[float], hot: Sequence[float]) -> None:
    """Print the table."""
    print("| trace | in memory | hot | policy | filled | hits, 64 tokens | hits, later | look-up |")
    print("|---|---|---|---|---|---|---|---|")
    for workload in workloads:
        for room in rooms:
            for part in hot:
                for policy, seeded, filled in list_variants():
                    early, late, spent_s = measure(
                        workload, policy, room=room, hot=room * part, seeded=seeded, filled=filled
                    )
                    name = f"{policy}, seeded" if seeded else policy
                    print(
                        f"| {workload.name} | {room:.0%} | {room * part:.0%} | {name} "
                        f"| {'yes' if filled else 'no'} | {early:.2%} | {late:.2%} "
                        f"| {spent_s * 1e6:.0f} us |",
                        flush=True,
                    )


def main() -> int:
    """Draw or record, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8, help="of the synthetic model")
    parser.add_argument("--neurons", type=int, default=14336, help="of a synthetic layer")
    parser.add_argument("--room", type=float, nargs="+", default=[0.5], help="share in memory")
    parser.add_argument(
        "--hot", type=float, nargs="+", default=[0.0, 0.5], help="hot part of what is in memory"
    )
    arguments = parser.parse_args()
    if (arguments.plan is None) != (arguments.text is None):
        parser.error("--plan and --text go together")
    if arguments.plan is not None:
        workloads = [record_real(arguments.plan, arguments.text, arguments.tokens)]
    else:
        workloads = [
            draw_synthetic(
                skew, layers=arguments.layers, neurons=arguments.neurons, tokens=arguments.tokens
            )
            for skew in (0.26, 0.43)
        ]
    report(workloads, arguments.room, arguments.hot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
