"""Inspect, verify, reorder or repack a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.caches import is_gguf
from pi2.cli.main import Subcommands
from pi2.cli.options import MIB, add_json_option, option, take_options
from pi2.diagnostics import UserError
from pi2.progress import ProgressBar

if TYPE_CHECKING:
    from pi2.store.manifest import Manifest


def _find_store(ctx: click.Context, option: click.Parameter, path: Path) -> Path:
    from pi2.pulled_models import FILE as MODEL_FILE
    from pi2.pulled_models import find_model

    model = None if path.exists() else find_model(str(path))
    path = path if model is None else model.folder
    if is_gguf(path) or is_gguf(path / MODEL_FILE) or path.suffix == ".toml":
        raise UserError.of(
            "P501",
            f"{path} is no neuron store",
            help="a GGUF file is described by `pi2 show` and checked by `pi2 validate`; "
            "`pi2 convert FILE.gguf -o STORE` makes a store",
        )
    return path


take_store = click.argument(
    "path", metavar="STORE", type=click.Path(path_type=Path), callback=_find_store
)


@click.group("store", cls=Subcommands)
def store_command() -> None:
    """Inspect, verify, reorder or repack a store."""


@store_command.command("info")
@take_store
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as one JSON object.")
def show_info(path: Path, as_json: bool) -> None:
    """Show what the neuron store at PATH holds.

    Reads only the manifest and compares file sizes; `pi2 store verify` reads every file."""
    from pi2.store.reader import NeuronStore

    with NeuronStore.open(path) as store:
        if as_json:
            click.echo(json.dumps(store.manifest.dump(), indent=2))
        else:
            print_tables(path, store.manifest)


@store_command.command("verify")
@take_store
@add_json_option
def verify(path: Path, as_json: bool) -> int:
    """Read every file of the neuron store at PATH and compare it with the manifest.

    Exits with 0 if all files match, 1 with one finding per damaged file, 2 if there is no store."""
    from pi2.cli.main import wants_colour
    from pi2.diagnostics import texts
    from pi2.store.manifest import read_manifest
    from pi2.store.verification import verify_store

    with ProgressBar() as progress:
        findings = verify_store(path, progress)
    if as_json:
        bad = [
            {
                "code": item.code,
                "file": item.span.file if item.span else "",
                "problem": item.message,
            }
            for item in findings
        ]
        click.echo(json.dumps({"path": str(path), "findings": bad}, indent=2))
    elif findings:
        click.echo(
            texts.render_full(findings, colour=wants_colour(sys.stdout), sources={}), nl=False
        )
    else:
        manifest = read_manifest(path)
        size_mib = sum(entry.bytes for entry in manifest.files) / MIB
        click.echo(f"{path}: {len(manifest.files)} files, {size_mib:.1f} MiB, all as written")
    return 1 if findings else 0


@dataclass(frozen=True, kw_only=True)
class ReorderOptions:
    kind: Literal["hotness", "coactivation", "expert"] = option("--by", required=True)
    statistics: Path | None = option(metavar="STATS")
    output: Path | None = option("-o", "--output", metavar="STORE")
    replace: bool = option("--force")


@store_command.command("reorder")
@take_store
@take_options(ReorderOptions)
def reorder(path: Path, given: ReorderOptions) -> None:
    """Rewrite STORE with its neurons in another order.

    Results do not change.  Disk space for a second store is needed; the old store is kept until the
    new one is complete.  After Ctrl-C the same command resumes."""
    from pi2.measuring.ordering import choose_orders, reorder_store

    if given.statistics is None and given.kind != "expert":
        raise click.UsageError(f"--by {given.kind} needs --statistics STATS")
    orders = choose_orders(path, given.kind, given.statistics)
    with ProgressBar() as progress:
        reorder_store(
            path, orders, given.kind, output=given.output, replace=given.replace, progress=progress
        )
    click.echo(f"{given.output or path}: {len(orders)} layers in order of {given.kind}", err=True)


@dataclass(frozen=True, kw_only=True)
class RepackOptions:
    stride: str | None = option(metavar="SIZE")
    scales: Literal["inline", "resident"] | None = None
    output: Path | None = option("-o", "--output", metavar="STORE")
    replace: bool = option("--force")


@store_command.command("repack")
@take_store
@take_options(RepackOptions)
def repack(path: Path, given: RepackOptions) -> None:
    """Rewrite STORE with another stride, or with its scales in another place.

    A plan's bundle.stride and bundle.scales must match its store; `pi2 plan` shows which stride
    suits a device.  If scales move and no stride is given, the smallest that fits is used.  Results
    do not change.  Disk space for a second store is needed; the old store is kept until the new one
    is complete.  After Ctrl-C the same command resumes."""
    from pi2.measuring.ordering import reorder_store

    if given.stride is None and given.scales is None:
        raise click.UsageError("Say what shall change: --stride, --scales, or both.")
    size = None if given.stride is None else _parse_stride(given.stride)
    with ProgressBar() as progress:
        manifest = reorder_store(
            path,
            stride=size,
            scales=given.scales,
            output=given.output,
            replace=given.replace,
            progress=progress,
        )
    bundle = manifest.bundle
    click.echo(
        f"{given.output or path}: neurons lie {bundle.stride} bytes apart, scales {bundle.scales}",
        err=True,
    )


def _parse_stride(text: str) -> int:
    from pi2.plan.documents.quantities import parse_size

    size = parse_size(text, "--stride", "P105")
    if size > 1 << 30:
        raise UserError.of("P105", f"--stride {text!r}: the most is 1GiB")
    return size


def print_tables(path: Path, manifest: Manifest) -> None:
    for name, text in list_facts(path, manifest):
        click.echo(f"{name:17}  {text}")
    files = list(list_files(manifest))
    width = max(len(name) for name, _, _ in files)
    click.echo(f"\n{'file':{width}}  {'MiB':>9}  holds")
    for name, size_bytes, content in files:
        click.echo(f"{name:{width}}  {size_bytes / MIB:9.2f}  {content}".rstrip())


def list_facts(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    bundle, shape = manifest.bundle, manifest.model.parts["shape"]
    yield "store", str(path)
    yield "model", manifest.model.id
    yield "digest", manifest.model.digest
    sizes = {
        "layers": shape["layers"],
        "hidden": shape["hidden"],
        "neurons per layer": shape["ffn"],
        "vocabulary": shape["vocab"],
    }
    yield "shape", ", ".join(f"{name} {size}" for name, size in sizes.items())
    precisions = manifest.model.parts["quantization"]
    yield "precision", ", ".join(f"{name} {precisions[name]}" for name in precisions)
    parts = ", ".join(f"{part.name} at {part.weights_offset}" for part in bundle.parts)
    yield "bundle", f"{bundle.stride} bytes apart, {bundle.used_bytes} used: {parts}"
    yield "scales", "in the bundles" if bundle.scales == "inline" else "in separate files, resident"
    order = {
        "hotness": "most active first",
        "coactivation": "most active first, in bands; neurons that fire together are neighbours",
        "expert": "most active first, expert by expert"
        + (", in bands" if manifest.predictor is not None else ""),
        "index": "as in the checkpoint",
    }
    yield "order", order[manifest.order]
    ranks = manifest.predictor.rank if manifest.predictor is not None else ()
    yield "predictor", f"rank {describe_ranks(ranks)}" if ranks else "none"
    yield "weights", "random, for measuring only" if manifest.synthetic else "of a checkpoint"
    yield "written by", f"{manifest.created_by}, format version {manifest.format_version}"


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """``64``, or ``32 to 128`` where layers differ."""
    low, high = min(ranks), max(ranks)
    return str(low) if low == high else f"{low} to {high}"


def list_files(manifest: Manifest) -> Iterator[tuple[str, int, str]]:
    """Files as path, bytes and contents; layer files of one size are taken together."""
    layers = [entry for entry in manifest.files if entry.bundles_offset is not None]
    scales = [entry for entry in manifest.files if entry.scales_offset is not None]
    for entry in manifest.files:
        alike = next((group for group in (layers, scales) if entry in group), None)
        if alike is not None:
            if entry is alike[0]:
                size_bytes = sum(other.bytes for other in alike)
                name = entry.path if len(alike) == 1 else f"{entry.path} to {alike[-1].path}"
                content = "neurons each" if alike is layers else "neurons' scales each"
                yield name, size_bytes, f"{entry.rows} {content}"
        elif entry.rows is not None:
            yield entry.path, entry.bytes, f"{entry.rows} dense tensors"
        else:
            yield entry.path, entry.bytes, ""
