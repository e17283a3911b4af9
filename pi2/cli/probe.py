"""Measure this machine and write a device file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.outputs import check_output, force_option, write_checked

if TYPE_CHECKING:
    from pi2.phone.target import Triple
    from pi2.plan.documents.device import Device

GROUP = "Plan"


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
def command(
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
    from pi2.cli.progress import ProgressBar
    from pi2.probing.comparison import compare_devices, write_rows
    from pi2.probing.document import NOISY, describe_unsteady, make_device, write_device
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
    """Measure another machine's kernels and write its device file."""
    from pi2.cli.progress import ProgressBar
    from pi2.phone.target import ARCHITECTURES, USUAL_FEATURES, parse_features
    from pi2.probing.document import write_device
    from pi2.probing.remote import RemoteMachine, measure_remote
    from pi2.probing.remote_document import make_remote_device

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
    from pi2.planning.documents import read_document

    document = read_document(reference, "device").document
    assert isinstance(document, Device)
    return document


def _name_it(path: Path) -> str:
    return f"name it in a plan: device = {str(path)!r}"
