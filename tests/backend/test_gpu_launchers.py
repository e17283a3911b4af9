"""Launchers: copies, order, events, memory, and what they say where something is missing."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pi2.backends.gpu import devices
from pi2.backends.gpu.devices import open_device, survey_api, survey_devices
from pi2.backends.gpu.kernels.ffn import make_join
from pi2.backends.gpu.kernels.specification import (
    FfnKernels,
    GpuSpec,
    KernelImage,
    ProductKernels,
    StepKernel,
    Target,
)
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.diagnostics import UserError
from pi2.plan.documents.model_parts import Ffn

FFN = FfnKernels(hidden=64, precision="int4", options=Ffn(activation="relu"))


def load_join(launcher: Launcher) -> Any:
    from pi2.backends.gpu.kernels.compile import build_image

    image = build_image([make_join(FFN)], launcher.facts.target)
    return launcher.load(KernelImage.from_json(image.to_json()))["join"]


def test_pieces_are_copied_to_their_places_and_back(launcher: Launcher) -> None:
    array = launcher.allocate(64)
    queue = launcher.open_queue()
    queue.upload(array, np.arange(16, dtype=np.int32))
    queue.upload(array, np.array([70, 71], np.int32), offset=12)
    whole, part = np.empty(16, np.int32), np.empty(4, np.int32)
    queue.download(array, whole)
    queue.download(array, part, offset=8)
    event = queue.submit()
    event.wait()
    assert whole.tolist() == [0, 1, 2, 70, 71, *range(5, 16)]
    assert part.tolist() == [2, 70, 71, 5]
    launcher.release(array)


def test_work_of_a_queue_runs_in_its_order(launcher: Launcher) -> None:
    kernel = load_join(launcher)
    arrays = {"partials": launcher.allocate(3 * 64 * 4), "sums": launcher.allocate(64 * 4)}
    join = launcher.bind(kernel, arrays)
    queue = launcher.open_queue()
    found = [np.empty(64, np.float32) for _ in range(4)]
    for number, sums in enumerate(found):
        queue.upload(arrays["partials"], np.full((3, 64), number, np.float32))
        queue.launch(join, {"tokens": 1, "parts": 3 if number < 2 else 2, "adds": 0})
        queue.download(arrays["sums"], sums)
    queue.submit().wait()
    assert [set(sums.tolist()) for sums in found] == [{0.0}, {3.0}, {4.0}, {6.0}]


def test_recorded_work_runs_as_often_as_it_is_replayed(launcher: Launcher) -> None:
    kernel = load_join(launcher)
    arrays = {"partials": launcher.allocate(3 * 64 * 4), "sums": launcher.allocate(64 * 4)}
    join = launcher.bind(kernel, arrays)
    queue = launcher.open_queue()
    queue.upload(arrays["partials"], np.ones((3, 64), np.float32))
    # The same launch twice, with other numbers.
    recording = queue.record(
        [(join, {"tokens": 1, "parts": 3, "adds": 0}), (join, {"tokens": 1, "parts": 2, "adds": 1})]
    )
    queue.launch(join, {"tokens": 1, "parts": 1, "adds": 0})
    found = [np.empty(64, np.float32) for _ in range(3)]
    for number, sums in enumerate(found):
        if number:
            queue.replay(recording)
        queue.download(arrays["sums"], sums)
    queue.submit().wait()
    assert [set(sums.tolist()) for sums in found] == [{1.0}, {5.0}, {5.0}]


def test_a_queue_waits_for_another(launcher: Launcher) -> None:
    array = launcher.allocate(1 << 20)
    first, second = launcher.open_queue(), launcher.open_queue()
    first.upload(array, np.full(1 << 18, 7, np.int32))
    uploaded = first.submit()
    second.wait_for(uploaded)
    found = np.empty(1 << 18, np.int32)
    second.download(array, found)
    second.submit().wait()
    assert set(found.tolist()) == {7}
    launcher.release(array)


def test_host_arrays_hold_what_is_written(launcher: Launcher) -> None:
    host = launcher.allocate_host(4096)
    host[:] = 5
    array = launcher.allocate(4096)
    queue = launcher.open_queue()
    queue.upload(array, host)
    host_back = launcher.allocate_host(4096)
    queue.download(array, host_back)
    queue.submit().wait()
    assert set(host_back.tolist()) == {5}
    launcher.release(array)


def test_arrays_that_do_not_fit_are_a_diagnostic(launcher: Launcher) -> None:
    with pytest.raises(UserError) as caught:
        launcher.allocate(1 << 46)
    assert caught.value.diagnostics[0].code == "P361"
    assert "memory.units" in str(caught.value.diagnostics[0].help)


def test_code_that_the_driver_refuses_is_a_diagnostic(launcher: Launcher) -> None:
    from pi2.backends.gpu.kernels.compile import build_image

    image = build_image([make_join(FFN)], launcher.facts.target)
    broken = KernelImage(api=image.api, codes=(b"no kernel",), kernels=image.kernels)
    with pytest.raises(UserError, match="P362"):
        launcher.load(broken)


def test_a_device_that_is_not_there_is_a_diagnostic(launcher: Launcher) -> None:
    with pytest.raises(UserError, match="has no device 99") as caught:
        open_device(launcher.facts.api, 99)
    assert caught.value.diagnostics[0].code == "P360"


@pytest.mark.parametrize("api", devices.APIS)
def test_a_missing_package_says_what_to_install(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices._MODULES, api, "no_such_package")
    assert survey_api(api).help == f"pip install 'pi2[{api}]'"
    with pytest.raises(UserError, match="is not installed") as caught:
        open_device(api)
    assert caught.value.diagnostics[0].code == "P360"


def test_another_process_finds_the_same_devices(launcher: Launcher) -> None:
    (survey,) = survey_devices([launcher.facts.api])
    assert survey.devices[launcher.facts.number] == launcher.facts


def test_a_driver_that_crashes_takes_nothing_along(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", "import os; os.abort()"], **options)

    monkeypatch.setattr(subprocess, "run", run)
    assert all("failed" in str(survey.obstacle) for survey in survey_devices())


def test_specifications_survive_json() -> None:
    spec = GpuSpec(
        target=Target(api="cuda", fp16=True, arch="sm_90"),
        ffn=FFN,
        products=(ProductKernels(length=64, precision="int8", relu=True),),
        steps=(
            StepKernel(kernel="keep", fixed=(("key_width", 32),), shared=(("values", "keys"),)),
        ),
        reads=True,
    )  # fmt: skip
    assert GpuSpec.from_json(spec.to_json()) == spec
    assert GpuSpec.from_json(GpuSpec(target=spec.target).to_json()).ffn is None
