"""Builds a bundle, reproducible byte by byte; the whole folder gets its name at the end."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.contract import describe_libraries, list_libraries
from pi2.backends.blocks.room import GRIDS, make_tables, place_tables
from pi2.backends.compiler.cache import compile_ahead
from pi2.backends.cpu.request import describe_tensors
from pi2.backends.cpu.request import list_specs as list_cpu_specs
from pi2.backends.hexagon.arrays import UnitArrays
from pi2.backends.hexagon.specification import PROGRAM, HexagonSpec, write_library
from pi2.diagnostics import UserError
from pi2.engine.assembly import make_request
from pi2.fitting import describe_unit
from pi2.fitting.misfits import find_store_misfits
from pi2.machine import detect_machine
from pi2.memory.host_loops import CheckInstruction, HostSpec, choose_checks
from pi2.phone.contents import PACKAGES, Wish, aim_plan, list_code
from pi2.phone.documents import (
    NUMBERS,
    PLAN,
    STORE,
    TABLE,
    describe_file,
    write_index,
    write_resolved,
)
from pi2.phone.replacements.libraries import INDEX as KERNELS
from pi2.phone.replacements.libraries import Spec, describe_spec
from pi2.phone.runtime.probing import list_recipes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sources import FileFacts
from pi2.plan.documents.device import IsaFeature
from pi2.plan.weights.layout import Tensor
from pi2.progress import Progress
from pi2.store.files import hash_file
from pi2.store.manifest import MANIFEST
from pi2.store.reader import NeuronStore
from pi2.weights.gguf_weights import GgufWeights

TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def describe_weights(facts: FileFacts, weights: GgufWeights) -> tuple[dict[str, Any], F32]:
    """Return the table of a file's tensors, and its vectors one after the other."""
    tensors, vectors, numbers, place = [], [], [], 0
    for at in weights.list_places():
        tensor = None if at[0] in weights.vectors else weights.find(*at)
        if tensor is not None:
            own = {name: getattr(tensor, name) for name in tensor.__dataclass_fields__}
            orders = {
                name: own[name].tolist() for name in ("order", "columns") if own[name] is not None
            }
            tensors.append((*at, own | orders))
        if tensor is None or tensor.all_rows == 1:
            vector = weights.read_vector(*at)
            if vector is not None:
                vectors.append((*at, place, place + vector.size))
                numbers.append(vector)
                place += vector.size
    table = {
        "files": [file.name for file in weights.files],
        "tensors": tensors,
        "vectors": vectors,
        "keys_of_vectors": sorted(weights.vectors),
        "numbers": NUMBERS,
        "facts": describe_file(facts),
        "sha256": {file.name: hash_file(file) for file in weights.files},
    }
    joined = np.concatenate(numbers) if numbers else np.zeros(0, np.float32)
    return table, joined.astype("<f4")


def write_notes(room: Path, resolved: ResolvedPlan) -> None:
    folder = room / "licences"
    folder.mkdir()
    names = []
    for name in ("LICENSE", "NOTICE"):
        text = _find_licence(name)
        if text is not None:
            (folder / f"pi2-{name}").write_text(text, encoding="utf-8")
            names.append(f"pi2-{name}")
    model = resolved.model
    lines = [
        f"pi2, the programs and the kernels: Apache-2.0 ({', '.join(names) or 'no file found'}).",
        "The kernels were compiled by Apache TVM with LLVM; nothing of either is in this folder.",
        f"The weights of {model.id}: {model.licence or 'the model document states no licence'}.",
        "",
    ]
    (folder / "README.txt").write_text("\n".join(lines), encoding="utf-8")


def _find_licence(name: str) -> str | None:
    beside = Path(__file__).resolve().parents[2] / name
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    try:
        files = distribution("pi2").files or ()
    except PackageNotFoundError:
        return None
    found = [file for file in files if file.name == name]
    return found[0].read_text(encoding="utf-8") if found else None


FOLDER = "hexagon"
SOURCES = ("build.sh", "host.c", "pi2_npu.idl", "protocol.h", "skel.c")
"""Files of the backend's folder ``dsp`` that the vendor's SDK builds."""


def describe_npu(resolved: ResolvedPlan, unit: str) -> HexagonSpec:
    share = describe_unit(resolved, unit).share
    assert share is not None, unit
    return UnitArrays(share).spec


def write_npu(
    room: Path, resolved: ResolvedPlan, unit: str, progress: Progress
) -> tuple[HexagonSpec, Path]:
    """Write an NPU's folder; return its specification and program.  UserError P651."""
    folder, spec = room / FOLDER / unit, describe_npu(resolved, unit)
    write_library(spec, folder, progress)
    package = import_module("pi2.backends.hexagon")
    for name in SOURCES:
        shutil.copyfile(Path(package.__path__[0]) / "dsp" / name, folder / name)
    (folder / "build.sh").chmod(0o755)
    return spec, folder / PROGRAM


StoreMode = Literal["link", "copy", "none"]
"""Hard links where the file system has them, copies, or no store at all."""

START = """\
#!/bin/sh
# Runs this bundle: ./run.sh --prompt TEXT.  PYTHON names another Python than python3.
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m pi2_phone "$here" "$@"
"""


@dataclass(frozen=True, slots=True)
class Built:
    folder: Path
    plan: ResolvedPlan
    """The plan as the bundle has it."""
    own_bytes: int
    """Size of everything but the store."""
    store_bytes: int


@dataclass(frozen=True, slots=True)
class FileContents:
    """A GGUF file, and its metadata."""

    facts: FileFacts
    aimed: ResolvedPlan
    mode: StoreMode

    def list_formats(self) -> set[str]:
        """Number formats whose codes may be looked up in tables."""
        return {tensor.format for _, _, tensor in self.facts.weights.list_matrices()}

    def list_specs(self, wish: Wish) -> list[Spec]:
        """Libraries that a run of the plan asks for."""
        features, architecture = get_processor(self.aimed)
        libraries = list_libraries(self.facts.weights.model, self.aimed.plan.kv.type)
        names = (*libraries, *sorted({*self.list_formats(), "f32"}))
        blocks = describe_libraries(names, features, architecture)
        return [*blocks, *list_host_specs(self.aimed)]

    def bring(self, room: Path, progress: Progress) -> None:
        """Bring the weights, as far as the bundle is to have them."""
        weights: GgufWeights = self.facts.weights
        folder = room / STORE
        weights.check_once()
        folder.mkdir(exist_ok=True)
        table, numbers = describe_weights(self.facts, weights)
        (folder / TABLE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        numbers.tofile(folder / NUMBERS)
        checkpoint = weights.checkpoint
        for name in TEXTS:
            is_first = name == TEXTS[0]
            content = checkpoint.read_tokenizer() if is_first else checkpoint.read_file(name)
            if content is not None:
                (folder / name).write_bytes(content)
        files = [] if self.mode == "none" else weights.files
        bring_files({file: folder / file.name for file in files}, self.mode, progress)


@dataclass(frozen=True, slots=True)
class StoreContents:
    """A neuron store, with the methods of `FileContents`."""

    path: Path | None
    """None if this machine does not have it."""
    aimed: ResolvedPlan
    mode: StoreMode

    def list_formats(self) -> set[str]:
        return {self.aimed.model.quantization.gates}

    def list_specs(self, wish: Wish) -> list[Spec]:
        """Libraries that a run of the plan asks for, and a probe if it is wanted."""
        probed = list_recipes(self.aimed) if wish.probe else []
        own = [spec for recipe in probed for spec in recipe.list_specs()]
        if self.path is None:
            return list_specs(self.aimed, describe_tensors(self.aimed.model)) + own
        with NeuronStore.open(self.path, model=self.aimed.model) as store:
            return list_specs(self.aimed, store.tensors) + own

    def bring(self, room: Path, progress: Progress) -> None:
        folder, model = room / STORE, self.aimed.model
        if self.mode == "none":
            # What is needed to find out that another store is the right one.
            folder.mkdir()
            (folder / "README.txt").write_text(
                f"Copy the neuron store of {model.id} here: {MANIFEST}, "
                f"{model.tokenizer.file} and all else that is in it.\n",
                encoding="utf-8",
            )
            return
        assert self.path is not None
        files = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
        files.sort(key=lambda path: path.name == MANIFEST)
        places = {path: folder / path.relative_to(self.path) for path in files}
        bring_files(places, self.mode, progress)


Contents = FileContents | StoreContents
"""A plan's weights in a bundle, and the libraries for them."""


def choose_contents(resolved: ResolvedPlan, aimed: ResolvedPlan, mode: StoreMode) -> Contents:
    """The contents for ``resolved`` as ``aimed`` at the bundle's machine; UserError P5xx if a store
    is to be brought and is not the plan's."""
    if isinstance(resolved.source, FileFacts):
        return FileContents(resolved.source, aimed, mode)
    path = resolved.store_path
    has_store = (path / MANIFEST).is_file()
    misfits = find_store_misfits(resolved) if has_store else []
    if mode != "none" and misfits:
        raise UserError(misfits, exit_code=2)
    # What a run would refuse says nothing of the store that the machine has.
    is_known = mode != "none" or (has_store and not misfits)
    return StoreContents(path if is_known else None, aimed, mode)


def build_bundle(
    resolved: ResolvedPlan, wish: Wish, folder: Path, mode: StoreMode, progress: Progress
) -> Built:
    """Build the bundle of a plan at the new folder ``folder``; UserError P673 for unsupported
    plans, P675 if writing fails, P651 for kernels, P5xx for the store."""
    aimed = aim_plan(resolved, wish)
    contents = choose_contents(resolved, aimed, mode)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError.of(
            "P675",
            f"{folder} exists already",
            help="choose another folder with -o, or remove it: nothing is replaced",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        room = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            _fill(room, contents, wish, progress)
            room.chmod(0o755)
            if folder.exists():
                folder.rmdir()
            os.rename(room, folder)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    except OSError as error:
        raise UserError.of(
            "P675", f"the bundle cannot be written to {folder}: {error.strerror}"
        ) from None
    store = sum(path.stat().st_size for path in (folder / STORE).rglob("*") if path.is_file())
    whole = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Built(folder, aimed, whole - store, store)


def _fill(room: Path, contents: Contents, wish: Wish, progress: Progress) -> None:
    aimed = contents.aimed
    units = (aimed.sparse_unit, *aimed.dense_units)
    for place, source in list_code({aimed.name_backend(unit) for unit in units}).items():
        target = room / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    _write_version(room)
    for name in contents.list_formats() & GRIDS.keys():
        # What codes of IQ types are looked up in, next to the module that reads it.
        make_tables(name).tofile(room / PACKAGES / "pi2/backends/blocks" / place_tables(name).name)
    specs = contents.list_specs(wish)
    npus = [unit for unit in aimed.dense_units if aimed.name_backend(unit) == "hexagon"]
    libraries = [
        *_compile_kernels(room, specs, wish.triple, progress),
        *(write_npu(room, aimed, unit, progress) for unit in npus),
    ]
    index = [
        {"file": file.relative_to(room).as_posix(), "spec": describe_spec(spec)}
        for spec, file in libraries
    ]
    (room / KERNELS).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")
    (room / PLAN).write_text(write_resolved(aimed), encoding="utf-8")
    (room / "run.sh").write_text(START, encoding="utf-8")
    (room / "run.sh").chmod(0o755)
    write_notes(room, aimed)
    contents.bring(room, progress)
    facts = {
        "created_by": f"pi2 {version('pi2')}",
        "target": wish.triple,
        "plan_digest": aimed.digest,
        "features": list(aimed.device.units[aimed.sparse_unit].features or ()),
    }
    write_index(room, facts)


def _write_version(room: Path) -> None:
    folder = room / PACKAGES / "pi2.dist-info"
    folder.mkdir(parents=True)
    lines = ("Metadata-Version: 2.1", "Name: pi2", f"Version: {version('pi2')}", "")
    (folder / "METADATA").write_text("\n".join(lines), encoding="utf-8")


def get_processor(aimed: ResolvedPlan) -> tuple[frozenset[IsaFeature], str]:
    """Features and architecture of the processor that a plan is aimed at."""
    unit = aimed.device.units[aimed.sparse_unit]
    assert unit.features is not None and unit.architecture is not None
    return frozenset(unit.features), unit.architecture


def list_specs(aimed: ResolvedPlan, tensors: Mapping[str, Tensor]) -> list[Spec]:
    """Specs of the kernels and host loops that a run of the plan asks for."""
    features, architecture = get_processor(aimed)
    here = detect_machine()
    machine = replace(here, cpu=replace(here.cpu, features=features, architecture=architecture))
    own = list_cpu_specs(make_request(aimed, machine, tensors))
    return [*own, *list_host_specs(aimed)]


def list_host_specs(aimed: ResolvedPlan) -> list[Spec]:
    """Return the loops of the host that a run may ask for."""
    features, architecture = get_processor(aimed)
    # Where the features do not tell, the phone's processor may have the instruction for checks.
    known = choose_checks(features)
    usual: CheckInstruction = "pclmulqdq" if architecture == "x86-64" else "crc32x"
    choices = (None, usual) if known is None else (known,)
    name = "x86_64" if architecture == "x86-64" else architecture
    return [HostSpec(architecture=name, system="Linux", checks=item) for item in choices]


def _compile_kernels(
    room: Path, specs: list[Spec], triple: str, progress: Progress
) -> Iterator[tuple[Spec, Path]]:
    (room / KERNELS).parent.mkdir(parents=True)
    for number, spec in enumerate(specs):
        file = room / KERNELS
        file = file.with_name(f"{spec.program.split('.')[2]}-{number}.so")
        done, share = number / len(specs), 1 / len(specs)

        def report(label: str, part: float, done: float = done, share: float = share) -> None:
            progress(label, done + share * part)

        compile_ahead(spec, file, triple, report)

        file.chmod(0o755)
        yield spec, file


def bring_files(places: Mapping[Path, Path], mode: StoreMode, progress: Progress) -> None:
    for number, (path, place) in enumerate(places.items()):
        place.parent.mkdir(parents=True, exist_ok=True)
        if mode == "link":
            try:
                os.link(path.resolve(), place)
                continue
            except OSError:  # another file system
                pass
        shutil.copyfile(path, place)
        progress("copying the weights", (number + 1) / len(places))
