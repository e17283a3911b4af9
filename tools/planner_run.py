"""Run plans for tools/check_planner.py, each in a process of its own, and print JSON, a line each.

    python tools/planner_run.py my.plan.toml other.plan.toml --tokens 32 --prompt 128

Peak memory is the plan's; the rates of memory and storage are measured around the tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pi2.benchmarks.bandwidth import MeterRecipe
from pi2.benchmarks.plan_contestant import PlanContestant, PlanRecipe
from pi2.benchmarks.worker import Worker
from pi2.benchmarks.workloads import Workload
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.plan.device import Device, ReadFigure
from pi2.planning.rates import Linear, Rates
from pi2.probing.probe import METER_BYTES
from pi2.probing.storage import MIB, ReadSpec, StorageBench

TEXT_CHARACTERS = 20_000
"""Encoding a long text takes memory that is not the plan's."""
USUAL = ReadSpec(pattern="random", block_bytes=8192, depth=128)


def main() -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description="Run plans, and measure around them.")
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--text", type=Path)
    arguments = parser.parse_args()
    if len(arguments.plans) == 1:
        print(json.dumps(measure_plan(arguments)))
        return 0
    settings = ["--tokens", str(arguments.tokens)]
    if arguments.text is not None:
        settings += ["--text", str(arguments.text)]
    for plan in arguments.plans:
        # Prompts take most of the time, and random plans are about tokens.
        prompt = 0 if "random" in plan.name else arguments.prompt
        command = [sys.executable, __file__, str(plan), "--prompt", str(prompt), *settings]
        subprocess.run(command, check=True)
    return 0


def measure_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a plan as `pi2 bench` does: a prompt, and tokens after some that fill the cache."""
    text = None if arguments.text is None else arguments.text.read_text("utf-8")[:TEXT_CHARACTERS]
    recipe = PlanRecipe(path=arguments.plans[0], overrides={}, text=text)
    contestant = recipe(lambda label, share: None)
    found: dict[str, Any] = {"prefill": None}
    try:
        if arguments.prompt:
            contestant.run(Workload("pp", min(arguments.prompt, 32), 0))
            found["prefill"] = contestant.run(Workload("pp", arguments.prompt, 0)).tokens_s
        contestant.run(Workload("tg", max(arguments.tokens // 2, 1), 0))
        peak_bytes = read_peak_rss_bytes()
        before = measure_rates(contestant)
        sample = contestant.run(Workload("tg", arguments.tokens, 0))
        rates = [before, measure_rates(contestant)]
    finally:
        contestant.close()
    assert sample.counters is not None
    found |= {
        "decode": sample.tokens_s,
        "hits": sample.counters.hit_rate,
        "active": sample.counters.active_share,
        "named": sample.counters.predicted_share,
        "peak": peak_bytes,
        "memory_bytes_s": statistics.fmean(memory for memory, _ in rates),
        "read_bytes_s": None
        if any(disk is None for _, disk in rates)
        else statistics.fmean(disk for _, disk in rates if disk is not None),
    }
    return found


def measure_rates(contestant: PlanContestant) -> tuple[float, float | None]:
    """Bytes per second of memory and storage, now, as the probe measures them."""
    parts = contestant._model._parts
    with Worker(MeterRecipe(threads=os.cpu_count() or 1, size_bytes=METER_BYTES)) as meter:
        memory = max(meter.call("measure"))
    if parts.store is None:
        return memory, None
    path = max((layer.path for layer in parts.store.layers), key=lambda p: p.stat().st_size)
    size = path.stat().st_size // MIB * MIB
    if size < MIB:
        return memory, None
    bench = StorageBench(str(path), size, parts.executor.read_runs)
    try:
        return memory, statistics.fmean(bench.measure([USUAL], 2)[USUAL.key])
    except KeyError:
        return memory, None
    finally:
        bench.close()


def scale_rates(rates: Rates, device: Device, measured: Mapping[str, Any]) -> Rates:
    """A device's rates with those of memory and storage that were measured around a run."""
    cpu = next(unit for unit in device.units.values() if unit.kind == "cpu")
    assert cpu.read_bandwidth is not None, "a probe measures it"
    memory = measured["memory_bytes_s"] / float(cpu.read_bandwidth.value)
    probed = next((item for item in device.storage.reads if _is_usual(item)), None)
    flash = rates.flash
    if flash is not None and probed is not None and measured["read_bytes_s"]:
        share = measured["read_bytes_s"] / float(probed.rate)
        flash = replace(
            flash,
            points=tuple(replace(p, rate_bytes_s=p.rate_bytes_s * share) for p in flash.points),
            bursts=tuple(replace(p, rate_bytes_s=p.rate_bytes_s * share) for p in flash.bursts),
        )

    def scale(kernel: Linear) -> Linear:
        return replace(kernel, bytes_s=kernel.bytes_s * memory)

    return replace(
        rates,
        flash=flash,
        multiply=scale(rates.multiply),
        project=scale(rates.project),
        attend=scale(rates.attend),
        predict=scale(rates.predict),
        gather=scale(rates.gather),
    )


def _is_usual(item: ReadFigure) -> bool:
    settings = (item.pattern, item.block, item.depth, item.range, item.burst)
    return settings == ("random", USUAL.block_bytes, USUAL.depth, None, None)


if __name__ == "__main__":
    sys.exit(main())
