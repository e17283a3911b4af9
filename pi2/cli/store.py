"""Make neuron stores and GGUF files of checkpoints; inspect, verify, reorder and repack stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pi2.caches import has_gguf_suffix, is_gguf
from pi2.cli.main import Subcommands
from pi2.cli.options import (
    FILE,
    MIB,
    TOKENIZER,
    add_json_option,
    option,
    read_model,
    suggest_models,
    take_options,
    write_file,
)
from pi2.diagnostics import UserError
from pi2.formats import name_packings
from pi2.logging import wants_colour
from pi2.model.tensors import MIXTURES
from pi2.model_folders import BEST, choose_precision, choose_wish, is_computed_whole, write_notes
from pi2.plan.documents.quantities import parse_size
from pi2.progress import ProgressBar
from pi2.pulled_models import FILE as MODEL_FILE
from pi2.pulled_models import PLAN, find_model

if TYPE_CHECKING:
    from pi2.importing.checkpoint import Checkpoint
    from pi2.importing.quantizers import TensorError
    from pi2.plan.documents.model import Model
    from pi2.store.manifest import Manifest


def _find_store(ctx: click.Context, option: click.Parameter, path: Path) -> Path:
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


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    model: str | None = option(metavar="FILE", shell_complete=suggest_models)
    output: Path = option("-o", "--output", required=True, metavar="STORE")
    quantization: str | None = option(type=click.Choice((*name_packings("neurons"), *MIXTURES)))
    imatrix: Path | None = option(type=FILE, metavar="FILE")
    calibrate: tuple[Path, ...] = option("--calibrate", metavar="TEXT")
    tokenizer: Path | None = TOKENIZER()
    predictors: Path | None = option(metavar="FILE")
    activations: Path | None = option(metavar="FILE")
    mtp: bool = option("--mtp")
    quantizer: Literal["nearest", "search", "compensated"] = "search"
    scales: Literal["inline", "resident"] = "inline"
    statistics: Path | None = option(metavar="STATS")
    errors: Path | None = option(type=FILE, metavar="FILE")
    replace: bool = option("--force")


@click.command("convert")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@take_options(ConvertOptions)
def convert_command(checkpoint: Path, given: ConvertOptions) -> None:
    """Convert CHECKPOINT into the neuron store STORE, or into a GGUF file.

    CHECKPOINT is a Hugging Face folder (config.json, tokenizer.json, weights), a GGUF file (any
    part of a split one; PowerInfer's too), or, with -o FILE.gguf, a neuron store with its model
    document.  Weights are safetensors or, with torch, PyTorch files.
    The store also gets the model document and a plan for this machine, so the model runs at once.
    A failed conversion leaves nothing behind; after Ctrl-C the same command resumes.  With a type
    such as q4_k_m a GGUF file is written instead."""
    from pi2.importing.checkpoint import open_checkpoint, use_tokenizer
    from pi2.importing.convert import convert_checkpoint
    from pi2.importing.new_model import (
        describe_checkpoint,
        describe_mtp,
        name_mtp_tensors,
        name_origin,
    )
    from pi2.importing.predictors import announce_predictors
    from pi2.importing.quantizers import Quantizer
    from pi2.importing.requirements import describe_kept, describe_other_parts, describe_rounded

    stated = None if given.model is None else read_model(given.model)
    opened = use_tokenizer(open_checkpoint(checkpoint, stated), given.tokenizer)
    if stated is None:
        document, origin = describe_checkpoint(opened).model, name_origin(checkpoint)
        if given.predictors is not None and document.predictor is None:
            document = announce_predictors(document, opened, given.predictors)
    else:
        document, origin = stated, given.model or ""
    if given.mtp:
        if has_gguf_suffix(given.output) or given.quantization in MIXTURES:
            raise click.UsageError("--mtp makes a neuron store")
        document = describe_mtp(opened, document)
    if given.quantization in MIXTURES or has_gguf_suffix(given.output):
        quantize(opened, document, given)
        return
    if opened.document is not None and checkpoint.is_dir():
        raise click.UsageError("a neuron store becomes a GGUF file: -o FILE.gguf")
    has_neurons = document.moe is None or document.predictor or given.activations
    if not (has_neurons or document.is_mtp or given.quantization):
        file = f"{given.output.name or checkpoint.name}.gguf"
        raise UserError.of(
            "P525",
            f"the router of `{document.id}` chooses whole experts: it runs as a GGUF file",
            help=f"write `pi2 convert {checkpoint} -o {file}`; --quantization int4 makes a store, "
            "for a GPU that has the whole model or for thresholds",
        )
    if given.imatrix is not None or given.calibrate:
        name = "imatrix" if given.imatrix is not None else "calibrate"
        raise click.UsageError(f"--{name} goes with --quantization {' or '.join(MIXTURES)}")
    if given.quantization is not None or given.model is None:
        document = choose_precision(document, given.quantization, opened)
    notes, refusal = write_notes(opened, document, origin, given.scales)
    rounding = Quantizer(given.quantizer, given.statistics, report=given.errors is not None)
    with ProgressBar() as progress:
        manifest = convert_checkpoint(
            opened,
            document,
            given.output,
            predictors=given.predictors,
            activations=given.activations,
            notes=notes,
            scales=given.scales,
            quantizer=rounding,
            replace=given.replace,
            progress=progress,
        )
    size_mib = sum(entry.bytes for entry in manifest.files) / MIB
    kept = describe_kept(document)
    files = len(manifest.files)
    click.echo(f"{given.output}: {files} files, {size_mib:.1f} MiB ({kept})", err=True)
    if document.is_mtp:
        plan = f'{{ drafts = "plan", plan = "{given.output / PLAN}" }}'
        click.echo(f"next: write decode.speculation = {plan} into the model's plan", err=True)
        return
    rounded = describe_rounded(opened, document) if given.quantization is None else []
    for line in (*describe_other_parts(opened), *rounded):
        click.echo(line, err=True)
    if given.model is None and name_mtp_tensors(opened, document)[1]:
        advice = f"pi2 convert {checkpoint} --mtp -o {given.output}-mtp"
        click.echo(f"its MTP head drafts tokens: `{advice}`", err=True)
    if given.quantization is None and is_computed_whole(document):
        advice = f"pi2 convert {checkpoint} -o {given.output.name}.gguf --quantization {BEST}"
        click.echo(f"every neuron is computed: {BEST} rounds less, `{advice}`", err=True)
    if rounding.errors is not None and given.errors is not None:
        click.echo(write_errors(given.errors, rounding.errors.list_errors()), err=True)
    if not (has_neurons or document.is_mtp):
        advice = f"pi2 convert {given.output} -o {given.output.name}.gguf"
        click.echo(f"CPUs run it as a file: `{advice}`", err=True)
    elif PLAN in notes:
        click.echo(f"next: pi2 run {given.output / PLAN} --prompt 'Hello'", err=True)
    else:
        click.echo(f"no plan was written for this machine: {refusal}", err=True)


def quantize(source: Checkpoint, model: Model, given: ConvertOptions) -> None:
    """Write a GGUF file and report it; UsageError for stores' options."""
    output = given.output
    from pi2.importing.quantize import quantize_checkpoint
    from pi2.importing.quantizers import ErrorReport, read_imatrix

    kind = given.quantization or (BEST if given.imatrix or given.calibrate else None)
    model, wish = choose_wish(source, model, kind)
    stores = ("predictors", "activations", "statistics")
    named = [name for name in stores if getattr(given, name)]
    if named:
        raise click.UsageError(f"--{named[0]} is for neuron stores, not for GGUF files")
    if not has_gguf_suffix(output):
        raise click.UsageError(f"--quantization {given.quantization} needs -o FILE.gguf")
    if output.exists():
        read = {tensor.file for tensor in source.tensors.values()}
        if any(output.samefile(file) for file in read):
            raise UserError.of(
                "P521", f"{output} is the checkpoint itself", help="choose another name"
            )
        if not given.replace:
            raise UserError.of(
                "P521", f"{output} exists already", help="choose another name, or give --force"
            )
    if given.imatrix is not None and given.calibrate:
        raise click.UsageError("--imatrix and --calibrate exclude each other")
    importance = None if given.imatrix is None else read_imatrix(given.imatrix)
    errors = None if given.errors is None else ErrorReport()
    with ProgressBar() as progress:
        if given.calibrate:
            from pi2.measuring.importance import record_importance

            importance = record_importance(
                source,
                model,
                given.calibrate,
                output.parent,
                arranges=wish.arranges,
                progress=progress,
            )
        wish = replace(wish, importance=importance)
        made = quantize_checkpoint(source, model, output, wish, errors=errors, progress=progress)
    weighed = "" if importance is None else f", {made.weighed} weighed by {importance.file}"
    size_mib = made.size_bytes / MIB
    count = "the checkpoint's precision" if kind is None else f"{made.quantized} matrices quantised"
    click.echo(f"{output}: {size_mib:.1f} MiB, {count}{weighed}", err=True)
    if errors is not None and given.errors is not None:
        click.echo(write_errors(given.errors, errors.list_errors()), err=True)
    click.echo(f"next: pi2 run {output} --prompt 'Hello'", err=True)


def write_errors(file: Path, found: Sequence[TensorError]) -> str:
    """Write the errors of all tensors; returns a line about the worst of them."""
    from dataclasses import asdict

    report = {"tensors": [asdict(error) for error in found]}
    write_file(file, f"{json.dumps(report, indent=1)}\n".encode())
    if not found:
        return f"{file}: nothing was quantised; what a resumed job had done is not listed"
    worst = max(found, key=lambda error: error.relative)
    return f"{file}: {len(found)} tensors; the worst is {worst.tensor}, {worst.relative:.2%} off"
