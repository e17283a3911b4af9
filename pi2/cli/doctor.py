"""Check this machine, and which shipped plans can run on it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from pi2.cli.commands import in_help
from pi2.cli.main import wants_colour
from pi2.cli.options import add_json_option, print_found

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pi2.backends.gpu.devices import Survey
    from pi2.checkup import Checkup, PlanVerdict
    from pi2.machine import Machine, Storage
    from pi2.machine.storage import Tvm


MAX_COLUMNS = 100
VERDICT_COLOURS = {"runs": "green", "dry run": "yellow", "cannot run": "red"}


@in_help("Run", "Check this machine, and which shipped plans can run on it.")
@click.command("doctor")
@add_json_option
def doctor_command(as_json: bool) -> int:
    """Check what this machine has and which shipped plans can run on it.

    Plans marked "dry run" can be counted through but compute nothing.  Exits with 1 if no plan can
    run."""
    from pi2.checkup import examine_machine

    checkup = examine_machine()
    text = "\n".join(write_checkup(checkup))
    print_found(
        describe_checkup(checkup),
        text if wants_colour(sys.stdout) else click.unstyle(text),
        as_json,
    )
    return 0 if any(plan.verdict == "runs" for plan in checkup.plans) else 1


def describe_checkup(checkup: Checkup) -> dict[str, Any]:
    def simplify(item: object) -> object:
        return sorted(item) if isinstance(item, set | frozenset) else str(item)

    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(checkup), default=simplify))
    return found


def write_checkup(checkup: Checkup) -> Iterator[str]:
    machine = checkup.machine
    yield click.style(
        f"pi2 {checkup.pi2_version}, Python {checkup.python_version}, {machine.system}", bold=True
    )
    yield ""
    yield from _write("Processor", *describe_cpu(machine))
    yield from _write("Memory", describe_memory(machine))
    yield from _write("Storage", describe_storage(checkup.storage))
    yield from _write("TVM", *describe_tvm(checkup.tvm))
    yield from _write("Linkers", describe_programs(checkup.linkers))
    yield from _write("Emulators", describe_programs(checkup.emulators))
    yield from _write("GPUs", *describe_gpus(checkup.gpus))
    cache = checkup.kernel_cache
    yield from _write(
        "Kernels", f"kept in {cache.path}" + ("" if cache.writable else ", which is not writable")
    )
    yield from _write("Faster", *(checkup.hints or ["nothing that pi2 knows of"]))
    yield ""
    yield click.style("Backends", bold=True)
    for name, obstacles in checkup.backends.items():
        said = "; ".join(obstacles) or "can run here"
        if name in checkup.only_emulated:
            said += "; its units have been emulated so far, and no real one has run it"
        yield from _write(f"  {name}", said, indent=14)
    yield ""
    yield click.style("Plans that come with pi2", bold=True)
    yield from write_verdicts(checkup.plans)


def write_verdicts(plans: Sequence[PlanVerdict]) -> Iterator[str]:
    """Plans of which the same is to be said, together; what helps comes once, at the end."""
    groups: dict[tuple[str, ...], list[PlanVerdict]] = {}
    helps: dict[str, str] = {}
    for plan in plans:
        said = [
            f"{finding.severity}[{finding.code}]: {finding.message}" for finding in plan.findings
        ]
        groups.setdefault((plan.verdict, *said), []).append(plan)
        helps |= {finding.code: finding.help for finding in plan.findings if finding.help}
    order = list(VERDICT_COLOURS)
    for (verdict, *said), group in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        names = [plan.name.removesuffix(".plan.toml") for plan in group]
        yield from _write(f"  {verdict}", *names, *said, indent=14, colour=VERDICT_COLOURS[verdict])
    if helps:
        yield ""
    for code, text in sorted(helps.items()):
        yield from _write(f"  help {code}", text, indent=14)


def describe_cpu(machine: Machine) -> Iterator[str]:
    """Describe the processor: name, cores and features."""
    cpu = machine.cpu
    yield f"{cpu.name}, {cpu.architecture}"
    cores = f"{cpu.cores} of {cpu.cores_online} cores may be used"
    kinds = [
        f"{cluster.cores}x {cluster.core or 'core'}"
        + (f" at {cluster.max_hz / 1e9:.3g} GHz" if cluster.max_hz else "")
        for cluster in cpu.clusters
    ]
    yield cores + (f": {', '.join(kinds)}" if len(kinds) > 1 or cpu.clusters[0].max_hz else "")
    yield "features: " + (" ".join(sorted(cpu.features)) or "none that pi2 has kernels for")


def describe_memory(machine: Machine) -> str:
    from pi2.plan.documents.quantities import approximate_bytes

    memory = machine.memory
    parts = [f"{approximate_bytes(memory.installed_bytes)} installed"]
    if memory.limit_bytes < memory.installed_bytes:
        parts.append(f"{approximate_bytes(memory.limit_bytes)} allowed")
    parts.append(f"{approximate_bytes(memory.available_bytes)} free")
    return ", ".join(parts)


def describe_storage(storage: Storage) -> str:
    """File system, block size, direct reads, free space."""
    from pi2.plan.documents.quantities import approximate_bytes

    parts = [storage.filesystem or "unknown file system"]
    if storage.device is not None:
        parts[0] += f" on {storage.device}"
    if storage.block_bytes is not None:
        parts.append(f"blocks of {storage.block_bytes} B")
    direct = storage.direct
    parts.append(
        f"direct reads from {direct.align_bytes} B on"
        if direct.works
        else f"no direct reads: {direct.obstacle}"
    )
    if storage.free_bytes is not None:
        parts.append(f"{approximate_bytes(storage.free_bytes)} free")
    return ", ".join(parts)


def describe_tvm(tvm: Tvm) -> Iterator[str]:
    yield f"apache-tvm {tvm.version}" if tvm.version else "apache-tvm is not installed"
    if tvm.ffi_version is None:
        yield "apache-tvm-ffi is not installed"
    elif tvm.ffi_wanted in (None, tvm.ffi_version):
        yield f"apache-tvm-ffi {tvm.ffi_version}"
    else:
        yield (
            f"apache-tvm-ffi {tvm.ffi_version}, but this pi2 needs {tvm.ffi_wanted}:"
            f" pip install apache-tvm-ffi=={tvm.ffi_wanted}"
        )
    if tvm.runtime_library is None:
        yield "its runtime library is not there"


def describe_programs(programs: Mapping[str, str | None]) -> str:
    found = [name for name, path in programs.items() if path]
    missing = [name for name, path in programs.items() if not path]
    parts = [", ".join(found)] if found else []
    if missing:
        parts.append(f"not found: {', '.join(missing)}")
    return "; ".join(parts)


def describe_gpus(surveys: Sequence[Survey]) -> Iterator[str]:
    from pi2.plan.documents.quantities import approximate_bytes

    for survey in surveys:
        for device in survey.devices:
            parts = [f"{survey.api}: {device.name} ({device.driver})"]
            if device.is_emulated:
                parts.append("emulated by the processor")
            if device.memory_bytes is not None:
                parts.append(f"{approximate_bytes(device.memory_bytes)} of its own")
            if device.compute_units is not None:
                parts.append(f"{device.compute_units} compute units")
            parts.append("fp16" if device.fp16 else "no fp16")
            yield ", ".join(parts)
        if survey.obstacle is not None:
            advice = "" if survey.help is None else f": {survey.help}"
            yield f"{survey.api}: {survey.obstacle}{advice}"


def _write(label: str, *lines: str, indent: int = 12, colour: str = "cyan") -> Iterator[str]:
    for number, line in enumerate(lines):
        wrapped = _wrap(line, indent)
        if number == 0:
            head = click.style(label.ljust(indent), fg=colour)
            wrapped[0] = head + wrapped[0][indent:]
        yield from wrapped


def _wrap(text: str, indent: int) -> list[str]:
    columns = min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS)
    if not sys.stdout.isatty():
        columns = 10_000
    pad = " " * indent
    return textwrap.wrap(
        text,
        max(columns, indent + 20),
        initial_indent=pad,
        subsequent_indent=pad,
        break_long_words=False,
        break_on_hyphens=False,
    )
