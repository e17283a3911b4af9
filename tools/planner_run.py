"""Run plans for tools/check_planner.py, each in a process of its own, and print JSON, a line each.

    python tools/planner_run.py my.plan.toml other.plan.toml --tokens 32 --prompt 128

Peak memory is the plan's; the rates of memory and storage are measured around the tokens, unless
--no-rates.
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
from functools import partial
from pathlib import Path
from typing import Any

from pi2.costs.kernel_times import Rates
from pi2.diagnostics import UserError
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.fitting.check import load_plan
from pi2.machine import list_allowed_cores
from pi2.measuring.contestant import BandwidthMeter, Worker
from pi2.measuring.report import Workload
from pi2.measuring.session import PlanContestant
from pi2.plan.documents.device import Device, ReadFigure
from pi2.probing.probe import METER_BYTES
from pi2.probing.storage import MIB, ReadSpec, StorageBench

TEXT_CHARACTERS = 20_000
"""Encoding a long text takes memory that is not the plan's."""
USUAL = ReadSpec(pattern="random", block_bytes=8192, depth=128)
STREAM = ReadSpec(pattern="sequential", block_bytes=4 * MIB)


def main() -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description="Run plans, and measure around them.")
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--no-rates", action="store_true")
    arguments = parser.parse_args()
    if len(arguments.plans) == 1:
        print(json.dumps(measure_plan(arguments)))
        return 0
    settings = ["--tokens", str(arguments.tokens)]
    settings += ["--no-rates"] * arguments.no_rates
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
    cores = list_allowed_cores()[: load_plan(arguments.plans[0]).plan.threads.compute]
    # Others' work on the machine makes the system put two threads on one core.
    overrides = {"threads.cores": ",".join(map(str, cores))} if cores else {}
    contestant = PlanContestant(arguments.plans[0], overrides, text)
    found: dict[str, Any] = {"prefill": None}
    try:
        if arguments.prompt:
            contestant.run(Workload("pp", min(arguments.prompt, 32), 0))
            found["prefill"] = contestant.run(Workload("pp", arguments.prompt, 0)).tokens_s
        contestant.run(Workload("tg", max(arguments.tokens // 2, 1), 0))
        peak_bytes = read_peak_rss_bytes()
        measure = (lambda contestant: {}) if arguments.no_rates else measure_rates
        before = measure(contestant)
        sample = contestant.run(Workload("tg", arguments.tokens, 0))
        rates = [before, measure(contestant)]
    finally:
        contestant.close()
    assert sample.counters is not None
    found |= {
        "decode": sample.tokens_s,
        "hits": sample.counters.hit_rate,
        "active": sample.counters.active_share,
        "named": sample.counters.predicted_share,
        "peak": peak_bytes,
        **{
            f"{name}_bytes_s": statistics.fmean(rate[name] for rate in rates)
            for name in ("memory", "read", "stream")
            if all(name in rate for rate in rates)
        },
    }
    return found


def measure_rates(contestant: PlanContestant) -> dict[str, float]:
    """Bytes per second of memory, and of single and long reads, now, as the probe measures them;
    without those that this machine cannot do."""
    parts = contestant._model._parts
    with Worker(partial(BandwidthMeter, os.cpu_count() or 1, METER_BYTES)) as meter:
        found = {"memory": max(meter.call("measure"))}
    try:
        layers = parts.texts.store.layers
    except UserError:  # a GGUF file
        return found
    path = max((layer.path for layer in layers), key=lambda p: p.stat().st_size)
    size = path.stat().st_size // MIB * MIB
    if size < MIB:
        return found
    bench = StorageBench(str(path), size, parts.cache.loops)
    try:
        names = {USUAL: "read", STREAM: "stream"}
        specs = [spec for spec in (USUAL, STREAM) if spec.block_bytes <= size]
        for spec, rates in bench.measure(specs, 2).items():
            found[names[spec]] = statistics.fmean(rates)
        return found
    finally:
        bench.close()


def scale_rates(rates: Rates, device: Device, measured: Mapping[str, Any]) -> Rates:
    """A device's rates with those of memory and storage that were measured around a run."""
    cpu = next(unit for unit in device.units.values() if unit.kind == "cpu")
    assert cpu.read_bandwidth is not None, "a probe measures it"
    bandwidth = float(cpu.read_bandwidth.value)
    memory = measured.get("memory_bytes_s", bandwidth) / bandwidth
    shares = {
        pattern: measured[name] / probed
        for pattern, name, spec in (
            ("random", "read_bytes_s", USUAL),
            ("sequential", "stream_bytes_s", STREAM),
        )
        if name in measured and (probed := _find_probed(device, spec)) is not None
    }

    def pace(points: tuple[ReadFigure, ...]) -> tuple[ReadFigure, ...]:
        return tuple(
            item.model_copy(update={"rate": item.rate * shares.get(item.pattern, 1.0)})
            for item in points
        )

    flash = rates.flash
    if flash is not None:
        flash = replace(flash, points=pace(flash.points), bursts=pace(flash.bursts))

    return replace(rates.scale_kernels(memory), flash=flash)


def _find_probed(device: Device, spec: ReadSpec) -> float | None:
    """What the device document has for such reads."""
    wanted = (spec.pattern, spec.block_bytes, spec.depth)
    return next(
        (
            float(item.rate)
            for item in device.storage.reads
            if (item.pattern, item.block, item.depth) == wanted
            and item.range is None
            and item.burst is None
        ),
        None,
    )


if __name__ == "__main__":
    sys.exit(main())
