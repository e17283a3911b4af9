"""Measure this machine, and build bundles for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.commands import in_help
from pi2.cli.options import ChosenPlan, check_output, force_option, take_plan, write_checked

if TYPE_CHECKING:
    from pi2.phone.contents import Triple
    from pi2.plan.documents.device import Device


TARGETS = ("aarch64-linux-gnu", "aarch64-linux-android", "x86_64-linux-gnu")


@in_help("More commands", "Build a bundle that runs a plan without TVM.")
@click.command("build")
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default=TARGETS[0],
    show_default=True,
    help="Machine that the bundle is for.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of the bundle, a new one.",
)
@click.option("--without-store", is_flag=True, help="Leave the weights out.")
@click.option("--without-probe", is_flag=True, help="Leave out the kernels that --probe times.")
@click.option("--copy-store", is_flag=True, help="Copy the weights instead of linking them.")
@click.option(
    "--features",
    metavar="LIST",
    help="Processor features, such as neon,dotprod,i8mm.  [default: the device's]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1, max=1024),
    help="Compute threads.  [default: the plan's, or the device's cores]",
)
@take_plan(locked=True)
def build_command(
    plan: ChosenPlan,
    target: str,
    output: Path,
    without_store: bool,
    without_probe: bool,
    copy_store: bool,
    features: str | None,
    threads: int | None,
) -> None:
    """Build a bundle of PLAN: kernels, weights, and a runtime for Python and numpy alone.

    It runs on machines without TVM, such as phones with Termux: copy the folder there, then
    `./run.sh --prompt TEXT`.
    """
    from pi2.cli.commands import ProgressBar
    from pi2.phone.building import build_bundle
    from pi2.phone.contents import Wish, parse_features
    from pi2.plan.documents.quantities import approximate_bytes

    if without_store and copy_store:
        raise click.UsageError("--without-store and --copy-store exclude each other")
    triple = next(item for item in TARGETS if item == target)
    names = None if features is None else [name.strip() for name in features.split(",")]
    wish = Wish(
        triple=triple,  # type: ignore[arg-type] # the choices are the names
        features=None if names is None else parse_features(names, triple),  # type: ignore[arg-type]
        threads=threads,
        probe=not without_probe,
    )
    mode = "none" if without_store else "copy" if copy_store else "link"
    with ProgressBar() as progress:
        built = build_bundle(plan.resolved, wish, output, mode, progress)  # type: ignore[arg-type]
    unit = built.plan.device.units[built.plan.sparse_unit]
    click.echo(
        f"{built.folder}: {approximate_bytes(built.own_bytes)}"
        f" and a store of {approximate_bytes(built.store_bytes)},"
        f" for {target} with {', '.join(unit.features or ())},"
        f" {built.plan.plan.threads.compute} threads"
    )


@in_help("Plan", "Measure this machine and write a device file.")
@click.command("probe")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Output file, NAME.device.toml.",
)
@click.option(
    "--compare", "other", metavar="DEVICE", help="Device to compare with: a path or short name."
)
@click.option(
    "--disk",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=("Folder on the disk to measure, or a neuron store.  [default: the folder of the output]"),
)
@force_option
@click.option(
    "--rpc", metavar="HOST:PORT", help="Measure kernels on another machine, through TVM's tracker."
)
@click.option("--key", default="phone", show_default=True, help="Its key at the tracker.")
@click.option(
    "--target",
    type=click.Choice(["aarch64-linux-gnu", "aarch64-linux-android", "x86_64-linux-gnu"]),
    default="aarch64-linux-gnu",
    show_default=True,
    help="What the other machine is.",
)
@click.option("--features", metavar="LIST", help="Its processor's features, such as neon,dotprod.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=4, show_default=True, help="Its threads."
)
def probe_command(
    output: Path | None,
    other: str | None,
    disk: Path | None,
    force: bool,
    rpc: str | None,
    key: str,
    target: Triple,
    features: str | None,
    threads: int,
) -> None:
    """Measure this machine: memory, pi2's kernels, disk, noise.

    Takes about two minutes, longer beside other work: run nothing else meanwhile.  Kernels are
    compiled first if needed.
    Disk rates are measured on a temporary file of up to 1 GiB, unless --disk names a store.  With
    --compare, shows for each figure whether it agrees with that of another device file.

    With --rpc, kernels of another machine are timed instead, such as a phone's; its flash is
    measured there, by a bundle's `python -m pi2_phone --probe`.
    """
    from pi2.cli.commands import ProgressBar
    from pi2.probing.document import (
        NOISY,
        compare_devices,
        describe_unsteady,
        make_device,
        write_device,
        write_rows,
    )
    from pi2.probing.probe import measure_machine

    if output is None and other is None:
        raise click.UsageError("give -o FILE, --compare OTHER, or both")
    name = "this-machine" if output is None else check_output(output, "device", force)
    if rpc is not None:
        if output is None or other is not None:
            raise click.UsageError("--rpc goes with -o FILE, and without --compare")
        _probe_remote(name, output, rpc, key, target, features, threads)
        return
    old = None if other is None else _read_device(other)
    place = disk or (output.absolute().parent if output is not None else Path())
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


def _probe_remote(
    name: str,
    output: Path,
    rpc: str,
    key: str,
    target: Triple,
    features: str | None,
    threads: int,
) -> None:
    from pi2.cli.commands import ProgressBar
    from pi2.phone.contents import ARCHITECTURES, USUAL_FEATURES, parse_features
    from pi2.probing.document import write_device
    from pi2.probing.remote import RemoteMachine, make_remote_device, measure_remote

    host, _, port = rpc.rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError("--rpc takes HOST:PORT")
    names = None if features is None else [item.strip() for item in features.split(",")]
    architecture = ARCHITECTURES[target]
    chosen = USUAL_FEATURES[architecture] if names is None else parse_features(names, target)
    machine = RemoteMachine(
        host=host,
        port=int(port),
        key=key,
        triple=target,
        architecture=architecture,
        features=frozenset(chosen),
        threads=threads,
    )
    with ProgressBar() as progress:
        steps, step_s = measure_remote(machine, progress)
    write_checked(
        output, write_device(make_remote_device(name, machine, steps, step_s)), _name_it(output)
    )


def describe_units(device: Device, notes: Sequence[str]) -> Iterator[str]:
    """A line about each unit beside the processor: what was measured, or why it was not."""
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


def _read_device(reference: str) -> Device:
    from pi2.plan.documents.device import Device
    from pi2.planning.wish import read_document

    document = read_document(reference, "device").document
    assert isinstance(document, Device)
    return document


def _name_it(path: Path) -> str:
    return f"name it in a plan: device = {str(path)!r}"
