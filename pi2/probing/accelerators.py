"""GPUs and NPUs of this machine: those that can be measured, and what was found besides.

Measured is what speaks OpenCL, which is what the GPUs of phones, and most others, do.  What cannot
be measured is named with the reason, so that a missing unit is no surprise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.benchmarks.worker import Worker
from pi2.diagnostics import UserError
from pi2.machine.software import detect_opencl
from pi2.probing.series import Key
from pi2.progress import Progress

if TYPE_CHECKING:
    from pi2.probing.opencl import DeviceFacts, UnitStep

EXTRA = "pip install 'pi2[opencl]'"
_NO_BACKEND = "pi2 measures units through OpenCL; state published figures by hand"
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
    progress: Progress, *, rounds: int, root: Path = Path("/")
) -> Accelerators:
    """Measure every OpenCL device; ``root``: where to look for device files of others."""
    survey = _Survey()
    opencl = detect_opencl(root)
    if opencl.drivers:
        if importlib.util.find_spec("pyopencl") is None:
            drivers = ", ".join(opencl.drivers)
            survey.notes.append(f"OpenCL ({drivers}) is there, but not measured: {EXTRA}")
        else:
            _measure_opencl(survey, progress, rounds)
    has_gpu = any(not item.facts.is_processor for item in survey.units)
    survey.notes += _name_others(root, has_gpu=has_gpu)
    return Accelerators(units=tuple(survey.units), notes=tuple(survey.notes))


def _measure_opencl(survey: _Survey, progress: Progress, rounds: int) -> None:
    from pi2.probing.opencl import STEPS, OpenClRecipe

    number, count = 0, 1
    while number < count:
        # A process for each: what one driver does wrong is not the next one's loss.
        name = f"OpenCL device {number}"
        try:
            with Worker(OpenClRecipe(), progress) as bench:
                devices: list[DeviceFacts] = bench.call("list_devices")
                count = len(devices)
                if not devices:
                    survey.notes.append("OpenCL is installed, but its drivers find no device")
                    return
                facts = devices[number]
                name = f"{facts.name} ({facts.platform})"
                step_s: dict[Key, list[float]] = bench.call("measure", number, rounds)
            survey.units.append(UnitMeasurements(facts=facts, steps=STEPS, step_s=step_s))
        except (UserError, RuntimeError) as error:
            survey.notes.append(f"{name} was found, but not measured: {_shorten(error)}")
        number += 1
        progress("OpenCL", number / count)


def _shorten(error: UserError | RuntimeError) -> str:
    """The last line of what went wrong."""
    if isinstance(error, UserError):
        return error.diagnostics[0].message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "unknown"


def _name_others(root: Path, *, has_gpu: bool) -> Iterator[str]:
    """Units that show as files of the system and that nothing here measures."""
    seen: set[str] = set()
    for files, known in ((_GPU_FILES, has_gpu), (_NPU_FILES, False)):
        for pattern, what in files.items():
            found: list[Any] = sorted(root.glob(pattern))
            if known or not found or what in seen:
                continue
            seen.add(what)
            reason = "no OpenCL driver for it; " if files is _GPU_FILES else ""
            place = found[0].relative_to(root)
            yield f"{what} was found (/{place}), but not measured: {reason}{_NO_BACKEND}"
            if files is _GPU_FILES:
                break
