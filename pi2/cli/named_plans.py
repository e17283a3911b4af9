"""Resolves names of plans: paths, pulled or converted models, shipped documents, checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.caches import VARIABLE, has_gguf_suffix, is_gguf, show_path
from pi2.cli.commands import ProgressBar
from pi2.diagnostics import UserError
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.reading.references import list_shipped
from pi2.plan.toml.source import KINDS, Kind
from pi2.pulled_models import (
    PLAN,
    RECORD,
    LocalSource,
    PulledModel,
    Source,
    find_model,
    find_models_folder,
    list_models,
)
from pi2.weights.file_reading import FileFiller

if TYPE_CHECKING:
    from pi2.importing.checkpoint import Checkpoint
    from pi2.plan.documents.model import Model
    from pi2.progress import Progress


_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def is_checkpoint(path: Path) -> bool:
    """Whether a name means a checkpoint: a GGUF file, or a folder with a configuration."""
    try:
        if path.is_dir():
            return (path / "config.json").is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
    return is_gguf(path)


def convert_once(path: Path, tokenizer: Path | None = None) -> Path:
    """The plan of a checkpoint, converted if it is new or changed; a given ``tokenizer`` stays in
    use. UserError as `convert_checkpoint`, P026 if no plan fits this machine."""
    if tokenizer is not None:
        from pi2.importing.checkpoint import find_tokenizer

        tokenizer = find_tokenizer(tokenizer)
    source = LocalSource.describe(path, tokenizer)
    known = find_converted(source.path)
    if known is not None and tokenizer is None:
        before = getattr(known.source, "tokenizer", None)
        if before is not None and os.path.isfile(before):
            source = LocalSource.describe(path, Path(before))
    if known is None or known.source != source:
        name = choose_name(path, source) if known is None else known.name
        convert_path(path, source, name, replace=known is not None)
        known = find_converted(source.path)
        assert known is not None
    if not known.plan.exists():
        write_plan(known.folder)
    return known.plan


FILE = "model.gguf"
"""The weights of a model that runs as a GGUF file."""


def write_file_plan(file: str) -> bytes:
    """The plan of a GGUF file, which derives the rest whenever it runs."""
    return f'schema_version = {SCHEMA_VERSION}\nweights = "{file}"\n'.encode()


def write_plan(folder: Path) -> None:
    """Write the plan that ``folder`` lacks; UserError P026 with too little memory for a store."""
    from pi2.cli.convert import draft_plan_here
    from pi2.cli.options import read_model
    from pi2.sharing.fetching import write_atomically
    from pi2.store.manifest import read_manifest

    if files := sorted(folder.glob("*.gguf")):
        write_atomically(folder / PLAN, write_file_plan(files[0].name))
        return
    document = next(iter(sorted(folder.glob("*.model.toml"))))
    scales = read_manifest(folder).bundle.scales
    try:
        text = draft_plan_here(read_model(str(document)), scales)
    except UserError as error:
        found = error.diagnostics[0]
        if found.code != "P026":
            raise
        help_text = (
            "free memory, or raise the limit of the control group; a plan for more: pi2 new plan "
            f"--model {document} --store {folder} --device host -o {folder / PLAN} {found.help}"
        )
        message = f"no plan of {folder.name} fits this machine: {found.message}"
        raise UserError.of("P026", message, help=help_text, notes=found.notes) from None
    write_atomically(folder / PLAN, text.encode())


def find_converted(path: str) -> PulledModel | None:
    """The model that was made from the checkpoint at the absolute ``path``, changed or not."""
    for model in list_models():
        if isinstance(model.source, LocalSource) and model.source.path == path:
            return model
    return None


def find_title(path: Path) -> str:
    """The name of a file or folder; of a GGUF file without its ending, and which part it is."""
    return _SPLIT.sub("", path.stem) if has_gguf_suffix(path) else path.name


def choose_name(path: Path, source: LocalSource) -> str:
    """A name that no other model has: the file's, or with a few letters more."""
    title = find_title(path.resolve())
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", title).strip(".-")[:80] or "model"
    if not (find_models_folder() / name).exists():
        return name
    return f"{name}-{hashlib.sha256(os.fsencode(source.path)).hexdigest()[:8]}"


def convert_path(path: Path, source: LocalSource, name: str, *, replace: bool) -> None:
    """Convert the checkpoint at ``path`` and report it."""
    from pi2.importing.checkpoint import open_checkpoint, use_tokenizer
    from pi2.importing.gguf_checkpoint import GgufCheckpoint
    from pi2.weights.gguf_weights import GgufWeights

    given = None if source.tokenizer is None else Path(source.tokenizer)
    checkpoint = use_tokenizer(open_checkpoint(path), given)
    document = describe_titled(checkpoint, name)
    again = ", which has changed," if replace else ""
    why = ""
    if isinstance(checkpoint, GgufCheckpoint):
        obstacles = GgufWeights(checkpoint, document).find_obstacles()
        why = f": nothing computes {obstacles[0]} of it as it is" if obstacles else ""
    place = find_models_folder() / name
    click.echo(f"{path}{again} is converted once, into {place}{why}", err=True)
    try:
        with ProgressBar() as progress:
            make_model(
                checkpoint,
                source,
                find_models_folder() / name,
                progress,
                document=document,
                origin=show_path(Path(path.name)),
                replace=replace,
            )
    except UserError as error:
        found = error.diagnostics[0]
        if found.code != "P523":
            raise
        help_text = (
            f"free disk space, or set {VARIABLE} to a folder with room that you may write to"
        )
        raise UserError([dataclasses.replace(found, help=help_text)]) from None
    click.echo(f"`pi2 run {name}` also runs it from now on; `pi2 remove {name}`", err=True)


def describe_titled(checkpoint: Checkpoint, title: str) -> Model:
    """Describe a checkpoint's model under the name ``title``; raises as `describe_checkpoint`."""
    from pi2.importing.new_model import describe_checkpoint, make_id

    document = describe_checkpoint(checkpoint, make_id(title)).model
    return document.model_copy(update={"name": title[:120]})


def make_model(
    checkpoint: Checkpoint,
    source: Source | LocalSource,
    output: Path,
    progress: Progress,
    *,
    document: Model,
    origin: str,
    replace: bool,
) -> Path:
    """Make the folder ``output`` with a plan and weights.  Without a precision that is asked for
    they are the GGUF files of the checkpoint, or a new one, if these run as they are; else a store.
    Return the plan's path, if there is one."""
    from pi2.cli.convert import BEST, choose_precision, runs_as_it_is, write_notes
    from pi2.cli.options import MIB
    from pi2.importing.convert import convert_checkpoint
    from pi2.importing.new_model import find_mtp
    from pi2.importing.quantizers import Quantizer
    from pi2.importing.requirements import describe_kept, describe_other_parts

    own = list_own_files(checkpoint, document) if source.quantization is None else {}
    is_file = bool(own) or (source.quantization is None and runs_as_it_is(checkpoint, document))
    if is_file:
        kept = "the file as it is" if own else f"{BEST}, runs as it is"
        notes, refusal = {PLAN: write_file_plan(next(iter(own), FILE))}, ""
    else:
        document = choose_precision(document, source.quantization, checkpoint)
        kept = describe_kept(document)
        notes, refusal = write_notes(checkpoint, document, origin)
    notes[RECORD] = source.write()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.of(
            "P764",
            f"cannot make {output.parent}: {error.strerror}",
            help=f"set {VARIABLE} to a folder that you may write to",
        ) from None
    if own:
        size_bytes = keep_files(own, output, notes, replace)
    elif is_file:
        size_bytes = make_file(checkpoint, document, output, notes, replace, progress)
    else:
        manifest = convert_checkpoint(
            checkpoint,
            document,
            output,
            notes=notes,
            quantizer=Quantizer("search"),
            replace=replace,
            progress=progress,
        )
        size_bytes = sum(entry.bytes for entry in manifest.files)
    click.echo(f"{output}: {origin}, {size_bytes / MIB:.1f} MiB ({kept})", err=True)
    keeps_head = is_file and find_mtp(checkpoint, document) is not None
    for line in describe_other_parts(checkpoint, keeps_head=keeps_head):
        click.echo(line, err=True)
    if PLAN not in notes:
        click.echo(f"no plan was written for this machine: {refusal}", err=True)
    return output / PLAN


def make_file(
    checkpoint: Checkpoint,
    document: Model,
    output: Path,
    notes: Mapping[str, bytes],
    replace: bool,
    progress: Progress,
) -> int:
    """Make the folder ``output`` of a GGUF file and ``notes``; return the file's bytes. A job whose
    weights are fetched meanwhile resumes when called again. Raises as `convert_checkpoint`."""
    from pi2.cli.convert import BEST
    from pi2.importing.conversion_job import describe_files, keep_old_notes, read_extra_files
    from pi2.importing.quantize import quantize_checkpoint
    from pi2.importing.requirements import check_checkpoint
    from pi2.store.verification import UnfinishedStore

    check_checkpoint(checkpoint, document)
    read_extra_files(checkpoint, document, None, {})
    job = hashlib.sha256(repr((version("pi2"), BEST, describe_files(checkpoint))).encode())
    room = UnfinishedStore(output, job=job.hexdigest(), replace=replace)
    try:
        place = room.folder / FILE
        made = quantize_checkpoint(checkpoint, document, place, BEST, progress=progress)
        for path, content in keep_old_notes(output, notes).items():
            (room.folder / path).write_bytes(content)
    except BaseException:
        room.abandon(keep=checkpoint.shards is not None)
        raise
    room.publish()
    return made.size_bytes


def list_own_files(checkpoint: Checkpoint, document: Model) -> dict[str, Path]:
    """The GGUF files of a checkpoint that runs as it is, by their names in a model's folder; none
    if it does not."""
    from pi2.importing.gguf_checkpoint import GgufCheckpoint
    from pi2.weights.gguf_weights import GgufWeights

    if not isinstance(checkpoint, GgufCheckpoint):
        return {}
    if GgufWeights(checkpoint, document).find_obstacles():
        return {}
    count = len(checkpoint.files)
    if count == 1:
        return {FILE: checkpoint.files[0]}
    numbered = enumerate(checkpoint.files, 1)
    return {f"model-{number:05d}-of-{count:05d}.gguf": file for number, file in numbered}


def keep_files(
    files: Mapping[str, Path], output: Path, notes: Mapping[str, bytes], replace: bool
) -> int:
    """Make the folder ``output`` of ``files`` by their names in it and of ``notes``; return the
    files' bytes.  They are linked, or copied to another disk, and stay where they are.  Raises
    `UserError` P521 to P523."""
    from pi2.importing.conversion_job import keep_old_notes
    from pi2.store.verification import UnfinishedStore, explain_os_error

    room = UnfinishedStore(output, job="", replace=replace)
    try:
        for name, file in files.items():
            link_or_copy(file.resolve(), room.folder / name)
        for path, content in keep_old_notes(output, notes).items():
            (room.folder / path).write_bytes(content)
    except BaseException as error:
        room.abandon(keep=False)
        if isinstance(error, OSError):
            raise explain_os_error(error, output) from None
        raise
    room.publish()
    return sum(file.stat().st_size for file in files.values())


def link_or_copy(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another disk, or one without links
        with file.open("rb") as source, place.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)
            target.flush()
            os.fsync(target.fileno())


MANIFEST = "manifest.json"
HUB = "hf:"


def find_plan_path(path: Path, *, files: FileFiller | None = None) -> Path:
    """The plan that ``path`` names; a checkpoint is converted once, but not a GGUF file that runs
    as it is. Missing weights of the hub are offered on a terminal. UserError P001 for an unknown
    name."""
    found = _find(path, ("plan",), files)
    if sys.stdin.isatty() and sys.stderr.isatty():
        from pi2.weights.file_reading import list_missing

        for weights in list_missing(found):
            if click.confirm(f"{weights} is not on this machine: fetch it?", err=True):
                from pi2.cli.models import pull_weights

                pull_weights(found)
    return found


def find_retokenized(
    path: Path, tokenizer: Path | None, *, files: FileFiller | None = None
) -> tuple[Path, dict[str, object]]:
    """The named plan with ``tokenizer``, and its overrides; UsageError without a checkpoint."""
    if tokenizer is None:
        return find_plan_path(path, files=files), {}
    if not is_checkpoint(path):
        raise click.UsageError(f"--tokenizer is for a checkpoint; {path} has its tokenizer")
    if (files or FileFiller()).runs_as_it_is(path):
        return path, {"tokenizer": str(tokenizer.absolute())}
    return convert_once(path, tokenizer), {}


def find_document_path(path: Path) -> Path:
    """The plan, device or model that ``path`` names; a folder stays one."""
    return _find(path, KINDS)


def _find(path: Path, kinds: Sequence[Kind], files: FileFiller | None = None) -> Path:
    if is_checkpoint(path):
        return path if (files or FileFiller()).runs_as_it_is(path) else convert_once(path)
    try:
        found = _find_plan(path)
        if found is not None or os.path.lexists(path):
            return found or path
        for kind in kinds:
            if (document := list_shipped(kind).get(str(path))) is not None:
                return document
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise _report_unknown(path)


def list_names() -> list[str]:
    return [*(model.name for model in list_models()), *list_shipped("plan")]


def _find_plan(path: Path) -> Path | None:
    """The plan that a name or a model's folder means; None for another path."""
    if any((path / name).is_file() for name in (MANIFEST, FILE, RECORD)):
        return path / PLAN
    if path.exists() and not path.is_dir():
        return None
    name = str(path)
    if name.startswith(HUB):
        return _find_pulled(name).plan
    model = find_model(name)
    return list_shipped("plan").get(name) if model is None else model.plan


def _find_pulled(reference: str) -> PulledModel:
    """The model that was pulled from a place of the hub; UserError P001 if none was."""
    from pi2.importing.hub import parse_reference

    wanted = parse_reference(reference)
    for model in list_models():
        source = model.source
        if isinstance(source, Source) and source.repository == wanted.repository:
            if "@" not in reference or wanted.revision in (source.revision, source.commit):
                return model
    if sys.stdin.isatty() and sys.stderr.isatty():
        question = f"{reference} is not on this machine: fetch and convert it?"
        if click.confirm(question, default=True, err=True):
            from pi2.cli.models import fetch_model

            return fetch_model(reference)
    raise UserError.of(
        "P001",
        f"{reference} was not pulled to this machine",
        help=f"fetch it: `pi2 pull {reference}`",
    )


def _report_unknown(path: Path) -> UserError:
    from difflib import get_close_matches

    name, known = str(path), list_names()
    near: list[str] = []
    if os.path.isdir(path.parent):
        files = {item.name: item for item in path.parent.iterdir() if item.suffix != ".part"}
        near = [str(files[item]) for item in get_close_matches(path.name, files, n=2, cutoff=0.7)]
    near += get_close_matches(name.removesuffix(".plan.toml"), known, n=3, cutoff=0.5)
    near += [item for item in known if item.rpartition("/")[2] == name and item not in near]
    parts = [f"did you mean {' or '.join(near)}?"] if near else []
    if not near and not path.suffix and path.name == name:
        shown = ", ".join(item for item in known if "/" not in item)
        parts.append(f"known are {shown}, and `pi2 doctor` lists all plans that come with pi2;")
    if len(path.parts) == 2 and not path.is_absolute() and not path.suffix.startswith(".toml"):
        parts.append(f"`pi2 pull {HUB}{name}` fetches a model of the hub;")
    parts.append("`pi2 list` shows the models that were pulled or converted")
    return UserError.of(
        "P001", "no file, plan or model has this name", file=name, help=" ".join(parts)
    )
