"""Which API plays a unit of a device, and what is said where none does."""

import dataclasses
from typing import Any

import pytest

from pi2.backends.gpu import devices as choice
from pi2.backends.gpu.devices import Survey
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.diagnostics import UserError
from pi2.plan.documents.device import Unit

GPU = DeviceFacts(
    api="webgpu", number=0, name="a GPU", driver="a driver", kind="discrete", memory_bytes=None,
    fp16=True, compute_units=None, max_array_bytes=1 << 30, shared_bytes=1 << 15,
)  # fmt: skip
PROCESSOR = dataclasses.replace(GPU, kind="processor", name="a processor")


def find(monkeypatch: pytest.MonkeyPatch, devices: dict[str, DeviceFacts]) -> None:
    def survey(api: Any) -> Survey:
        if api not in devices:
            return Survey(api=api, obstacle="no driver", help=f"install {api}")
        return Survey(api=api, devices=(devices[api],))

    monkeypatch.setattr(choice, "survey_api", survey)
    monkeypatch.setattr(choice, "survey_devices", lambda apis: tuple(map(survey, apis)))
    monkeypatch.setattr(choice, "open_device", lambda api: f"opened {api}")


@pytest.mark.parametrize(
    ("architecture", "apis"),
    [
        ("opencl", ("opencl",)),
        ("vulkan", ("webgpu",)),
        ("cuda", ("cuda",)),
        ("metal", ("cuda", "webgpu", "opencl")),
        (None, ("cuda", "webgpu", "opencl")),
    ],
)
def test_the_architecture_names_the_api(architecture: Any, apis: tuple[str, ...]) -> None:
    assert choice.list_apis(Unit(kind="gpu", architecture=architecture)) == apis


def test_where_none_is_named_first_that_there_is_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, {"webgpu": GPU, "opencl": GPU})
    unit = Unit(kind="gpu")
    assert str(choice.open_unit(unit)) == "opened webgpu"
    assert choice.find_unit_obstacles(unit) == []


def test_processor_plays_only_what_is_said_to_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, {"opencl": PROCESSOR})
    emulated = Unit(kind="gpu", architecture="opencl", emulated=True)
    assert str(choice.open_unit(emulated)) == "opened opencl"
    assert choice.find_unit_obstacles(emulated) == []
    real = Unit(kind="gpu", architecture="opencl")
    with pytest.raises(UserError, match="only the CPU"):
        choice.open_unit(real)
    assert choice.find_unit_obstacles(real) == ["opencl: only the CPU emulates a GPU here"]


def test_a_missing_driver_comes_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, {})
    unit = Unit(kind="gpu", architecture="cuda")
    with pytest.raises(UserError) as caught:
        choice.open_unit(unit)
    found = caught.value.diagnostics[0]
    assert (found.code, found.message, found.help) == ("P360", "cuda: no driver", "install cuda")
    assert choice.find_unit_obstacles(unit) == ["cuda: no driver (install cuda)"]
