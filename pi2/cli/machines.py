"""Check this machine, measure it or another, and build bundles for others."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from pi2.cli.main import is_verbose
from pi2.cli.options import (
    FORCE,
    ChosenPlan,
    add_json_option,
    check_output,
    option,
    print_found,
    read_device,
    take_options,
    take_plan,
    write_checked,
)
from pi2.logging import wants_colour
from pi2.plan.documents.quantities import approximate_bytes, approximate_number, format_bytes
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pi2.backends.gpu.devices import Survey
    from pi2.checkup import Checkup, PlanVerdict
    from pi2.machine import Machine, Storage
    from pi2.machine.storage import Tvm
    from pi2.plan.documents.device import Device


MAX_COLUMNS = 100
VERDICT_COLOURS = {"runs": "green", "dry run": "yellow", "cannot run": "red"}


@click.command("doctor")
@add_json_option
def doctor_command(as_json: bool) -> int:
    """Check what this machine has, what would make runs faster, and which shipped plans can run.

    -v lists drivers, tools and every plan with what keeps it from running.  Exits with 1 if no plan
    can run."""
    from pi2.checkup import examine_machine

    checkup = examine_machine()
    columns = None
    if sys.stdout.isatty():
        columns = min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS)
    text = "\n".join(write_checkup(checkup, whole=is_verbose(), columns=columns))
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


@dataclass(frozen=True, slots=True)
class Entry:
    """A label and lines next to it; without a label, a heading."""

    label: str
    lines: tuple[str, ...]
    colour: str = "cyan"
    indent: int = 12

    def write(self, columns: int | None) -> Iterator[str]:
        """Lines of at most ``columns``, if they are limited."""
        width = sys.maxsize if columns is None else max(columns, self.indent + 20)
        pad = " " * self.indent
        wrapper = textwrap.TextWrapper(
            width, pad, pad, break_long_words=False, break_on_hyphens=False
        )
        for number, line in enumerate(self.lines):
            wrapped = wrapper.wrap(line) or [""]
            if number == 0 and self.label:
                head = click.style(self.label.ljust(self.indent), fg=self.colour)
                wrapped[0] = head + wrapped[0][self.indent :]
            yield from wrapped


def write_checkup(
    checkup: Checkup, *, whole: bool = False, columns: int | None = None
) -> Iterator[str]:
    """The report: a screen of it, or the ``whole``."""
    machine = checkup.machine
    yield click.style(
        f"pi2 {checkup.pi2_version}, Python {checkup.python_version}, {machine.system}", bold=True
    )
    yield ""
    cache = checkup.kernel_cache
    kernels = f"kept in {cache.path}" + ("" if cache.writable else ", which is not writable")
    entries = [
        Entry("Processor", tuple(describe_cpu(machine))),
        Entry("Memory", (describe_memory(machine),)),
        Entry("Storage", (describe_storage(checkup.storage),)),
        Entry("TVM", tuple(describe_tvm(checkup.tvm))),
    ]
    if whole:
        entries.append(Entry("Emulators", (describe_programs(checkup.emulators),)))
    entries.append(Entry("GPUs", tuple(describe_gpus(checkup.gpus, whole=whole))))
    entries.append(Entry("Kernels", (kernels,)))
    entries.append(Entry("Faster", checkup.hints or ("nothing that pi2 knows of",), "yellow"))
    if whole:
        entries += list_backends(checkup)
        entries += list_verdicts(checkup.plans)
    else:
        entries.append(Entry("Backends", tuple(summarise_backends(checkup))))
        entries.append(Entry("Plans", tuple(summarise_plans(checkup.plans))))
    for entry in entries:
        yield from entry.write(columns)


def list_backends(checkup: Checkup) -> Iterator[Entry]:
    yield Entry("", ("", click.style("Backends", bold=True)), indent=0)
    for name in checkup.backends:
        yield Entry(f"  {name}", (describe_backend(checkup, name),), indent=14)


def describe_backend(checkup: Checkup, name: str) -> str:
    if checkup.backends[name]:
        return "; ".join(checkup.backends[name])
    if name in checkup.emulated:
        return "emulated only: the CPU computes for it here, and its times say nothing"
    if name in checkup.only_emulated:
        return "can run here; pi2 has been tested on emulated devices only"
    return "can run here"


def summarise_backends(checkup: Checkup) -> Iterator[str]:
    """Backends that run here in a line, and one for each other with the first reason."""
    limited = {name for name, obstacles in checkup.backends.items() if obstacles}
    real = [name for name in checkup.backends if name not in limited | checkup.emulated]
    yield f"can run here: {', '.join(real) or 'none'}"
    for name in checkup.backends:
        if name not in real:
            yield f"{name}: {re.split(': |; ', describe_backend(checkup, name))[0]}"


def summarise_plans(plans: Sequence[PlanVerdict]) -> Iterator[str]:
    for verdict in VERDICT_COLOURS:
        names = [plan.name.removesuffix(".plan.toml") for plan in plans if plan.verdict == verdict]
        if names:
            shown = ", ".join(names) if verdict == "runs" else f"{len(names)} of {len(plans)}"
            yield f"{verdict}: {shown}"
    yield "`pi2 doctor -v` says what keeps a plan from running"


def list_verdicts(plans: Sequence[PlanVerdict]) -> Iterator[Entry]:
    """Plans with the same findings together; each help once, at the end."""
    yield Entry("", ("", click.style("Plans that come with pi2", bold=True)), indent=0)
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
        yield Entry(f"  {verdict}", (*names, *said), VERDICT_COLOURS[verdict], indent=14)
    if helps:
        yield Entry("", ("",), indent=0)
    for code, text in sorted(helps.items()):
        yield Entry(f"  help {code}", (text,), indent=14)


def describe_cpu(machine: Machine) -> Iterator[str]:
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
    memory = machine.memory
    parts = [f"{approximate_bytes(memory.installed_bytes)} installed"]
    if memory.limit_bytes < memory.installed_bytes:
        parts.append(f"{approximate_bytes(memory.limit_bytes)} allowed")
    parts.append(f"{approximate_bytes(memory.available_bytes)} free")
    return ", ".join(parts)


def describe_storage(storage: Storage) -> str:
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
    elif tvm.ffi_wanted is None or fnmatch(tvm.ffi_version, tvm.ffi_wanted):
        yield f"apache-tvm-ffi {tvm.ffi_version}"
    else:
        yield (
            f"apache-tvm-ffi {tvm.ffi_version}, but this pi2 needs {tvm.ffi_wanted}:"
            f" pip install 'apache-tvm-ffi=={tvm.ffi_wanted}'"
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


def describe_gpus(surveys: Sequence[Survey], *, whole: bool) -> Iterator[str]:
    """A line for each device; for APIs without one a line together, or the ``whole`` of it."""
    for survey in surveys:
        for device in survey.devices:
            parts = [f"{survey.api}: {device.name} ({device.driver})"]
            if device.is_emulated:
                parts.append("emulated by the CPU")
            if device.memory_bytes is not None:
                parts.append(f"{approximate_bytes(device.memory_bytes)} of its own")
            if device.compute_units is not None:
                parts.append(f"{device.compute_units} compute units")
            parts.append("fp16" if device.fp16 else "no fp16")
            yield ", ".join(parts)
        if survey.obstacle is not None and whole:
            advice = "" if survey.help is None else f": {survey.help}"
            yield f"{survey.api}: {survey.obstacle}{advice}"
    missing = [survey.api for survey in surveys if survey.obstacle is not None]
    if missing and not whole:
        yield f"no device of {', '.join(missing)}; -v says what to install"


Target = Literal["aarch64-linux-gnu", "aarch64-linux-android", "x86_64-linux-gnu"]
"""Other machines that pi2 compiles for: `pi2.phone.contents.Triple`."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    target: Target = "aarch64-linux-gnu"
    output: Path = option("-o", "--output", required=True)
    without_store: bool = False
    without_probe: bool = False
    copy_store: bool = False
    features: str | None = option(metavar="LIST")
    threads: int | None = option(type=click.IntRange(min=1, max=1024))


@click.command("build")
@take_options(BuildOptions)
@take_plan(locked=True)
def build_command(plan: ChosenPlan, given: BuildOptions) -> None:
    """Build a bundle of PLAN: kernels, weights, and a runtime that needs only Python and numpy.

    It runs on machines without TVM, such as phones with Termux: copy the folder there, then
    `./run.sh --prompt TEXT`."""
    from pi2.phone.building import build_bundle
    from pi2.phone.contents import Wish, parse_features

    if given.without_store and given.copy_store:
        raise click.UsageError("--without-store and --copy-store exclude each other")
    wish = Wish(
        triple=given.target,
        features=parse_features(given.features, given.target),
        threads=given.threads,
        probe=not given.without_probe,
    )
    mode: Literal["none", "copy", "link"] = "copy" if given.copy_store else "link"
    mode = "none" if given.without_store else mode
    with ProgressBar() as progress:
        built = build_bundle(plan.resolved, wish, given.output, mode, progress)
    unit = built.plan.device.units[built.plan.sparse_unit]
    click.echo(
        f"{built.folder}: {approximate_bytes(built.own_bytes)}"
        f" and {approximate_bytes(built.store_bytes)} of weights,"
        f" for {given.target} with {', '.join(unit.features or ())},"
        f" {built.plan.plan.threads.compute} threads"
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    output: Path | None = option("-o", "--output")
    other: str | None = option("--compare", metavar="DEVICE")
    disk: Path | None = option(type=click.Path(path_type=Path, exists=True, file_okay=False))
    force: bool = FORCE()
    rpc: str | None = option(metavar="HOST:PORT")
    key: str = "phone"
    target: Target = "aarch64-linux-gnu"
    features: str | None = option(metavar="LIST")
    threads: int = option(type=click.IntRange(1, 1024), default=4)


@click.command("probe")
@take_options(ProbeOptions)
def probe_command(given: ProbeOptions) -> None:
    """Measure this machine: memory, pi2's kernels, disk, noise.

    Takes about two minutes, longer on a busy machine: run nothing else meanwhile.  Kernels are
    compiled first if needed.
    Disk rates are measured on a temporary file of up to 1 GiB, unless --disk names a store.  With
    --compare, shows for each figure whether it agrees with the figure of another device file.

    With --rpc, kernels of another machine are timed instead, such as a phone's; its flash is
    measured there, by a bundle's `python -m pi2_phone --probe`."""
    output = given.output
    from pi2.probing.document import (
        NOISY,
        compare_devices,
        describe_unsteady,
        make_device,
        write_device,
        write_rows,
    )
    from pi2.probing.probe import measure_machine

    if output is None and given.other is None:
        raise click.UsageError("give -o FILE, --compare OTHER, or both")
    name = "this-machine" if output is None else check_output(output, "device", given.force)
    if given.rpc is not None:
        if output is None or given.other is not None:
            raise click.UsageError("--rpc goes with -o FILE, and without --compare")
        _probe_remote(name, output, given)
        return
    old = None if given.other is None else read_device(given.other)
    place = given.disk or (output.absolute().parent if output is not None else Path())
    with ProgressBar() as progress:
        found = measure_machine(place, progress)
    device = make_device(name, found)
    if old is not None:
        rows = compare_devices(old, device)
        click.echo("\n".join(write_rows(rows)))
    assert device.noise is not None
    if device.noise.value > NOISY:
        click.echo(
            f"the machine is noisy: equal work took times that differ by {device.noise.value:.0%};"
            " end other programs and measure again",
            err=True,
        )
    for line in describe_unsteady(device):
        click.echo(line, err=True)
    for line in describe_units(device, found.accelerators.notes):
        click.echo(line, err=True)
    if output is not None:
        write_checked(output, write_device(device, found.accelerators.notes), _name_it(output))


def _probe_remote(name: str, output: Path, given: ProbeOptions) -> None:
    from pi2.phone.contents import ARCHITECTURES, USUAL_FEATURES, parse_features
    from pi2.probing.document import write_device
    from pi2.probing.remote import RemoteMachine, make_remote_device, measure_remote

    host, _, port = (given.rpc or "").rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError("--rpc takes HOST:PORT")
    architecture = ARCHITECTURES[given.target]
    chosen = parse_features(given.features, given.target) or USUAL_FEATURES[architecture]
    machine = RemoteMachine(
        host=host,
        port=int(port),
        key=given.key,
        triple=given.target,
        architecture=architecture,
        features=frozenset(chosen),
        threads=given.threads,
    )
    with ProgressBar() as progress:
        found = measure_remote(machine, progress)
    text = write_device(make_remote_device(name, machine, found))
    write_checked(output, text, _name_it(output))


def describe_units(device: Device, notes: Sequence[str]) -> Iterator[str]:
    """A line about each unit but the CPU: its measurements, or why there are none."""
    for name, unit in device.units.items():
        if unit.kind == "cpu":
            continue
        own = unit.memory.read_bandwidth if unit.memory is not None else None
        bandwidth = unit.read_bandwidth or own
        rates = [
            f"{approximate_number(item.giga_ops, 4)} GOP/s for many tokens" for item in unit.compute
        ]
        if bandwidth is not None:
            rates.insert(0, f"{approximate_number(bandwidth.value / 1e9)} GB/s for one")
        what = f"{name}: {unit.model}"
        if unit.emulated:
            what += ", which is the processor itself: plans do not count with it"
        if unit.memory is not None and unit.memory.capacity is not None:
            what += f", {format_bytes(unit.memory.capacity)} of its own"
        yield f"{what}; {', '.join(rates)}"
    yield from notes


def _name_it(path: Path) -> str:
    return f"name it in a plan: device = {str(path)!r}"
