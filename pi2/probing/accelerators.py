"""GPUs and NPUs of this machine: those that can be measured, and what was found besides.

Measured is what a launcher reaches that computes with it: through CUDA, WebGPU or OpenCL, and a GPU
that several of them find once.  What cannot be measured is named with the reason, so that a missing
unit is no surprise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.backends.gpu.devices import Survey
from pi2.backends.gpu.kernels.signature import Api
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.benchmarks.worker import Worker
from pi2.diagnostics import UserError
from pi2.probing.series import Key
from pi2.progress import Progress

if TYPE_CHECKING:
    from pi2.probing.gpus import UnitStep

MEASURED: tuple[Api, ...] = ("cuda", "webgpu", "opencl")
"""APIs whose devices are measured, best first: a GPU that several find is measured through one."""
_BY_HAND = "published figures can be stated by hand"
_NPU_FILES = {
    "dev/adsprpc-smd": "a Hexagon NPU",
    "dev/fastrpc-cdsp": "a Hexagon NPU",
    "dev/accel/accel*": "an NPU",
}
_GPU_FILES = {
    "dev/kgsl-3d0": "an Adreno GPU",
    "dev/mali*": "a Mali GPU",
    "proc/driver/nvidia/gpus/*": "an NVIDIA GPU",
    "dev/dri/renderD*": "a GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMeasurements:
    """A unit and the seconds of its steps."""

    facts: DeviceFacts
    steps: tuple[UnitStep, ...]
    step_s: dict[Key, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """What was measured, and a line about each unit that was not."""

    units: tuple[UnitMeasurements, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Survey:
    units: list[UnitMeasurements] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_accelerators(
    progress: Progress,
    *,
    rounds: int,
    root: Path = Path("/"),
    apis: Sequence[Api] = MEASURED,
) -> Accelerators:
    """Measure the devices of ``apis``; ``root``: where to look for device files of others."""
    survey = _Survey()
    reasons: list[str] = []
    for place, api in enumerate(apis):
        obstacle = _measure_api(survey, api, progress, rounds)
        if obstacle is not None:
            reasons.append(obstacle)
        progress("GPUs", (place + 1) / len(apis))
    has_gpu = any(not item.facts.is_emulated for item in survey.units)
    survey.notes += _name_others(root, reasons, has_gpu=has_gpu)
    return Accelerators(units=tuple(survey.units), notes=tuple(survey.notes))


def _measure_api(survey: _Survey, api: Api, progress: Progress, rounds: int) -> str | None:
    """Measure what an API has and no other API had; return why it has none."""
    from pi2.probing.gpus import STEPS, GpuRecipe

    number, count = 0, 1
    while number < count:
        # A process for each: what one driver does wrong is not the next one's loss.
        name = f"{api} device {number}"
        try:
            with Worker(GpuRecipe(), progress) as bench:
                found: Survey = bench.call("survey", api)
                count = len(found.devices)
                if not found.devices:
                    return f"{api}: {found.obstacle}" + (f" ({found.help})" if found.help else "")
                facts = found.devices[number]
                name = f"{facts.name} ({facts.driver})"
                known = {item.facts.name for item in survey.units}
                if facts.is_emulated or facts.name not in known:
                    step_s: dict[Key, list[float]] = bench.call("measure", api, number, rounds)
                    survey.units.append(UnitMeasurements(facts=facts, steps=STEPS, step_s=step_s))
        except (UserError, RuntimeError) as error:
            survey.notes.append(f"{name} was found, but not measured: {_shorten(error)}")
        number += 1
    return None


def _shorten(error: UserError | RuntimeError) -> str:
    """The last line of what went wrong."""
    if isinstance(error, UserError):
        return error.diagnostics[0].message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "unknown"


def _name_others(root: Path, reasons: Sequence[str], *, has_gpu: bool) -> Iterator[str]:
    """Units that show as files of the system and that nothing here measures; ``reasons``: why APIs
    have no devices."""
    seen: set[str] = set()
    for files, known in ((_GPU_FILES, has_gpu), (_NPU_FILES, False)):
        for pattern, what in files.items():
            found: list[Any] = sorted(root.glob(pattern))
            if known or not found or what in seen:
                continue
            seen.add(what)
            why = [*reasons, _BY_HAND] if files is _GPU_FILES else [_BY_HAND]
            place = found[0].relative_to(root)
            yield f"{what} was found (/{place}), but not measured: {'; '.join(why)}"
            if files is _GPU_FILES:
                break
