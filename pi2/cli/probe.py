"""Measure this machine, and build bundles for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.cli.options import (
    FORCE,
    ChosenPlan,
    check_output,
    option,
    read_device,
    take_options,
    take_plan,
    write_checked,
)
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from pi2.plan.documents.device import Device


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
    from pi2.plan.documents.quantities import approximate_bytes

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
    from pi2.plan.documents.quantities import approximate_number, format_bytes

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
