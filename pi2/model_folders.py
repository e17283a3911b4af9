"""Folders of models: made of checkpoints, of weights and a plan for this machine."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.caches import VARIABLE, find_cache_folder, has_gguf_suffix, show_path
from pi2.diagnostics import UserError
from pi2.formats import find_packing
from pi2.model.tensors import MIXTURES
from pi2.plan.documents.common import SCHEMA_VERSION
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress, say
from pi2.pulled_models import (
    FILE,
    PLAN,
    RECORD,
    LocalSource,
    PulledModel,
    Source,
    find_model,
    find_models_folder,
    list_models,
)

if TYPE_CHECKING:
    from pi2.importing.checkpoint import Checkpoint
    from pi2.importing.quantize import Wish
    from pi2.plan.documents.model_parts import FfnPrecision
    from pi2.plan.weights.layout import ScalesPlace
    from pi2.store.files import UnfinishedStore


_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def convert_once(
    path: Path, tokenizer: Path | None = None, progress: Progress = ignore_progress
) -> Path:
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
        convert_path(path, source, name, progress, replace=known is not None)
        known = find_converted(source.path)
        assert known is not None
    if not known.plan.exists():
        write_plan(known.folder)
    return known.plan


def write_file_plan(file: str) -> bytes:
    """The plan of a GGUF file, which derives the rest whenever it runs."""
    return f'schema_version = {SCHEMA_VERSION}\nweights = "{file}"\n'.encode()


def write_plan(folder: Path) -> None:
    """Write the plan that ``folder`` lacks; UserError P026 with too little memory for a store."""
    from pi2.planning.wish import read_document
    from pi2.sharing.fetching import write_atomically
    from pi2.store.manifest import read_manifest

    if files := sorted(folder.glob("*.gguf")):
        write_atomically(folder / PLAN, write_file_plan(files[0].name))
        return
    file = next(iter(sorted(folder.glob("*.model.toml"))))
    document = read_document(str(file), "model").document
    assert isinstance(document, Model)
    scales = read_manifest(folder).bundle.scales
    try:
        text = draft_plan_here(document, scales)
    except UserError as error:
        found = error.diagnostics[0]
        if found.code != "P026":
            raise
        help_text = (
            "free memory, or raise the limit of the control group; a plan for more: pi2 new plan "
            f"--model {file} --store {folder} --device host -o {folder / PLAN} {found.help}"
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


BEST = "q4_k_m"
"""Mix of GGUF formats with the least error at about 4.5 bits per weight."""


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


def convert_path(
    path: Path, source: LocalSource, name: str, progress: Progress, *, replace: bool
) -> None:
    """Convert the checkpoint at ``path`` and report it."""
    from pi2.importing.checkpoint import open_checkpoint, use_tokenizer

    given = None if source.tokenizer is None else Path(source.tokenizer)
    checkpoint = use_tokenizer(open_checkpoint(path), given)
    document = describe_titled(checkpoint, name)
    again = ", which has changed," if replace else ""
    obstacles = find_obstacles(checkpoint, document)
    why = f": nothing computes {obstacles[0]} of it as it is" if obstacles else ""
    place = find_models_folder() / name
    say(f"{path}{again} is converted once, into {place}{why}")
    try:
        make_model(
            checkpoint,
            source,
            place,
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
    say(f"`pi2 run {name}` also runs it from now on; `pi2 remove {name}`")


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
) -> None:
    """Make the folder ``output`` with a plan, if one is possible, and weights: GGUF files of a
    checkpoint that are run as they are, a new one of another model whose neurons are all computed,
    else a store."""
    from pi2.importing.convert import convert_checkpoint
    from pi2.importing.new_model import find_mtp
    from pi2.importing.quantizers import Quantizer
    from pi2.importing.requirements import describe_kept, describe_other_parts

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.of(
            "P764",
            f"cannot make {output.parent}: {error.strerror}",
            help=f"set {VARIABLE} to a folder that you may write to",
        ) from None
    own = list_own_files(checkpoint, document) if source.quantization is None else {}
    keeps_head, refusal = find_mtp(checkpoint, document) is not None, ""
    notes = {RECORD: source.write()}
    if own:
        kept, notes[PLAN] = "the file as it is", write_file_plan(next(iter(own)))
        size_bytes = keep_files(own, output, notes, replace)
    elif is_computed_whole(document):
        document, wish = choose_wish(checkpoint, document, source.quantization, BEST)
        kept, notes[PLAN] = f"{wish.describe(document)}, runs as it is", write_file_plan(FILE)
        size_bytes = make_file(checkpoint, document, wish, output, notes, replace, progress)
    else:
        document, keeps_head = choose_precision(document, source.quantization, checkpoint), False
        kept = describe_kept(document)
        written, refusal = write_notes(checkpoint, document, origin)
        notes |= written
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
    say(f"{output}: {origin}, {size_bytes / 2**20:.1f} MiB ({kept})")
    for line in describe_other_parts(checkpoint, keeps_head=keeps_head):
        say(line)
    if PLAN not in notes:
        say(f"no plan was written for this machine: {refusal}")


def make_file(
    checkpoint: Checkpoint,
    document: Model,
    wish: Wish,
    output: Path,
    notes: Mapping[str, bytes],
    replace: bool,
    progress: Progress,
) -> int:
    """Make the folder ``output`` of a new GGUF file and ``notes``; return the file's bytes. A job
    whose weights are fetched meanwhile resumes when called again. Raises as
    `convert_checkpoint`."""
    from importlib.metadata import version

    from pi2.importing.conversion_job import describe_files, read_extra_files
    from pi2.importing.quantize import quantize_checkpoint
    from pi2.importing.requirements import check_checkpoint
    from pi2.store.files import UnfinishedStore

    check_checkpoint(checkpoint, document)
    read_extra_files(checkpoint, document, None, {})
    asked = version("pi2"), wish, document.quantization, describe_files(checkpoint)
    job = hashlib.sha256(repr(asked).encode()).hexdigest()
    keeps = checkpoint.shards is not None
    with UnfinishedStore(output, job=job, replace=replace, keeps_failed=keeps) as room:
        file = quantize_checkpoint(
            checkpoint, document, room.folder / FILE, wish, progress=progress
        )
        publish(room, output, notes)
    return file.size_bytes


def find_obstacles(source: Checkpoint, model: Model) -> list[str]:
    """Why nothing computes a GGUF file as it is; empty if it is computed, and of other
    checkpoints."""
    from pi2.weights.gguf_weights import GgufWeights

    if not source.has_blocks:
        return []
    return GgufWeights(source, model).find_obstacles()


def list_own_files(checkpoint: Checkpoint, document: Model) -> dict[str, Path]:
    """The GGUF files of a checkpoint that runs as it is, by their names in a model's folder; none
    if it does not."""
    if not checkpoint.has_blocks or find_obstacles(checkpoint, document):
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
    from pi2.store.files import UnfinishedStore, link_or_copy

    with UnfinishedStore(output, job="", replace=replace) as room:
        for name, file in files.items():
            link_or_copy(file.resolve(), room.folder / name)
        publish(room, output, notes)
    return sum(file.stat().st_size for file in files.values())


def publish(room: UnfinishedStore, output: Path, notes: Mapping[str, bytes]) -> None:
    """Write ``notes`` next to the weights, and give the folder its name."""
    from pi2.importing.conversion_job import keep_old_notes

    for path, content in keep_old_notes(output, notes).items():
        (room.folder / path).write_bytes(content)
    room.publish()


def is_computed_whole(model: Model) -> bool:
    """Whether every neuron of a chosen expert, or of a dense FFN, is computed: such a model is a
    GGUF file, others are neuron stores."""
    from pi2.backends.blocks.contract import find_unknown
    from pi2.importing.rows import make_plain

    return model.is_smooth and model.predictor is None and not find_unknown(make_plain(model))


def choose_wish(
    source: Checkpoint, model: Model, quantization: str | None, usual: str | None = None
) -> tuple[Model, Wish]:
    """How a GGUF file of a checkpoint stores weights, and the document with that: as a type of
    GGUF files or a precision of stores asks for; without either as they are, or, of plain numbers,
    as the ``usual`` type.  `UserError` P707 for a precision that no such file has."""
    from pi2.importing.quantize import Wish

    arranges = bool(find_obstacles(source, model))
    if quantization is None:
        is_plain = all(tensor.kind == "stored" for tensor in source.tensors.values())
        quantization = usual if is_plain else None
    if quantization in MIXTURES:
        return model, Wish(mixture=quantization, arranges=arranges)
    if quantization is not None:
        if find_packing(quantization).like is None:
            raise UserError.of(
                "P707",
                f"GGUF files have no {quantization}: {source.folder} cannot become one",
                help="leave --quantization out, or make a neuron store",
            )
        model = choose_precision(model, quantization, source)
    return model, Wish(keeps=quantization is None, arranges=arranges)


def choose_precision(model: Model, precision: FfnPrecision | None, source: Checkpoint) -> Model:
    """The model with weights of one type; tables, heads and predictors have 8 bits at least, and
    as projections have that cannot have that type.  None: no fewer bits than a GGUF file has."""
    from pi2.importing.requirements import keep_bits
    from pi2.plan.documents.model_parts import Quantization

    if precision is None:
        return keep_bits(source, model)
    packing = find_packing(precision)
    attention = precision if "projections" in packing.uses else "int8"
    careful = precision if packing.is_plain else "int8"
    chosen = Quantization(
        ffn=precision, attention=attention, embedding=careful, head=careful, predictor=careful
    )
    return model.model_copy(update={"quantization": chosen})


def write_notes(
    checkpoint: Path | Checkpoint, model: Model, origin: str, scales: ScalesPlace = "inline"
) -> tuple[dict[str, bytes], str]:
    """The files that a store has in addition to its weights: the model document and, if one is
    possible, a plan for this machine. Returns them by name, and the reason if there is no plan."""
    from pi2.importing.checkpoint import Checkpoint, open_checkpoint
    from pi2.importing.config import read_sampling
    from pi2.importing.new_model import write_model

    if model.sampling is None:
        opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        model = model.model_copy(update={"sampling": read_sampling(opened)})
    notes = {f"{model.id}.model.toml": write_model(model, origin).encode()}
    try:
        notes[PLAN] = draft_plan_here(model, scales).encode()
    except UserError as error:
        return notes, error.diagnostics[0].message
    return notes, ""


def draft_plan_here(model: Model, scales: ScalesPlace) -> str:
    """A plan for this machine, next to its store; raises as `draft_plan`."""
    from pi2.authoring.drafting import Wish, draft_plan
    from pi2.planning.wish import read_document
    from pi2.weights.file_reading import FileFiller

    device = read_document("host", "device").document
    assert isinstance(device, Device)
    name = (model.name or model.id)[:120]
    file = f"./{model.id}.model.toml"
    wish = Wish(device="host", model=file, store=".", budget_bytes=None, name=name, scales=scales)
    return draft_plan(wish, device, model, FileFiller().find_memory)


def fetch_model(
    model: str,
    quantization: str | None = None,
    file: str | None = None,
    name: str | None = None,
    *,
    replace: bool = False,
    progress: Progress = ignore_progress,
) -> PulledModel:
    """Fetch a repository of the hub and make a model of it; raises as `find_repository`, and
    `UserError` P765 for a name that another model has."""
    from huggingface_hub import is_offline_mode

    from pi2.importing.hub import find_repository, hold_folder, open_repository, parse_reference

    reference = parse_reference(model if ":" in model else f"hf:{model}")
    file = reference.file or file
    chosen = reference.repository.partition("/")[2] if name is None else name
    there = find_model(chosen)
    if there is not None and not replace and is_offline_mode():
        own = there.source
        asked = (reference.repository, reference.revision, file, quantization)
        if isinstance(own, Source) and asked in (
            (own.repository, revision, own.file, own.quantization)
            for revision in (own.revision, own.commit)
        ):
            say(f"{chosen} was pulled already, at commit {own.commit[:12]}")
            return there
    repository = find_repository(reference, file)
    source = Source(
        repository=repository.name,
        revision=reference.revision,
        commit=repository.commit,
        quantization=quantization,
        file=file,
    )
    if there is not None and not replace:
        check_same(there, source)
        say(f"{chosen} was pulled already, at commit {source.commit[:12]}")
        return there
    owner = repository.name.replace("/", "--")
    work = find_cache_folder("downloads") / owner / repository.commit
    with hold_folder(work):
        checkpoint = open_repository(repository, work, progress)
        output = find_models_folder() / chosen
        make_model(
            checkpoint,
            source,
            output,
            progress,
            document=describe_titled(checkpoint, repository.name.partition("/")[2]),
            origin=source.name,
            replace=replace,
        )
        shutil.rmtree(work, ignore_errors=True)
    made = find_model(chosen)
    assert made is not None
    return made


def check_same(model: PulledModel, source: Source) -> None:
    """`UserError` P765 if ``model`` was not made from ``source``."""
    own = model.source
    if isinstance(own, LocalSource) or dataclasses.replace(own, revision="") != dataclasses.replace(
        source, revision=""
    ):
        raise UserError.of(
            "P765",
            f"{model.name} is {own.name}, {own.quantization or 'as it is by default'}",
            help="choose another name with --name, or replace it with --force",
        )
