"""The NPU's part of a bundle: a folder ``hexagon/UNIT`` for each NPU of the plan.

It has the library of graphs, as the program that qemu-hexagon runs and as an object for the
vendor's linker, the index of graphs, and the C sources and the script that make of them what a real
NPU runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from pi2.backends.hexagon.backend import describe_sizes
from pi2.backends.hexagon.library import PROGRAM, describe_library, write_library
from pi2.backends.hexagon.specification import HexagonSpec
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.units import describe_unit
from pi2.progress import Progress

FOLDER = "hexagon"
SOURCES = ("build.sh", "host.c", "pi2_npu.idl", "protocol.h", "skel.c")
"""What is built with the vendor's SDK, of the backend's folder ``dsp``."""


def describe_npu(resolved: ResolvedPlan, unit: str) -> HexagonSpec:
    """Return what the library of an NPU of the plan is compiled from."""
    return describe_library(
        describe_sizes(describe_unit(resolved, unit)), resolved.device.units[unit]
    )


def list_npus(resolved: ResolvedPlan) -> Sequence[str]:
    """Return the units of the plan whose libraries `write_npu` writes."""
    return [unit for unit in resolved.dense_units if resolved.name_backend(unit) == "hexagon"]


def write_npu(
    room: Path, resolved: ResolvedPlan, unit: str, progress: Progress
) -> tuple[HexagonSpec, Path]:
    """Write an NPU's folder; return its specification and the program that a run starts.

    UserError P650 and P651 where the library cannot be compiled.
    """
    folder, spec = room / FOLDER / unit, describe_npu(resolved, unit)
    write_library(spec, folder, progress)
    package = import_module("pi2.backends.hexagon")
    for name in SOURCES:
        shutil.copyfile(Path(package.__path__[0]) / "dsp" / name, folder / name)
    (folder / "build.sh").chmod(0o755)
    return spec, folder / PROGRAM
