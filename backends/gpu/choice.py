"""Which API and device play a unit of a device document."""

from __future__ import annotations

from collections.abc import Mapping

from pi2.backends.gpu.devices import Survey, open_device, survey_api, survey_devices
from pi2.backends.gpu.kernels.signature import Api
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Unit

_APIS: Mapping[str, tuple[Api, ...]] = {
    "opencl": ("opencl",),
    "vulkan": ("webgpu",),
    "cuda": ("cuda",),
}
"""APIs by what the device document calls a unit's architecture."""
_ANY: tuple[Api, ...] = ("cuda", "webgpu", "opencl")
"""Where it does not say, best first; Metal is reached through WebGPU."""


def list_apis(unit: Unit) -> tuple[Api, ...]:
    """Return the APIs that may play the unit, best first."""
    return _APIS.get(unit.architecture or "", _ANY)


def find_unit_obstacles(unit: Unit) -> list[str]:
    """Return what keeps every API of the unit from finding a device, empty if one has one."""
    surveys = survey_devices(list_apis(unit))
    if any(_is_suitable(survey, unit) for survey in surveys):
        return []
    return [_explain(survey) for survey in surveys]


def open_unit(unit: Unit) -> Launcher:
    """Open the device that plays the unit; raises P360 where there is none, or only the processor
    while the unit is not emulated."""
    surveys = []
    for api in list_apis(unit):
        survey = survey_api(api)
        if _is_suitable(survey, unit):
            return open_device(api)
        surveys.append(survey)
    raise UserError.of(
        "P360",
        "; ".join(
            f"{survey.api}: {survey.obstacle or 'only the processor plays a GPU here'}"
            for survey in surveys
        ),
        help="; or ".join(survey.help or "install the GPU's driver" for survey in surveys),
    )


def _is_suitable(survey: Survey, unit: Unit) -> bool:
    """Whether an API has a device for the unit: a processor that plays one is not what a plan for a
    GPU was made for."""
    return any(unit.emulated or not device.is_emulated for device in survey.devices)


def _explain(survey: Survey) -> str:
    if survey.devices:
        return f"{survey.api}: only the processor plays a GPU here"
    return f"{survey.api}: {survey.obstacle}" + (f" ({survey.help})" if survey.help else "")
