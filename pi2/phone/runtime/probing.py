"""``python -m pi2_phone --probe``: a device file of reads, memory, noise and kernels."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.host import load_host_loops
from pi2.caches import replace_file
from pi2.diagnostics import UserError
from pi2.machine import detect_machine, inspect_storage
from pi2.measuring.contestant import BandwidthMeter
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.toml.text import write_key, write_value
from pi2.probing.document import describe_device
from pi2.probing.probe import KernelRecipe, Measurements
from pi2.probing.steps import GATES, USUAL, add_figures
from pi2.probing.storage import StorageBench, list_overlaps, list_reads, open_sample
from pi2.probing.tokens import LARGE, SMALL
from pi2.progress import ignore_progress


def write_toml(values: Mapping[str, Any]) -> str:
    """Return TOML of texts, numbers, truth values, lists and tables; None is left out."""
    return "\n".join(_write_table((), values)) + "\n"


def _write_table(path: tuple[str, ...], values: Mapping[str, Any]) -> Iterator[str]:
    tables: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) or (
            isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
        ):
            tables.append((key, value))
        elif value is not None and value != []:
            yield f"{write_key(key)} = {write_value(value)}"
    for key, value in tables:
        name = ".".join(map(write_key, (*path, key)))
        for item in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _write_table((*path, key), item)


ROUNDS = 3
METER_BYTES = 128 << 20
STEADY_BYTES = 8 << 20
STEADY_PIECES = 50
SUFFIX = ".device.toml"


def list_recipes(resolved: ResolvedPlan) -> list[KernelRecipe]:
    """Recipes to time a processor's kernels with the threads and features of the bundle's plan."""
    unit, threads = resolved.device.units[resolved.sparse_unit], resolved.plan.threads.compute
    assert unit.architecture is not None and threads is not None, "a bundle's plan states them"
    return [
        KernelRecipe(
            threads=threads,
            features=frozenset(unit.features or ()),
            architecture=unit.architecture,
            sizes=sizes,
            varieties=(USUAL, GATES),
        )
        for sizes in (LARGE, SMALL)
    ]


def has_kernels(recipes: Sequence[KernelRecipe]) -> bool:
    try:
        for recipe in recipes:
            for spec in recipe.list_specs():
                load_or_compile(spec, ignore_progress)
    except UserError:
        return False
    return True


def write_probe(
    output: Path, place: Path, recipes: Sequence[KernelRecipe], *, rounds: int = ROUNDS
) -> None:
    """Measure this machine into a new file; UserError P675, P341, P674 without kernels."""
    if output.exists():
        raise UserError.of("P675", f"{output} exists already", help="choose another name with -o")
    name = output.name.removesuffix(SUFFIX).removesuffix(".toml").lower()
    text = (
        "# Written by `python -m pi2_phone --probe`: no serial numbers, host names or accounts.\n"
    )
    text += write_toml(describe_device(name, measure(place, recipes, rounds)))
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise UserError.of("P675", f"{output} cannot be written: {error.strerror}") from None


def measure(place: Path, recipes: Sequence[KernelRecipe], rounds: int) -> Measurements:
    """Measure everything ``rounds`` times, kernels after all else."""
    machine = detect_machine()
    found = Measurements(
        machine=machine,
        storage=inspect_storage(place),
        threads=recipes[0].threads if recipes else machine.cores,
        read_work="numpy maximum",
        steady_work="the maximum of 8 MiB",
    )
    loops = load_host_loops(ignore_progress, machine.features)
    with open_sample(place) as (path, size):
        bench = StorageBench(str(path), size, loops)
        reads = list_reads(size, found.storage.direct.align_bytes or 512)
        try:
            for _ in range(rounds):
                for count in sorted({1, found.threads // 2 or 1, found.threads}):
                    meter = BandwidthMeter(count, METER_BYTES)
                    found.bandwidth.setdefault(count, []).append(max(meter.measure()))
                    meter.close()
                add_figures(found.read_bytes_s, bench.measure(reads, 1))
                found.latency_s += bench.measure_latency(1)
        finally:
            bench.close()
        for recipe in recipes:
            kernels = recipe(ignore_progress)
            try:
                add_figures(found.step_s, kernels.measure(rounds))
                if recipe is recipes[0]:
                    kernels.open_storage(str(path), size)
                    found.overlap |= kernels.measure_overlap(list_overlaps(reads), rounds)
            finally:
                kernels.close()
    found.steady_s += measure_steady()
    return found


def measure_steady() -> list[float]:
    import numpy as np

    numbers: Any = np.ones(STEADY_BYTES // 8, np.uint64)
    times = []
    for _ in range(STEADY_PIECES):
        start = time.perf_counter()
        numbers.max()
        times.append(time.perf_counter() - start)
    return times
