"""The library of a plan's NPU: ``graphs.elf`` for the emulator, ``graphs.o`` for the vendor's
linker, ``graphs.json``."""

import dataclasses
import json
from pathlib import Path

from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.signature import Compiler
from pi2.backends.hexagon.sizes import UnitSizes, lay_out_scratch
from pi2.backends.hexagon.specification import VERSIONS, HexagonSpec, Version
from pi2.caches import replace_file
from pi2.plan.documents.device import Unit
from pi2.progress import Progress, ignore_progress


def write_index(spec: HexagonSpec) -> str:
    """Return the document: every graph's number in messages, name, shape and scratch bytes."""
    graphs = [
        {
            "number": number,
            "name": graph.name,
            "scratch_bytes": lay_out_scratch(graph).bytes,
            **dataclasses.asdict(graph),
        }
        for number, graph in enumerate(spec.index)
    ]
    return json.dumps({"version": spec.version, "graphs": graphs}, indent=1)


PROGRAMS = Compiler("pi2.backends.hexagon.kernels.compile", ".elf")
OBJECTS = Compiler("pi2.backends.hexagon.kernels.compile", ".o")
PROGRAM = f"graphs{PROGRAMS.suffix}"
"""The file that the emulator runs."""
DEFAULT_VERSION: Version = "v66"
"""The oldest; newer NPUs run it as well."""


def describe_library(sizes: UnitSizes, unit: Unit) -> HexagonSpec:
    return sizes.describe(choose_version(unit))


def choose_version(unit: Unit) -> Version:
    """The newest version that programs can be compiled for and that the unit runs."""
    stated = None if unit.hexagon is None else unit.hexagon.version
    return max((item for item in VERSIONS if item <= (stated or "")), default=DEFAULT_VERSION)


def write_library(spec: HexagonSpec, folder: Path, progress: Progress = ignore_progress) -> None:
    """Write a library to ``folder``; raises P651 as compiling does."""
    for compiler in (PROGRAMS, OBJECTS):
        made = load_or_compile(spec, progress, compiler)
        replace_file(folder / f"graphs{compiler.suffix}", made.read_bytes())
    (folder / PROGRAM).chmod(0o755)  # the emulator asks for it
    replace_file(folder / "graphs.json", write_index(spec).encode())
