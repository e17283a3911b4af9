"""GPUs of this machine by API, asked in another process, because drivers may crash it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pi2
from pi2.backends.gpu.kernels.specification import Api
from pi2.backends.gpu.launchers.interface import DeviceFacts, Launcher
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Unit
from pi2.plan.documents.quantities import approximate_bytes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

APIS: tuple[Api, ...] = get_args(Api)
_TIMEOUT_S = 20.0
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_MODULES: dict[str, str] = _TABLES["modules"]
_DRIVERS: dict[str, tuple[str, str]] = _TABLES["drivers"]
"""By API, what there is without a driver, and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What an API has here."""

    api: Api
    devices: tuple[DeviceFacts, ...] = ()
    obstacle: str | None = None
    """What keeps its devices from being used."""
    help: str | None = None
    """What to install."""

    def suits(self, unit: Unit) -> bool:
        """Whether there is a device for the unit: a CPU only if the unit is emulated."""
        return any(unit.emulated or not device.is_emulated for device in self.devices)

    def explain(self) -> str:
        """Why it has no device for a unit."""
        return f"{self.api}: {self.obstacle or 'only the CPU emulates a GPU here'}"


def adapt_surveys() -> TypeAdapter[tuple[Survey, ...]]:
    """What writes surveys as JSON and reads them."""
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[Survey, ...])


def survey_api(api: Api) -> Survey:
    if not _has_module(_MODULES[api]):
        return Survey(
            api=api,
            obstacle=f"the Python package {_MODULES[api].split('.')[0]!r} is not installed",
            help=f"pip install 'pi2[{api}]'",
        )
    try:
        devices = tuple(_import_launcher(api).list_devices())
    except (ImportError, OSError, RuntimeError) as error:
        # A loader that is missing, as a rule.
        return _report_driver(api, str(error).splitlines())
    return Survey(api=api, devices=devices) if devices else _report_driver(api, [])


def survey_devices(apis: Sequence[Api] = APIS) -> tuple[Survey, ...]:
    """Look for the devices of every API in another process."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(pi2.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep)
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pi2.backends.gpu.devices", *apis],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        reason = f"asking the drivers took more than {_TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = f"asking the drivers failed (exit status {error.returncode})"
    else:
        return adapt_surveys().validate_json(done.stdout.splitlines()[-1])
    return tuple(Survey(api=api, obstacle=reason) for api in apis)


def open_device(api: Api, number: int | None = None) -> Launcher:
    """Open a device of ``api``, by default its first GPU, else its first; raises P360."""
    survey = survey_api(api)
    if not survey.devices:
        raise UserError.of("P360", f"{api}: {survey.obstacle}", help=survey.help)
    if number is None:
        number = min(survey.devices, key=lambda device: device.is_emulated).number
    if number >= len(survey.devices):
        names = ", ".join(f"{device.number}: {device.name}" for device in survey.devices)
        raise UserError.of("P360", f"{api} has no device {number}", help=f"choose one of {names}")
    launcher: Launcher = _import_launcher(api).open_device(number)
    return launcher


def _report_driver(api: Api, lines: Sequence[str]) -> Survey:
    obstacle, advice = _DRIVERS[api]
    reason = f" ({lines[0].strip()})" if lines else ""
    return Survey(api=api, obstacle=obstacle + reason, help=advice)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _import_launcher(api: Api) -> Any:
    return importlib.import_module(f"pi2.backends.gpu.launchers.{api}")


_APIS: Mapping[str, tuple[Api, ...]] = {
    "opencl": ("opencl",),
    "vulkan": ("webgpu",),
    "cuda": ("cuda",),
}
"""APIs by what the device document calls a unit's architecture."""
_ANY: tuple[Api, ...] = ("cuda", "webgpu", "opencl")
"""If it does not say, best first; Metal is reached through WebGPU."""


def list_apis(unit: Unit) -> tuple[Api, ...]:
    """Return the APIs that may play the unit, best first."""
    return _APIS.get(unit.architecture or "", _ANY)


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return what keeps every API of the unit from finding a device, empty if one has one."""
    surveys = survey_devices(list_apis(unit))
    if any(survey.suits(unit) for survey in surveys):
        return []
    helps = (f" ({survey.help})" if survey.help else "" for survey in surveys)
    return [survey.explain() + help for survey, help in zip(surveys, helps, strict=True)]


def open_unit(unit: Unit) -> Launcher:
    """Open the unit's device; P360 if there is none, or only a CPU while it is not emulated."""
    surveys = []
    for api in list_apis(unit):
        surveys.append(survey_api(api))
        if surveys[-1].suits(unit):
            return open_device(api)
    raise UserError.of(
        "P360",
        "; ".join(survey.explain() for survey in surveys),
        help="; or ".join(survey.help or "install the GPU's driver" for survey in surveys),
    )


def check_memory(launcher: Launcher, sizes: Sequence[int]) -> None:
    """P361 where the driver says that the device has no room for arrays of ``sizes`` bytes."""
    facts, help = launcher.facts, "give the unit a smaller share of `layers.split`"
    largest, total = max(sizes), sum(sizes)
    if largest > facts.max_array_bytes:
        raise UserError.of(
            "P361",
            f"{facts.name} takes at most {approximate_bytes(facts.max_array_bytes)} in one piece,"
            f" and the plan needs {approximate_bytes(largest)}",
            help=help,
        )
    free = launcher.count_free()
    if free is not None and total > free:
        raise UserError.of(
            "P361",
            f"{facts.name} has {approximate_bytes(free)} free, and the plan puts"
            f" {approximate_bytes(total)} on it",
            help=f"{help}, or end other programs that use it",
        )


if __name__ == "__main__":
    wanted: Any = sys.argv[1:]
    print(adapt_surveys().dump_json(tuple(map(survey_api, wanted))).decode(), flush=True)
    # Drivers have been seen to crash while they clean up.
    os._exit(0)
