"""Build a bundle that runs a plan without TVM."""

from __future__ import annotations

from pathlib import Path

import click

from pi2.cli.options import ChosenPlan, take_plan

GROUP = "More commands"

TARGETS = ("aarch64-linux-gnu", "aarch64-linux-android", "x86_64-linux-gnu")


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
def command(
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
    from pi2.cli.progress import ProgressBar
    from pi2.phone.building import build_bundle
    from pi2.phone.target import Wish, parse_features
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
