"""Rules about devices, threads, memory and the sizes of bundles."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from pi2.plan.arithmetic.resolved import uses_main_memory
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.device import (
    ComputeFigure,
    CpuCluster,
    KernelFigure,
    Memory,
    PowerFigure,
    RateFigure,
    ReadFigure,
    Storage,
)
from pi2.plan.documents.plan_units import list_cores, parse_selector
from pi2.plan.documents.private import walk_values
from pi2.plan.documents.quantities import (
    HERTZ_UNITS,
    RATE_UNITS_OUT,
    SECOND_UNITS,
    WATT_UNITS,
    Units,
    approximate_bytes,
    approximate_number,
    compare_bytes,
    format_bytes,
    format_quantity,
    write_least,
    write_most,
)
from pi2.plan.toml.text import KeyPath

_Bounds = tuple[float, float, Units | None]
_LIMITS: tuple[tuple[type[BaseModel], str, _Bounds], ...] = (
    (RateFigure, "value", (1e6, 1e14, RATE_UNITS_OUT)),
    (ReadFigure, "rate", (1e3, 1e12, RATE_UNITS_OUT)),
    (ReadFigure, "block", (1, 2**30, None)),
    (ReadFigure, "range", (512, 2**50, None)),
    (PowerFigure, "value", (1e-3, 1e5, WATT_UNITS)),
    (ComputeFigure, "giga_ops", (1e-3, 1e8, None)),
    (KernelFigure, "time", (1e-9, 1e4, SECOND_UNITS)),
    (KernelFigure, "giga_ops", (1e-3, 1e8, None)),
    (KernelFigure, "bytes", (1, 2**50, None)),
    (CpuCluster, "frequency", (1e6, 1e11, HERTZ_UNITS)),
    (Memory, "capacity", (2**20, 2**50, None)),
    (Memory, "usable", (2**20, 2**50, None)),
    (Storage, "latency", (1e-9, 10.0, SECOND_UNITS)),
)
"""Least and most of a key, and its units; None for bytes and plain numbers."""


@rule("P261", "error", "device")
def check_figures_are_possible(facts: Facts) -> Iterator[Finding]:
    for path, item in walk_values(facts.device, ()):
        for kind, key, (least, most, units) in _LIMITS:
            if not isinstance(item, kind):
                continue
            value = getattr(item, key)
            if value is None or least <= value <= most:
                continue
            wanted = f"from {_write(least, key, units)} to {_write(most, key, units)}"
            yield Finding(
                (*path, key),
                f"no machine has {_write(value, key, units)} here: figures are {wanted}",
                "correct the number or its unit, or leave the figure out; on the device, "
                "`pi2 probe` measures most of them",
            )


def _write(value: float, key: str, units: Units | None) -> str:
    if units is not None:
        return format_quantity(value, units)
    return approximate_number(value, 6) if key == "giga_ops" else format_bytes(int(value))


MOST_CORES = 1024
"""Bound of the numbers of cores; a plan may ask for as many threads."""


@rule("P236", "error", "plan")
def check_threads_bound_to_cores(facts: Facts) -> Iterator[Finding]:
    threads = facts.plan.threads
    if threads.cores is None:
        return
    path = ("threads", "cores")
    for first, last in parse_selector(threads.cores):
        if first > last:
            yield Finding(
                path,
                f"the range {first}-{last} is reversed and names no core",
                f'write "{last}-{first}"',
            )
            return
        if last >= MOST_CORES:
            yield Finding(path, f"no machine has a core {last}")
            return
    cores = list_cores(threads.cores)
    twice = sorted({core for core in cores if cores.count(core) > 1})
    if twice:
        yield Finding(
            path,
            f"core {twice[0]} is named twice",
            "two threads on one core take turns: name different ones",
        )
    elif threads.compute is not None and threads.compute != len(cores):
        yield Finding(
            path,
            f"{len(cores)} cores for {threads.compute} compute threads",
            "name a core for each thread, or leave threads.compute out",
            origins=(Origin("plan", ("threads", "compute"), f"compute = {threads.compute}"),),
        )


@rule("P230", "error", "plan", "device")
def check_threads_fit_cores(facts: Facts) -> Iterator[Finding]:
    threads = facts.plan.threads.compute
    clusters = {
        name: sum(cluster.cores for cluster in unit.clusters)
        for name, unit in facts.device.units.items()
        if unit.clusters
    }
    cores = sum(clusters.values())
    if threads is None or not clusters or threads <= cores:
        return
    yield Finding(
        ("threads", "compute"),
        f"{threads} compute threads, the device `{facts.device.id}` has {cores} cores",
        f"write compute = {cores}, or leave it out",
        origins=tuple(
            Origin(
                "device", ("units", name, "clusters"), f"the clusters of {name} have {number} cores"
            )
            for name, number in clusters.items()
        ),
    )


@rule("P201", "error", "plan", "device")
def check_segments_fit_budget(facts: Facts) -> Iterator[Finding]:
    memory = facts.plan.memory
    sizes = {name: int(size) for name, size in memory.segments}
    for name, unit in memory.units.items():
        if name in facts.device.units and uses_main_memory(facts.plan, facts.device, name):
            sizes[f"units.{name}"] = int(unit.budget)
    total = sum(sizes.values())
    excess = total - memory.budget
    if excess <= 0:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    help_text = f"raise the budget to {write_least(total)}"
    if sizes["cold"] > excess:
        help_text += f", or lower cold to {write_most(sizes['cold'] - excess)}"
    whole, budget = compare_bytes(total, memory.budget)
    yield Finding(
        ("memory", "budget"),
        f"the segments{_name_units(sizes)} add up to {whole}, "
        f"{approximate_bytes(excess)} more than the budget of {budget}",
        help_text,
        origins=(
            Origin(
                "plan",
                _find_key(largest),
                f"the largest is {largest} with {format_bytes(sizes[largest])}",
            ),
        ),
    )


def _name_units(sizes: Mapping[str, int]) -> str:
    return " and units" if any(name.startswith("units.") for name in sizes) else ""


def _find_key(name: str) -> KeyPath:
    unit = name.removeprefix("units.")
    return ("memory", "units", unit, "budget") if unit != name else ("memory", "segments", name)
