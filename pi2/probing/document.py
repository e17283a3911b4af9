"""From measurements to a device document."""

import importlib.metadata
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from pi2.backends.host import load_host_loops
from pi2.machine import describe_cpu, detect_machine, round_capacity
from pi2.measuring.contestant import BandwidthMeter
from pi2.plan.documents.device import (
    ComputeFigure,
    Device,
    KernelFigure,
    RateFigure,
    ReadFigure,
    ThreadsFigure,
)
from pi2.plan.documents.private import walk_figures
from pi2.plan.documents.quantities import (
    RATE_UNITS_OUT,
    approximate_number,
    format_bytes,
    format_quantity,
)
from pi2.probing.probe import Measurements, UnitMeasurements
from pi2.probing.steps import StepFacts, choose_times, round_digits, summarise
from pi2.probing.storage import LEAST_BYTES, ReadSpec, StorageBench, open_sample
from pi2.progress import ignore_progress

Measure = Literal["B/s", "s", "GOP/s", "share"]

_SCALES: dict[Measure, tuple[tuple[float, str], ...]] = {
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1.0, "B/s")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "GOP/s": ((1.0, "GOP/s"),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A figure and its spread."""

    label: str
    value: float
    spread: float
    """Standard deviation: of a share as it is, of anything else as a part of its value."""
    measure: Measure

    @property
    def text(self) -> str:
        """Four digits with a unit; shares in percent."""
        if self.measure == "share":
            return f"{self.value:.0%}"
        scales = _SCALES[self.measure]
        size, unit = next((item for item in scales if abs(self.value) >= item[0]), scales[-1])
        return f"{approximate_number(self.value / size, 4)} {unit}"


def list_readings(device: Device) -> Iterator[Reading]:
    """Everything that a second probe measures again."""
    for path, figure in walk_figures(device):
        found = _read_figure(figure)
        if found is None:
            continue
        settings, value, measure = found
        label = " ".join((".".join(part for part in path if isinstance(part, str)), *settings))
        yield Reading(label=label, value=value, spread=figure.spread or 0.0, measure=measure)
        if isinstance(figure, ReadFigure) and figure.overlap is not None:
            yield Reading(
                label=f"{label}, hidden by computing",
                value=figure.overlap,
                spread=figure.overlap_spread or 0.0,
                measure="share",
            )
    storage = device.storage
    if storage.latency is not None:
        yield Reading(
            label="storage.latency",
            value=float(storage.latency),
            spread=storage.latency_spread or 0.0,
            measure="s",
        )


def _read_figure(figure: BaseModel) -> tuple[list[str], float, Measure] | None:
    """What tells a figure from others of its place, and its value; None of one that is stated."""
    match figure:
        case KernelFigure():
            parts = [figure.kernel, str(figure.size)]
            parts += [] if figure.width is None else [f"width {figure.width}"]
            parts += [] if figure.kv == "fp16" else [f"kv {figure.kv}"]
            types = figure.activations
            return parts + [f"activations {types}"] * (types != "int16"), float(figure.time), "s"
        case ComputeFigure():
            return [figure.precision], figure.giga_ops, "GOP/s"
        case ReadFigure():
            parts = [figure.pattern, format_bytes(figure.block)]
            parts += [] if figure.range is None else [f"within {format_bytes(figure.range)}"]
            parts += [] if figure.depth is None else [f"depth {figure.depth}"]
            parts += [] if figure.threads is None else [f"threads {figure.threads}"]
            parts += [] if figure.burst is None else [f"{figure.burst} at a time"]
            return parts, float(figure.rate), "B/s"
        case RateFigure():
            threads = [f"threads {figure.threads}"] if isinstance(figure, ThreadsFigure) else []
            return threads, float(figure.value), "B/s"
        case _:
            return None


TOLERANCE = 0.03
"""What equal figures may differ by even where no spread was found."""
WORST_LINES = 12
"""Figures that differ are listed once more at the end, the worst ones."""
DEVIATIONS = 2.0
"""How many standard deviations of the difference count as agreement."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of both documents."""

    old: Reading
    new: Reading

    @property
    def label(self) -> str:
        return self.new.label

    @property
    def change(self) -> float:
        """Difference of the new one from the old one: of shares as it is, else a part of it."""
        old, new = self.old.value, self.new.value
        return new - old if self.new.measure == "share" else new / old - 1.0

    @property
    def allowed(self) -> float:
        """Difference that the spreads of both explain: of shares as it is, else a part."""
        return TOLERANCE + DEVIATIONS * math.hypot(self.old.spread, self.new.spread)

    @property
    def agrees(self) -> bool:
        return abs(self.change) <= self.allowed


def compare_devices(old: Device, new: Device) -> list[Row]:
    before = {item.label: item for item in list_readings(old)}
    rows = (Row(before[item.label], item) for item in list_readings(new) if item.label in before)
    return [
        row for row in rows if row.new.measure == "share" or min(row.old.value, row.new.value) > 0
    ]


def write_rows(rows: list[Row]) -> list[str]:
    width = max((len(row.label) for row in rows), default=0)
    lines = [
        f"{row.label:{width}}  {row.old.text:>11}  {row.new.text:>11}  {row.change:+7.1%}  "
        f"{'agrees' if row.agrees else 'DIFFERS'} (spreads explain {row.allowed:.1%})"
        for row in rows
    ]
    others = [row for row in rows if not row.agrees]
    lines.append(f"{len(rows) - len(others)} of {len(rows)} figures agree within their spreads")
    if others:
        lines.append(
            "the machine is noisy, or another one: "
            + ("this figure differs" if len(others) == 1 else f"these {len(others)} differ")
            + " by more than both spreads explain"
        )
        worst = sorted(others, key=lambda row: -abs(row.change))[:WORST_LINES]
        lines += [f"  {row.label}: {row.change:+.1%}" for row in worst]
        if len(others) > len(worst):
            lines.append(f"  and {len(others) - len(worst)} more")
    return lines


MIB = 1 << 20
NOISY = 0.1
"""Variation of equal work from which a machine is called noisy, and of a figure unsteady."""
UNSTEADY_LINES = 8
"""Maximum number of unsteady figures that are printed."""


def make_device(name: str, found: Measurements) -> Device:
    """The device called ``name`` with everything that was measured; no host or user names."""
    return Device.model_validate_json(json.dumps(describe_device(name, found)))


def has_rates(device: Device) -> bool:
    """Whether a device says how fast its memory or its disk is."""
    units = (unit.read_bandwidth for unit in device.units.values())
    own = (*units, device.memory.read_bandwidth, device.memory.peak_bandwidth)
    return any(figure is not None for figure in own) or bool(device.storage.reads)


def sketch_device(device: Device, folder: Path) -> Device:
    """``device``, which is this machine, with rates of the memory and of the folder's disk that are
    measured for two seconds; UserError P341."""
    cpu = next(name for name, unit in device.units.items() if unit.kind == "cpu")
    threads = detect_machine().cpu.cores
    meter = BandwidthMeter(threads, LEAST_BYTES)
    bandwidth = _rate(meter.measure(), f"{_count(threads)}, {meter.get_method()}")
    meter.close()
    specs = [ReadSpec(pattern="random", block_bytes=4096, depth=128)]
    specs.append(ReadSpec(pattern="sequential", block_bytes=512 << 10))
    with open_sample(folder, LEAST_BYTES) as (path, size_bytes):
        bench = StorageBench(str(path), size_bytes, load_host_loops(ignore_progress))
        rates = bench.measure(specs, rounds=2)
        bench.close()
    values = device.model_dump(mode="json", exclude_none=True)
    values["units"][cpu]["read_bandwidth"] = bandwidth
    values["storage"] = {
        "reads": [
            {
                "pattern": spec.pattern,
                "block": format_bytes(spec.block_bytes),
                **({} if spec.depth is None else {"depth": spec.depth}),
                **_rate(rates[spec], "direct reads", "rate"),
            }
            for spec in specs
        ]
    }
    return Device.model_validate_json(json.dumps(values))


def describe_device(name: str, found: Measurements) -> dict[str, Any]:
    return {
        "schema_version": 2,
        "id": name,
        "name": name,
        "description": describe(found),
        "units": {"cpu": _describe_cpu(found), **dict(_describe_others(found))},
        "memory": _describe_memory(found),
        "storage": _describe_storage(found),
        "noise": {
            "value": find_noise(found),
            **_origin(f"{len(found.steady_s)} times {found.steady_work}", len(found.steady_s)),
        },
    }


def write_device(device: Device, notes: Sequence[str] = ()) -> str:
    """The document as text; ``notes``: of units that were found and not measured."""
    # A bundle writes plain values.
    from pi2.authoring.writing import write_document

    noise = device.noise
    lines = [
        "# Written by `pi2 probe`.  A kind of machine: no serial numbers, host names or accounts.",
        "# Run it again to see what moves: pi2 probe -o OTHER --compare THIS",
    ]
    if noise is not None and noise.value > NOISY:
        lines.append(f"# NOISY: equal work took times that differ by {noise.value:.0%}.")
    lines += [f"# {line}" for line in describe_unsteady(device)]
    lines += [f"# {note}" for note in notes]
    return "\n".join(lines) + "\n" + write_document(device)


def describe(found: Measurements) -> str:
    text = f"{found.machine.cpu.name}, {found.threads} cores, measured by pi2 probe."
    if find_noise(found) > NOISY:
        text += " The machine was noisy: figures are worth less."
    return text


def describe_unsteady(device: Device) -> Iterator[str]:
    """Figures that differed between rounds, worst first; empty if none did."""
    found = sorted(
        (item for item in list_readings(device) if item.spread > NOISY),
        key=lambda item: -item.spread,
    )
    if found:
        count = "1 figure" if len(found) == 1 else f"{len(found)} figures"
        yield f"{count} differed by more than {NOISY:.0%} from round to round:"
    for item in found[:UNSTEADY_LINES]:
        yield f"  {item.label}: {item.text}, spread {item.spread:.0%}"
    if len(found) > UNSTEADY_LINES:
        yield f"  and {len(found) - UNSTEADY_LINES} more"


def find_noise(found: Measurements) -> float:
    """Variation of equal work: distance of the 90th percentile from the median, 1 at most."""
    ordered = sorted(found.steady_s)
    ninth = ordered[int(len(ordered) * 0.9)]
    return round(min(max(ninth / statistics.median(ordered) - 1.0, 0.0), 1.0), 4)


def _describe_cpu(found: Measurements) -> dict[str, Any]:
    # A container that has fewer cores than the machine states those.
    values = describe_cpu(found.machine.cpu, found.machine.cores)
    best = found.bandwidth[max(found.bandwidth)]
    values["read_bandwidth"] = _rate(best, f"{_count(max(found.bandwidth))}, {found.read_work}")
    values["bandwidth_by_threads"] = [
        {"threads": count, **_rate(rates, f"{_count(count)}, {found.read_work}")}
        for count, rates in found.bandwidth.items()
    ]
    values["kernels"] = list(_describe_steps(found))
    gemm = max(
        (item for item in values["kernels"] if item["kernel"] == "dense"),
        key=lambda item: (item["width"], item["size"]),
        default=None,
    )
    if gemm is not None:
        values["compute"] = [{"precision": "int8", **keep_rate(gemm)}]
    return values


def keep_rate(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's arithmetic, as a figure of its unit."""
    return {key: kernel[key] for key in ("giga_ops", "status", "source", "samples", "spread")}


def _describe_steps(found: Measurements) -> Iterator[dict[str, Any]]:
    """Kernels; UserError P343 where no possible time was measured of one."""
    memory_bytes_s = max(rate for rates in found.bandwidth.values() for rate in rates)
    for step, times in choose_times(found.step_s, memory_bytes_s).items():
        what = f"cpu backend, {_count(found.threads)}, int4 weights, hidden {step.width}"
        yield describe_step(step, times, what)


def describe_step(step: StepFacts, times: Sequence[float], what: str) -> dict[str, Any]:
    """A kernel's figure; ``what`` was measured."""
    summary = summarise(times, "less")
    rate = None if step.operations is None else step.operations / summary.value / 1e9
    values = {
        "kernel": step.kernel,
        "size": step.size,
        "time": _write_seconds(summary.value),
        "bytes": None if step.read_bytes is None else f"{step.read_bytes} B",
        "giga_ops": None if rate is None else round_digits(rate),
        "width": step.width,
        "kv": None if step.kv == "fp16" else step.kv,
        "activations": None if step.activations == "int16" else step.activations,
    }
    known = {key: value for key, value in values.items() if value is not None}
    return {**known, **_origin(what, summary.samples), "spread": summary.spread}


_NAMES = {"opencl": "OpenCL", "webgpu": "WebGPU", "cuda": "CUDA"}
_ARCHITECTURES = {"opencl": "opencl", "webgpu": "vulkan", "cuda": "cuda"}
"""What device documents call a unit that an API reaches."""


def _describe_others(found: Measurements) -> Iterator[tuple[str, dict[str, Any]]]:
    """GPUs by name: ``gpu``, ``gpu2``; emulated ones ``opencl-cpu`` or ``webgpu-cpu``."""
    counts: Counter[str] = Counter()
    for item in found.accelerators.units:
        base = f"{item.facts.api}-cpu" if item.facts.is_emulated else "gpu"
        counts[base] += 1
        name = base if counts[base] == 1 else f"{base}{counts[base]}"
        yield name, _describe_unit(item)


def _describe_unit(item: UnitMeasurements) -> dict[str, Any]:
    facts = item.facts
    architecture = _ARCHITECTURES[facts.api]
    if facts.driver.startswith("Metal"):
        architecture = "metal"
    values: dict[str, Any] = {"kind": "gpu", "model": facts.name, "architecture": architecture}
    what = f"{_NAMES[facts.api]} ({facts.driver}), int4 weights, float32 arithmetic, width 4096"
    if facts.is_emulated:
        values["emulated"] = True
        what = f"emulated by the processor: {what}"
    values["kernels"] = [describe_step(*own, what) for own in item.step_s.items()]
    values["compute"] = [
        {"precision": "fp32", **keep_rate(x)} for x in values["kernels"] if "giga_ops" in x
    ]
    largest = max(
        (step for step in item.step_s if step.kernel == "multiply"), key=lambda step: step.size
    )
    rates = [(largest.read_bytes or 0) / seconds for seconds in item.step_s[largest]]
    bandwidth = _rate(rates, f"a matrix of {largest.size} rows, {what}")
    if facts.memory_bytes is None:
        values["read_bandwidth"] = bandwidth
    else:
        values["memory"] = {
            "capacity": f"{facts.memory_bytes // MIB} MiB",
            "read_bandwidth": bandwidth,
        }
    return values


def _describe_memory(found: Measurements) -> dict[str, Any]:
    memory = found.machine.memory
    best = found.bandwidth[max(found.bandwidth)]
    values: dict[str, Any] = {
        "capacity": format_bytes(round_capacity(memory.installed_bytes)),
        "read_bandwidth": _rate(best, f"{_count(max(found.bandwidth))}, {found.read_work}"),
    }
    if 0 < memory.limit_bytes < memory.installed_bytes:
        values["usable"] = f"{memory.limit_bytes // MIB} MiB"
    return values


def _describe_storage(found: Measurements) -> dict[str, Any]:
    storage = found.storage
    latency = summarise(found.latency_s, "less")
    values: dict[str, Any] = {
        "latency": _write_seconds(latency.value),
        "latency_spread": latency.spread,
    }
    block = storage.direct.align_bytes or storage.block_bytes
    if block is not None:
        values["block_size"] = f"{block} B"
    direct = "direct" if storage.direct.works else "buffered"
    if hidden := [spec for spec in found.read_bytes_s if spec in found.overlap]:
        chosen = max(hidden, key=lambda spec: spec.depth or 0)
        overlap = summarise(found.overlap[chosen])
        values["overlap"] = {
            "value": overlap.value,
            **_origin("reads of 8 KiB next to gathered neurons", overlap.samples),
            "spread": overlap.spread,
        }
    values["reads"] = [_describe_read(spec, found, direct) for spec in found.read_bytes_s]
    return values


def _describe_read(spec: ReadSpec, found: Measurements, direct: str) -> dict[str, Any]:
    engine = "io_uring" if spec.depth is not None else "pread"
    values: dict[str, Any] = {"pattern": spec.pattern, "block": format_bytes(spec.block_bytes)}
    values |= _rate(found.read_bytes_s[spec], f"{direct} reads, {engine}", "rate")
    settings = {"depth": spec.depth, "threads": spec.threads, "burst": spec.burst}
    values |= {key: value for key, value in settings.items() if value is not None}
    if spec.range_bytes is not None:
        values["range"] = format_bytes(spec.range_bytes)
    if (shares := found.overlap.get(spec)) is not None:
        values["overlap"] = round(statistics.median(shares), 3)
        values["overlap_spread"] = round(statistics.stdev(shares), 3) if len(shares) > 1 else 0.0
    return values


def _rate(rates: Sequence[float], source: str, key: str = "value") -> dict[str, Any]:
    summary = summarise(rates, "more")
    origin = _origin(source, summary.samples)
    return {key: _write_rate(summary.value), **origin, "spread": summary.spread}


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _origin(source: str, samples: int) -> dict[str, Any]:
    version = importlib.metadata.version("pi2")
    return {"status": "measured", "source": f"pi2 probe {version}: {source}", "samples": samples}


def _write_rate(value: float) -> str:
    return format_quantity(round(round_digits(value)), RATE_UNITS_OUT)


def _write_seconds(value: float) -> str:
    return (
        format_quantity(round(value * 1e9), {"ns": 1, "us": 1000, "ms": 10**6}) if value else "0 ns"
    )
