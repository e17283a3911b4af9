"""`pi2 probe`: what is measured becomes a device document that plans can name."""

from __future__ import annotations

import dataclasses
import getpass
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi2.backends.gpu.devices import Survey
from pi2.backends.gpu.kernels.specification import Api
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.cli.machines import describe_units
from pi2.cli.main import run
from pi2.costs.rates import read_rates
from pi2.diagnostics import UserError
from pi2.fitting.check import check_file
from pi2.machine import Cpu, CpuCores, Machine, Memory, Storage
from pi2.machine.storage import DirectReads
from pi2.plan.documents.device import Device
from pi2.probing.document import (
    compare_devices,
    describe_unsteady,
    make_device,
    write_device,
    write_rows,
)
from pi2.probing.gpus import STEPS as GPU_STEPS
from pi2.probing.gpus import DeviceBench
from pi2.probing.probe import Accelerators, Measurements, UnitMeasurements, measure_accelerators
from pi2.probing.steps import StepFacts
from pi2.probing.storage import ReadSpec, StorageBench, open_sample
from pi2.progress import ignore_progress
from tests.helpers.gpu import require_launcher
from tests.helpers.kernels import make_loops
from tests.helpers.programs import Ask

MIB = 1 << 20
STEPS = (
    StepFacts(kernel="gather", size=256, read_bytes=256 * 6912, operations=None),
    StepFacts(kernel="dense", size=128, read_bytes=512 * 6912, operations=1.6e9),
    StepFacts(kernel="look-up", size=0, read_bytes=None, operations=None),
)
READS = (
    ReadSpec(pattern="sequential", block_bytes=MIB),
    ReadSpec(pattern="random", block_bytes=8192, depth=128),
    ReadSpec(pattern="random", block_bytes=8192, depth=128, range_bytes=128 * MIB),
    ReadSpec(pattern="random", block_bytes=8192, threads=4),
    ReadSpec(pattern="random", block_bytes=8192, threads=4, burst=16),
)


def make_measurements(**changes: Any) -> Measurements:
    machine = Machine(
        system="Linux 6.1",
        cpu=Cpu(
            name="Acme Server", architecture="x86-64", features=frozenset({"avx2", "fma"}),
            cores_online=8, cores=2, quota_cores=2.0,
            clusters=(CpuCores(cores=8, max_hz=2.5004e9),),
        ),
        memory=Memory(installed_bytes=25 << 30, limit_bytes=8 << 30, available_bytes=8 << 30),
    )  # fmt: skip
    storage = Storage(
        path=Path("/data"), filesystem="ext4", device="vda", block_bytes=512, free_bytes=1 << 40,
        direct=DirectReads(works=True, align_bytes=512),
    )  # fmt: skip
    found = Measurements(
        machine=machine, storage=storage, threads=2,
        bandwidth={1: [10e9, 11e9, 12e9], 2: [19e9, 20e9, 21e9]},
        step_s={step: [1.0e-4, 1.1e-4, 1.2e-4] for step in STEPS},
        read_bytes_s={spec: [3e8, 3.1e8, 3.2e8] for spec in READS},
        latency_s=[33e-6, 34e-6, 35e-6],
        overlap={READS[1]: [0.4, 0.5, 0.6], READS[3]: [0.8] * 3},
        steady_s=[1.0] * 95 + [1.5] * 5,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def test_the_document_is_sound_and_every_figure_says_how_it_was_measured(tmp_path: Path) -> None:
    device = make_device("my", make_measurements())
    path = tmp_path / "my.device.toml"
    report = check_file(path, text=write_device(device))
    assert report.is_sound, report.diagnostics
    assert not report.diagnostics, "no warnings either: figures have spread and samples"
    assert report.document == device
    assert device.units["cpu"].read_bandwidth is not None
    assert device.units["cpu"].read_bandwidth.value == 20.5e9, "the best quartile"
    assert device.units["cpu"].clusters[0].cores == 2, "the container's cores, not the machine's"
    assert device.units["cpu"].clusters[0].frequency == 2.5e9
    assert device.memory.usable == 8 << 30 and device.storage.block_size == 512


def test_every_way_of_reading_has_its_own_overlap() -> None:
    storage = make_device("my", make_measurements()).storage
    assert storage.overlap is not None and storage.overlap.value == 0.5, "that of the queue"
    assert [item.overlap for item in storage.reads] == [None, 0.5, None, 0.8, None]
    assert [item.burst for item in storage.reads] == [None] * 4 + [16]


def test_a_plan_can_name_the_document(tmp_path: Path) -> None:
    (tmp_path / "my.device.toml").write_text(write_device(make_device("my", make_measurements())))
    shipped = Path(__file__).parents[2] / "plans/cloud-vm-zen5/bamboo-7b.plan.toml"
    text = shipped.read_text().replace('device = "cloud-vm-zen5"', 'device = "./my.device.toml"')
    text = text.replace("../stores", "./stores").replace("25 MiB", "40 MiB").replace("5242", "5300")
    (tmp_path / "some.plan.toml").write_text(text)
    assert run(["validate", str(tmp_path / "some.plan.toml")]) == 0


def test_nothing_in_the_document_tells_whose_machine_it_is() -> None:
    text = write_device(make_device("my", make_measurements()))
    words = set(text.replace('"', " ").replace("/", " ").split())
    assert not words & {socket.gethostname(), getpass.getuser(), str(Path.home())}


@pytest.mark.parametrize(
    ("steady", "noisy"),
    [([1.0] * 10, False), ([1.0] * 5 + [1.4] * 5, True), ([1.0] * 6 + [3.5] * 4, True)],
)
def test_a_noisy_machine_is_called_noisy(steady: list[float], noisy: bool) -> None:
    assert ("NOISY" in write_device(make_device("my", make_measurements(steady_s=steady)))) is noisy


def test_the_same_measurements_agree_and_a_doubled_one_does_not() -> None:
    old = make_device("my", make_measurements())
    rows = compare_devices(old, old)
    assert len(rows) > 8 and all(row.agrees for row in rows)
    doubled = make_device("my", make_measurements(bandwidth={1: [11e9] * 3, 2: [40e9] * 3}))
    differing = {row.label for row in compare_devices(old, doubled) if not row.agrees}
    assert differing == {
        "units.cpu.read_bandwidth",
        "units.cpu.bandwidth_by_threads threads 2",
        "memory.read_bandwidth",
    }


def test_spread_explains_a_difference_that_is_within_it() -> None:
    old = make_device("my", make_measurements(bandwidth={2: [18e9, 20e9, 22e9]}))
    new = make_device("my", make_measurements(bandwidth={2: [20e9, 22e9, 24e9]}))
    rows = {row.label: row for row in compare_devices(old, new)}
    assert rows["memory.read_bandwidth"].agrees
    assert "agree within their spreads" in write_rows(list(rows.values()))[-1]


def test_figures_that_differ_are_named_and_the_machine_called_noisy() -> None:
    old = make_device("my", make_measurements())
    slower = {spec: [3e8, 3.1e8, 3.2e8] for spec in READS} | {READS[0]: [1e8, 1e8, 1e8]}
    lines = write_rows(
        compare_devices(old, make_device("my", make_measurements(read_bytes_s=slower)))
    )
    assert lines[-2].startswith("the machine is noisy, or another one: this figure differs")
    assert lines[-1] == "  storage.reads sequential 1 MiB threads 1: -68.3%"
    assert any("315 MB/s" in line and "100 MB/s" in line for line in lines), "with units"


def test_shares_and_latencies_are_compared_by_their_own_spread() -> None:
    old = make_device("my", make_measurements())
    hidden = {READS[1]: [0.0, 0.1, 0.2], READS[3]: [0.75] * 3}
    new = make_device("my", make_measurements(overlap=hidden, latency_s=[50e-6] * 3))
    rows = {row.label: row for row in compare_devices(old, new)}
    queued, threads = (
        rows[f"storage.reads random 8 KiB {how}, hidden by computing"]
        for how in ("depth 128 threads 1", "threads 4")
    )
    assert (queued.agrees, round(queued.change, 3)) == (False, -0.4)
    assert not threads.agrees, "no spread explains five of a hundred"
    assert not rows["storage.latency"].agrees


def test_figures_that_differ_from_round_to_round_are_named() -> None:
    assert not list(describe_unsteady(make_device("my", make_measurements())))
    rates = {1: [10e9, 11e9, 12e9], 2: [10e9, 20e9, 30e9]}
    device = make_device("my", make_measurements(bandwidth=rates))
    lines = list(describe_unsteady(device))
    assert lines[0] == "3 figures differed by more than 10% from round to round:"
    assert "  memory.read_bandwidth: 25 GB/s, spread 50%" in lines
    assert all(f"# {line}" in write_device(device) for line in lines)


def test_reads_are_timed_for_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.probing.storage.ROUND_S", 0.005)
    path = tmp_path / "sample"
    path.write_bytes(np.random.default_rng(0).bytes(8 * MIB))
    bench = StorageBench(str(path), 8 * MIB, make_loops())
    specs = [
        ReadSpec(pattern="sequential", block_bytes=65536),
        ReadSpec(pattern="random", block_bytes=4096, threads=2),
        ReadSpec(pattern="random", block_bytes=4096, threads=1, range_bytes=4 * MIB),
    ]
    found = bench.measure(specs, 2)
    latency = bench.measure_latency(2)
    overlap = bench.measure_overlap(specs[:2], lambda: None, 2)
    assert set(overlap) == set(specs[:2])
    for shares in overlap.values():
        assert len(shares) == 2 and all(0.0 <= share <= 1.0 for share in shares)
    bench.close()
    assert set(found) == set(specs)
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found.values())
    assert len(latency) == 2 and min(latency) > 0


def test_temporary_file_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.probing.storage.FILE_BYTES", 16 * MIB)
    monkeypatch.setattr("pi2.probing.storage.LEAST_BYTES", 8 * MIB)
    with open_sample(tmp_path) as (path, size):
        assert size == path.stat().st_size == 16 * MIB
        data = path.read_bytes()
        assert data[: 8 * MIB] != data[8 * MIB :], "a drive cannot store it once"
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_read_instead_of_a_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    with (tmp_path / "layers/0.arrow").open("wb") as file:
        file.truncate(33 * MIB + 5)
    with open_sample(tmp_path) as (path, size):
        assert (path.name, size) == ("0.arrow", 33 * MIB)
    assert path.exists()


def test_a_store_that_is_too_small_has_a_temporary_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi2.probing.storage.FILE_BYTES", 8 * MIB)
    monkeypatch.setattr("pi2.probing.storage.LEAST_BYTES", 8 * MIB)
    (tmp_path / "store/layers").mkdir(parents=True)
    (tmp_path / "store/layers/0.arrow").write_bytes(bytes(5))
    with open_sample(tmp_path / "store") as (path, size):
        assert (path.parent, size) == (tmp_path, 8 * MIB)
    assert not path.exists()


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.probing.storage.LEAST_BYTES", 1 << 62)
    with pytest.raises(UserError) as caught, open_sample(tmp_path):
        pass
    assert caught.value.diagnostics[0].code == "P341"


def test_an_output_that_cannot_be_is_refused_before_measuring(tmp_path: Path, ask: Ask) -> None:
    assert "P009" in ask(["probe", "-o", str(tmp_path / "my.toml")], 2).err
    (tmp_path / "my.device.toml").write_text("kept")
    assert run(["probe", "-o", str(tmp_path / "my.device.toml")]) == 2
    assert (tmp_path / "my.device.toml").read_text() == "kept"


# ------------------------------------------------------------------ other units


def make_unit(**changes: Any) -> UnitMeasurements:
    facts = DeviceFacts(
        api="opencl", number=0, name="Adreno (TM) 750", driver="QUALCOMM", kind="integrated",
        memory_bytes=None, fp16=True, compute_units=6, max_array_bytes=1 << 30,
        shared_bytes=32 << 10,
    )  # fmt: skip
    seconds = {step: [2e-3, 2.1e-3, 2.2e-3] for step in GPU_STEPS}
    seconds[GPU_STEPS[0]] = [1e-4, 1.1e-4, 1.2e-4]
    return UnitMeasurements(facts=dataclasses.replace(facts, **changes), step_s=seconds)


def make_device_with(*units: UnitMeasurements) -> Device:
    return make_device("my", make_measurements(accelerators=Accelerators(units=list(units))))


def test_a_gpu_that_was_measured_is_a_unit_that_plans_count_with(tmp_path: Path) -> None:
    device = make_device_with(make_unit())
    path = tmp_path / "my.device.toml"
    report = check_file(path, text=write_device(device, ["an NPU was found"]))
    assert report.is_sound and not report.diagnostics
    assert report.document == device
    assert "# an NPU was found" in write_device(device, ["an NPU was found"])
    gpu = device.units["gpu"]
    assert (gpu.kind, gpu.architecture, gpu.emulated) == ("gpu", "opencl", None)
    assert {(item.kernel, item.size) for item in gpu.kernels} == {
        ("multiply", 256),
        ("multiply", 16384),
        ("dense", 128),
    }
    rates = read_rates(device)
    assert rates.dense is not None and rates.dense.name == "gpu"
    assert rates.dense.bytes_s == pytest.approx((GPU_STEPS[1].read_bytes or 0) / 2.05e-3, rel=1e-3)
    assert 0 < rates.dense.launch_s < 1.1e-4, "what the small matrix takes beside its bytes"
    (line,) = describe_units(device, ())
    assert line.startswith("gpu: Adreno (TM) 750; ") and "GB/s for one" in line


def test_a_processor_that_plays_a_gpu_is_labelled_and_left_alone() -> None:
    device = make_device_with(make_unit(kind="processor", name="pthread-haswell"))
    unit = device.units["opencl-cpu"]
    assert unit.emulated and unit.read_bandwidth is not None
    assert unit.read_bandwidth.source.count("emulated by the processor") == 1
    assert read_rates(device).dense is None
    assert "which is the processor itself" in next(iter(describe_units(device, ())))


def test_a_card_with_memory_of_its_own_does_not_read_ours() -> None:
    device = make_device_with(make_unit(memory_bytes=8 << 30), make_unit(memory_bytes=8 << 30))
    assert set(device.units) == {"cpu", "gpu", "gpu2"}
    gpu = device.units["gpu"]
    assert gpu.memory is not None and gpu.memory.capacity == 8 << 30
    rates = read_rates(device)
    assert gpu.read_bandwidth is None
    assert rates.dense is not None and rates.dense.has_memory


def test_units_that_cannot_be_measured_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dev/kgsl-3d0", "dev/adsprpc-smd", "dev/dri/renderD128"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    missing = Survey(api="opencl", obstacle="it is not installed", help="pip install it")
    monkeypatch.setattr("pi2.probing.probe.Worker", make_worker(missing))
    found = measure_accelerators(ignore_progress, rounds=1, root=tmp_path, apis=["opencl"])
    assert found.notes == [
        "an Adreno GPU was found (/dev/kgsl-3d0), but not measured: opencl: it is not installed "
        "(pip install it); published figures can be stated by hand",
        "a Hexagon NPU was found (/dev/adsprpc-smd), but not measured: published figures can be "
        "stated by hand",
    ]


def make_worker(survey: Survey) -> Any:
    class Finding:
        def __init__(self, *_: object) -> None:
            self.measured = {step: [1e-3] for step in GPU_STEPS}

        def __enter__(self) -> Finding:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def call(self, name: str, *_: object) -> object:
            return survey if name == "survey" else self.measured

    return Finding


def test_a_gpu_that_several_apis_find_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, processor = make_unit().facts, make_unit(kind="processor", name="llvmpipe").facts
    survey = Survey(api="opencl", devices=(gpu, processor))
    monkeypatch.setattr("pi2.probing.probe.Worker", make_worker(survey))
    found = measure_accelerators(
        ignore_progress, rounds=1, root=tmp_path, apis=["webgpu", "opencl"]
    )
    assert [item.facts.name for item in found.units] == [gpu.name, "llvmpipe", "llvmpipe"]


def test_a_driver_that_crashes_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Crashing:
        def __init__(self, *_: object) -> None:
            raise UserError.of("P640", "the measured process was ended by SIGSEGV")

    monkeypatch.setattr("pi2.probing.probe.Worker", Crashing)
    found = measure_accelerators(ignore_progress, rounds=1, root=Path("/none"), apis=["opencl"])
    assert found.units == []
    assert found.notes == [
        "opencl device 0 was found, but not measured: the measured process was ended by SIGSEGV"
    ]


@pytest.mark.parametrize("api", ["opencl", "webgpu"])
def test_kernels_that_are_measured_compute_what_numpy_does(api: Api) -> None:
    """On whatever GPU this machine has; PoCL and lavapipe are the processor itself."""
    bench = DeviceBench(require_launcher(api), ignore_progress)
    bench.prepare(GPU_STEPS[0])()  # compares the result with numpy's
    bench.prepare(dataclasses.replace(GPU_STEPS[-1], size=8))()


@pytest.mark.parametrize(
    ("times", "kept"),
    [([0.0, 1.0e-4], 1), ([1e-9, 1.0e-4, 1.1e-4], 2), ([1.0e-4], 1)],
    ids=["nothing", "faster than a cache", "possible"],
)
def test_impossible_times_do_not_count(times: list[float], kept: int) -> None:
    found = make_measurements(step_s={**make_measurements().step_s, STEPS[0]: times})
    (kernel,) = (x for x in make_device("mine", found).units["cpu"].kernels if x.kernel == "gather")
    assert kernel.time == pytest.approx(1.0e-4, rel=0.1) and kernel.samples == kept


def test_a_step_without_a_possible_time_is_refused() -> None:
    """8 MiB in 1 ns is no figure of a machine but of other work on it."""
    found = make_measurements(step_s={**make_measurements().step_s, STEPS[0]: [0.0, 1e-9]})
    with pytest.raises(UserError, match="no possible time was measured of gather 256") as caught:
        make_device("mine", found)
    assert caught.value.diagnostics[0].code == "P343"


def test_threads_that_wake_at_once_have_no_figure() -> None:
    step = StepFacts(kernel="wake", size=2000, read_bytes=None, operations=None)
    usual = make_measurements()
    found = make_measurements(step_s={**usual.step_s, step: [0.0, 0.0]})
    kernels = make_device("mine", found).units["cpu"].kernels
    assert [item.kernel for item in kernels] == ["gather", "dense", "look-up"]
