"""Rules about devices, threads and memory; compute units, their backends and shares."""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from pi2.plan.arithmetic.resolved import (
    find_backend,
    find_sparse_unit,
    list_placed_splits,
    uses_main_memory,
)
from pi2.plan.checking import Facts, Finding, Origin, list_row_splits, rule
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


@rule("P232", "error", "plan", "device")
def check_backends_for_units(facts: Facts) -> Iterator[Finding]:
    plan, device = facts.plan, facts.device
    paths: dict[str, KeyPath] = {}
    for placed in (*list_placed_splits(plan), *list_row_splits(plan)):
        for unit, share in placed.split.items():
            if share > 0:
                paths.setdefault(unit, (*placed.path, unit))
    if plan.prefill.unit is not None:
        paths.setdefault(plan.prefill.unit, ("prefill", "unit"))
    for unit, path in paths.items():
        if unit not in device.units or find_backend(plan, device, unit) is not None:
            continue
        kind = device.units[unit].kind
        listed = ", ".join(f'{key} = "{value}"' for key, value in plan.backends.items())
        yield Finding(
            path,
            f"no backend is named for units of kind `{kind}`, such as `{unit}`",
            f"add a backend for {kind} to `backends`, or give the work to another unit",
            at="value" if path == ("prefill", "unit") else "key",
            origins=(Origin("plan", ("backends",), f"backends: {listed or 'none'}"),),
        )


@rule("P262", "error", "resolved")
def check_layers_have_one_dense_unit(facts: Facts) -> Iterator[Finding]:
    sparse = find_sparse_unit(facts.plan, facts.device)
    subjects = {}
    for placed in list_placed_splits(facts.plan):
        subjects[placed.path] = placed.subject
        dense = _list_dense(placed.split, sparse)
        if len(dense) > 1:
            yield Finding(
                placed.path,
                f"{placed.subject} have two units next to `{sparse}`: "
                f"{', '.join(f'`{name}`' for name in dense)}",
                f"give the share of `{dense[-1]}` to `{dense[0]}` or `{sparse}`",
            )
    seen = set()
    for number, layer in enumerate(facts.resolved.layers):
        first: str | None = None
        for path, split in layer.splits.items():
            dense = _list_dense(split, sparse)
            if len(dense) != 1:
                continue
            if first is None:
                first = dense[0]
            elif dense[0] != first and path not in seen:
                seen.add(path)
                yield Finding(
                    path,
                    f"{subjects[path]} name `{dense[0]}`, and layer {number} has "
                    f"`{first}` otherwise",
                    f"name `{first}` here as well: a unit keeps its neurons for every batch",
                )


def _list_dense(split: Mapping[str, float], sparse: str) -> list[str]:
    return [name for name, share in split.items() if share > 0 and name != sparse]


@rule("P267", "error", "plan", "device")
def check_rows_have_one_unit(facts: Facts) -> Iterator[Finding]:
    plan, sparse = facts.plan, find_sparse_unit(facts.plan, facts.device)
    found: list[str] = []
    for placed in list_row_splits(plan):
        if placed.split.get(sparse, 0.0) <= 0:
            yield Finding(
                placed.path,
                f"`{sparse}` has no rows of {placed.subject}",
                f"give it a part, such as {sparse} = 0.1, and the others less",
            )
        for name, share in placed.split.items():
            if share <= 0 or name == sparse or name in found:
                continue
            found.append(name)
            if len(found) > 1:
                yield Finding(
                    (*placed.path, name),
                    f"rows are given to `{found[0]}` and to `{name}`",
                    f"give the share of `{name}` to `{found[0]}` or `{sparse}`",
                    at="key",
                )
                continue
            settings = plan.units.get(name)
            if settings is not None and settings.on_failure != "stop":
                yield Finding(
                    ("units", name, "on_failure"),
                    f"a run cannot go on without `{name}`, which has rows of {placed.subject}",
                    'write on_failure = "stop", or take the rows from the unit',
                    origins=(Origin("plan", placed.path, f"{name} = {share:g}"),),
                )


TOLERANCE = 1e-6


@rule("P210", "error", "plan")
def check_split_adds_up(facts: Facts) -> Iterator[Finding]:
    for placed in (*list_placed_splits(facts.plan), *list_row_splits(facts.plan)):
        yield from _check_split(placed.split, placed.path, placed.subject)


def _check_split(split: Mapping[str, float], path: KeyPath, subject: str) -> Iterator[Finding]:
    total = sum(split.values())
    if abs(total - 1.0) <= TOLERANCE:
        return
    unit = max(split, key=lambda name: split[name])
    wanted = split[unit] - (total - 1.0)
    help_text = "change the shares to add up to 1"
    if 0.0 <= wanted <= 1.0:
        verb = "lower" if total > 1.0 else "raise"
        help_text = f"{verb} {unit} to {wanted:.6g}"
    yield Finding(path, f"the shares of {subject} add up to {total:.6g}, expected 1", help_text)


@rule("P263", "error", "resolved")
def check_dense_share_is_hot(facts: Facts) -> Iterator[Finding]:
    seen = set()
    for unit in facts.resolved.source.whole_units:
        yield from _check_whole(facts, unit)
        return
    for layer in facts.resolved.layers:
        if layer.dense is None or layer.dense.kept <= layer.hot_neurons:
            continue
        if layer.split_path in seen:
            continue
        seen.add(layer.split_path)
        share = layer.dense.kept / facts.resolved.model.layer_neurons
        if layer.dense.kept == layer.dense.by_sequences[0]:
            share = layer.split[layer.dense.unit]
        yield Finding(
            layer.hot_path,
            f"`{layer.dense.unit}` owns {share:.4g} of the neurons, and only "
            f"{layer.hot:.4g} are hot",
            f"write hot = {share:.4g}, or lower the share of `{layer.dense.unit}`",
            origins=(
                Origin(
                    "plan",
                    layer.split_path,
                    f"{layer.dense.unit} = {layer.split.get(layer.dense.unit, 0.0):.4g}",
                ),
            ),
        )


def _check_whole(facts: Facts, unit: str) -> Iterator[Finding]:
    resolved = facts.resolved
    seen = set()
    for layer in resolved.layers:
        if layer.hot_neurons == resolved.model.layer_neurons or layer.hot_path in seen:
            continue
        seen.add(layer.hot_path)
        yield Finding(
            layer.hot_path,
            f"`{unit}` has the whole model in its memory, and only {layer.hot:.4g} of the "
            "neurons are hot",
            "write hot = 1.0, or give a part of layers.split to a CPU",
            origins=(Origin("plan", layer.split_path, f"{unit} has all layers"),),
        )
