"""Rules about devices, threads, memory and the sizes of bundles."""

from collections.abc import Hashable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from pi2.plan.arithmetic.resolved import uses_main_memory
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.device import (
    EXAMPLE_READS,
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
    format_bytes,
    format_quantity,
    write_least,
    write_most,
)
from pi2.plan.toml.text import KeyPath


@rule("P252", "error", "device")
def check_clusters_of_cpus(facts: Facts) -> Iterator[Finding]:
    seen: set[str] = set()
    for name, unit in facts.device.units.items():
        for key in ("features", "clusters"):
            if unit.kind != "cpu" and getattr(unit, key):
                yield Finding(
                    ("units", name, key),
                    f"`{key}` belongs to CPUs, the unit `{name}` is of kind {unit.kind}",
                    f"move `{key}` to a unit of kind cpu",
                    at="key",
                )
        for number, cluster in enumerate(unit.clusters):
            if cluster.id in seen:
                yield Finding(
                    ("units", name, "clusters", number, "id"),
                    f"two clusters are called `{cluster.id}`",
                    "give every cluster its own id",
                )
            seen.add(cluster.id)


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


_CORE_BYTES_S = 64e9
"""Most bandwidth of main memory for each core of a processor: Apple's Ultra chips have 42 GB/s."""
_MOST_READS = {"ufs": 6e9, "nvme": 16e9, "sata": 0.6e9, "emmc": 0.6e9, "sd": 2e9}
"""What interfaces pass at most: UFS 4.1, four lanes of PCI Express 5, SATA 3, HS400, SD Express."""


@rule("P731", "warning", "device")
def check_figures_are_plausible(facts: Facts) -> Iterator[Finding]:
    device = facts.device
    cores = sum(item.cores for unit in device.units.values() for item in unit.clusters)
    peak = device.memory.peak_bandwidth or device.memory.read_bandwidth
    if peak is not None and cores and peak.value > cores * _CORE_BYTES_S:
        key = "read_bandwidth" if device.memory.peak_bandwidth is None else "peak_bandwidth"
        most = format_quantity(cores * _CORE_BYTES_S, RATE_UNITS_OUT)
        yield Finding(
            ("memory", key, "value"),
            f"{format_quantity(peak.value, RATE_UNITS_OUT)} of memory for {cores} cores: "
            f"processors of so many have less than {most}",
            'write the transfers and the width of the bus, such as value = "6400 MT/s x 128 bit"; '
            "a card's memory is units.NAME.memory",
        )
    most_reads = _MOST_READS.get(device.storage.kind or "")
    for number, item in enumerate(device.storage.reads):
        if most_reads is not None and item.rate > most_reads:
            yield Finding(
                ("storage", "reads", number, "rate"),
                f"{device.storage.kind} reads at most "
                f"{format_quantity(most_reads, RATE_UNITS_OUT)}, this is "
                f"{format_quantity(item.rate, RATE_UNITS_OUT)}",
                "correct the number or its unit (Gbit/s / 8 = GB/s), or storage.kind",
            )


@rule("P730", "warning", "device")
def check_claimed_arithmetic_is_a_peak(facts: Facts) -> Iterator[Finding]:
    for name, unit in facts.device.units.items():
        for number, item in enumerate(unit.compute):
            if item.status == "vendor-claimed" and not item.peak:
                yield Finding(
                    ("units", name, "compute", number, "giga_ops"),
                    "a vendor's arithmetic rate is taken whole, which programs do not reach",
                    "write peak = true: predictions take half of it",
                )


@rule("P732", "warning", "device")
def check_reads_of_both_patterns(facts: Facts) -> Iterator[Finding]:
    stated = {item.pattern for item in facts.device.storage.reads}
    for pattern in sorted({"random", "sequential"} - stated) if stated else ():
        yield Finding(
            ("storage", "reads"),
            f"no {pattern} reads are stated: models beyond memory cannot be planned",
            f"write the data sheet's: {EXAMPLE_READS[pattern]}",
        )


def _write(value: float, key: str, units: Units | None) -> str:
    if units is not None:
        return format_quantity(value, units)
    return approximate_number(value, 6) if key == "giga_ops" else format_bytes(int(value))


@rule("P256", "error", "device")
def check_figures_stated_once(facts: Facts) -> Iterator[Finding]:
    device = facts.device
    reads = [
        (item.pattern, item.block, item.range, item.depth, item.threads, item.cluster, item.burst)
        for item in device.storage.reads
    ]
    yield from _find_again(("storage", "reads"), reads, "the same reads")
    for name, unit in device.units.items():
        operands = [item.precision for item in unit.compute]
        yield from _find_again(("units", name, "compute"), operands, "the same operands")
        features = unit.features or ()
        yield from _find_again(("units", name, "features"), features, "the same feature")


def _find_again(path: KeyPath, items: Sequence[Hashable], what: str) -> Iterator[Finding]:
    first: dict[Hashable, int] = {}
    for number, item in enumerate(items):
        if item in first:
            origin = Origin("device", (*path, first[item]), "the first one")
            yield Finding(
                (*path, number),
                f"{what} are stated twice",
                "remove one of them, or state the difference",
                origins=(origin,),
            )
        first.setdefault(item, number)


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
    cold = sizes["cold"]
    for name, unit in memory.units.items():
        if name in facts.device.units and uses_main_memory(facts.plan, facts.device, name):
            sizes[f"units.{name}"] = int(unit.budget)
    total = sum(sizes.values())
    excess = total - memory.budget
    if excess <= 0:
        return
    largest = max(sizes, key=lambda name: sizes[name])
    help_text = f"raise the budget to {write_least(total)}"
    if cold > excess:
        help_text += f", or lower cold to {write_most(cold - excess)}"
    yield Finding(
        ("memory", "budget"),
        f"the segments{_name_units(sizes)} add up to {format_bytes(total)}, "
        f"{approximate_bytes(excess)} more than the budget of {format_bytes(memory.budget)}",
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
