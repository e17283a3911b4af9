"""The launcher for CUDA with a stand-in for the driver: how it is called, not what a GPU does."""

import gc
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pi2.backends.gpu.devices import open_device, survey_api
from pi2.backends.gpu.kernels.compile import describe_kernel, generate_sources
from pi2.backends.gpu.kernels.ffn import make_join
from pi2.backends.gpu.kernels.specification import KernelImage, Target
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.diagnostics import UserError
from tests.backend import test_gpu_launchers as common
from tests.helpers.cuda_driver import CONTEXT, TOTAL_BYTES, Driver, install_driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield install_driver(monkeypatch)
    # The next one to import the launcher gets the real driver.
    sys.modules.pop("pi2.backends.gpu.launchers.cuda", None)


@pytest.fixture
def launcher(driver: Driver) -> Launcher:
    return open_device("cuda")


def make_image(code: bytes) -> KernelImage:
    kernel = make_join(common.FFN)
    _, parameters = generate_sources([kernel], Target(api="cuda", fp16=True, arch="sm_90"))
    signature = describe_kernel(kernel, parameters["join_kernel"], 0)
    return KernelImage(api="cuda", codes=(code,), kernels={"join": signature})


def test_a_device_is_described_by_its_driver(driver: Driver) -> None:
    (facts,) = survey_api("cuda").devices
    assert (facts.name, facts.arch, facts.driver) == ("a stand-in", "sm_90", "CUDA 13.5")
    assert (facts.kind, facts.memory_bytes, facts.compute_units) == ("discrete", TOTAL_BYTES, 132)
    assert facts.target == Target(api="cuda", fp16=True, arch="sm_90")


def test_copies_and_events(launcher: Launcher) -> None:
    common.test_pieces_are_copied_to_their_places_and_back(launcher)
    common.test_a_queue_waits_for_another(launcher)
    common.test_host_arrays_hold_what_is_written(launcher)


def test_parameters_reach_the_kernel_in_its_order(launcher: Launcher, driver: Driver) -> None:
    kernel = launcher.load(make_image(b"\x7fELF"))["join"]
    arrays = {"sums": launcher.allocate(2 * 64 * 4), "partials": launcher.allocate(3 * 2 * 64 * 4)}
    join = launcher.bind(kernel, arrays)
    queue = launcher.open_queue()
    partials = np.random.default_rng(1).random((3, 2, 64), np.float32)
    queue.upload(arrays["partials"], partials)
    queue.launch(join, {"parts": 3, "tokens": 2, "adds": 0, "more": 1})
    sums = np.empty((2, 64), np.float32)
    queue.download(arrays["sums"], sums)
    event = queue.submit()
    event.wait()
    np.testing.assert_allclose(sums, partials.sum(0), rtol=1e-6)
    # One group of 256 threads for 64 elements, for each of two tokens; no dynamic shared memory.
    assert driver.launches == [(1, 2, 1, 256, 1, 1, 0)]


def test_recordings_are_graphs(
    launcher: Launcher, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = launcher.load(make_image(b"\x7fELF"))["join"]
    monkeypatch.setattr(common, "load_join", lambda _launcher: kernel)
    common.test_recorded_work_runs_as_often_as_it_is_replayed(launcher)
    # One launch, and twice two that were captured.
    assert len(driver.launches) == 5
    gc.collect()
    assert driver.graphs == 0, "they are given back"
    assert driver.bindings is None or driver.checked > 40, "NVIDIA's bindings take these calls"


def test_another_thread_enters_before_it_computes(launcher: Launcher, driver: Driver) -> None:
    before = len(driver.contexts)
    launcher.enter()
    assert driver.contexts[before:] == [CONTEXT]


def test_streams_go_before_their_context_and_events_with_it(
    launcher: Launcher, driver: Driver
) -> None:
    event = launcher.open_queue().submit()
    launcher.open_queue()
    assert driver.streams == 2
    launcher.close()
    assert driver.streams == 0
    driver.cuEventDestroy = None  # type: ignore[assignment]
    del event


def test_memory_is_counted_as_the_driver_does(launcher: Launcher) -> None:
    array = launcher.allocate(1 << 20)
    assert launcher.count_free() == TOTAL_BYTES - (1 << 20)
    launcher.release(array)
    assert launcher.allocated_bytes == 0
    launcher.allocate_host(64)
    launcher.close()


def test_what_the_driver_refuses_is_a_diagnostic(launcher: Launcher) -> None:
    common.test_arrays_that_do_not_fit_are_a_diagnostic(launcher)
    with pytest.raises(UserError, match="INVALID_IMAGE") as caught:
        launcher.load(make_image(b"no cubin"))
    assert caught.value.diagnostics[0].code == "P362"
