"""`pi2 doctor`: what it finds, how it says it, and what it makes of plans."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pi2.backends.gpu.devices import Survey
from pi2.backends.gpu.launchers.interface import DeviceFacts
from pi2.checkup import Checkup, Folder, PlanVerdict, examine_machine, inspect_folder, judge_plan
from pi2.cli.machines import describe_tvm, write_checkup
from pi2.cli.machines import doctor_command as command
from pi2.diagnostics import Diagnostic
from pi2.machine import Cpu, CpuCores, Machine, Memory, Storage, list_hints
from pi2.machine.storage import DirectReads, Tvm, detect_tvm, find_programs
from pi2.plan.reading.references import find_shipped_folder

GIB = 1 << 30
GOLDENS = Path(__file__).resolve().parents[1] / "golden"
PHONE = Machine(
    system="Linux 5.15",
    cpu=Cpu(
        name="Acme SoC",
        architecture="aarch64",
        features=frozenset({"neon", "dotprod"}),
        cores_online=8,
        cores=6,
        quota_cores=None,
        clusters=(
            CpuCores(cores=1, max_hz=3.3e9, core="cortex-x4"),
            CpuCores(cores=7, max_hz=2.0e9),
        ),
    ),
    memory=Memory(installed_bytes=12 * GIB, limit_bytes=8 * GIB, available_bytes=3 * GIB),
)
CHECKUP = Checkup(
    pi2_version="9.9",
    python_version="3.11.2",
    machine=PHONE,
    hints=("a control group allows 8192 of 12288 MiB: raise memory.max for larger budgets",),
    storage=Storage(
        path=Path("/data"), filesystem="f2fs", device="sda", block_bytes=4096, free_bytes=40 * GIB,
        direct=DirectReads(works=False, obstacle="the file system refuses O_DIRECT"),
    ),
    tvm=Tvm(version=None, ffi_version="0.1.15", ffi_wanted="0.1.14.*", runtime_library=None),
    emulators={"qemu-aarch64": None},
    gpus=(
        Survey(
            api="opencl",
            devices=(
                DeviceFacts(
                    api="opencl", number=0, name="Adreno 750", driver="QUALCOMM 3.0",
                    kind="integrated", memory_bytes=None, fp16=True, compute_units=6,
                    max_array_bytes=GIB, shared_bytes=32768,
                ),
            ),
        ),
        Survey(api="cuda", obstacle="no driver", help="install one"),
    ),
    kernel_cache=Folder(path=Path("/cache/kernels"), writable=False),
    backends={"null": (), "cpu": ("TVM is not installed",)},
    plans=(
        PlanVerdict(
            name="acme/big.plan.toml",
            verdict="cannot run",
            findings=(Diagnostic(code="P303", message="too big", help="make it smaller"),),
        ),
        PlanVerdict(name="demo.plan.toml", verdict="runs"),
        PlanVerdict(
            name="acme/huge.plan.toml",
            verdict="cannot run",
            findings=(Diagnostic(code="P303", message="too big", help="make it smaller"),),
        ),
        PlanVerdict(name="acme/phone.plan.toml", verdict="dry run"),
    ),
)  # fmt: skip


def read(checkup: Checkup, *, whole: bool = False, columns: int | None = None) -> str:
    return click.unstyle("\n".join(write_checkup(checkup, whole=whole, columns=columns)))


@pytest.mark.parametrize(("name", "whole"), [("doctor", True), ("doctor-short", False)])
def test_report_for_people(name: str, whole: bool) -> None:
    columns = None if whole else 80
    golden = (GOLDENS / f"{name}.txt").read_text(encoding="utf-8")
    assert read(CHECKUP, whole=whole, columns=columns) + "\n" == golden


def test_a_device_that_the_cpu_emulates_is_called_that() -> None:
    emulated = dataclasses.replace(
        CHECKUP.gpus[0].devices[0], api="webgpu", name="llvmpipe", driver="Mesa", kind="processor"
    )
    surveys = (Survey(api="webgpu", devices=(emulated,)), *CHECKUP.gpus[1:])
    found = dataclasses.replace(
        CHECKUP, gpus=surveys, backends={"cpu": (), "gpu": ()}, emulated=frozenset({"gpu"})
    )
    for whole in (False, True):
        text = read(found, whole=whole)
        assert "webgpu: llvmpipe (Mesa), emulated by the CPU" in text
        assert "emulated only" in text
    assert "can run here: cpu\n" in read(found)


def test_hints_name_what_is_slow_and_what_changes_it(tmp_path: Path) -> None:
    for name, text in {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "proc/meminfo": "SwapTotal:  2048 kB\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = dataclasses.replace(
        PHONE, cpu=dataclasses.replace(PHONE.cpu, quota_cores=1.5, features=frozenset({"neon"}))
    )
    huge, swap, group, quota, features = list_hints(machine, tmp_path)
    assert "madvise" in huge and swap.startswith("2 MiB of swap")
    assert "8192 of 12288 MiB" in group and "1.5 of 8 cores: raise cpu.max" in quota
    assert "the CPU has no dotprod" in features


@pytest.mark.slow
def test_report_of_this_machine() -> None:
    checkup = examine_machine()
    assert checkup.machine.cpu.name in read(checkup)
    assert len(read(checkup, columns=80).splitlines()) <= 40
    assert "demo.plan.toml" in [plan.name for plan in checkup.plans]
    assert checkup.tvm.version is not None
    assert list(describe_tvm(checkup.tvm))[1] == f"apache-tvm-ffi {checkup.tvm.ffi_version}"
    assert checkup.tvm.runtime_library is not None
    assert set(checkup.backends) >= {"null", "reference", "cpu"}


def run_doctor(monkeypatch: pytest.MonkeyPatch, checkup: Checkup, *arguments: str) -> Any:
    monkeypatch.setattr("pi2.checkup.examine_machine", lambda: checkup)
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_report_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(run_doctor(monkeypatch, CHECKUP, "--json").output)
    assert report["machine"]["cpu"]["features"] == ["dotprod", "neon"]
    assert report["machine"]["memory"]["limit_bytes"] == 8 * GIB
    assert report["storage"]["path"] == "/data"
    assert [(plan["name"], plan["verdict"]) for plan in report["plans"][:2]] == [
        ("acme/big.plan.toml", "cannot run"),
        ("demo.plan.toml", "runs"),
    ]
    assert report["plans"][0]["findings"][0]["code"] == "P303"


def test_exit_code_says_whether_any_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_doctor(monkeypatch, CHECKUP).return_value == 0
    none = dataclasses.replace(CHECKUP, plans=CHECKUP.plans[2:])
    assert run_doctor(monkeypatch, none).return_value == 1


def test_no_colours_where_nobody_reads_along(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in run_doctor(monkeypatch, CHECKUP).output


DEMO = find_shipped_folder() / "demo.plan.toml"


def judge(machine: Machine, **backends: tuple[str, ...]) -> PlanVerdict:
    return judge_plan(DEMO, DEMO.name, machine, {"cpu": (), **backends})


def test_a_plan_runs_where_nothing_keeps_it(tmp_path: Path) -> None:
    assert [f.code for f in judge(PHONE).findings if f.code != "P501"] == []
    refused = judge(PHONE, cpu=("no linker",))
    assert "backend 'cpu' cannot run here: no linker" in [f.message for f in refused.findings]
    memory = Memory(installed_bytes=GIB // 16, limit_bytes=GIB // 16, available_bytes=GIB // 16)
    small = judge(dataclasses.replace(PHONE, memory=memory))
    assert "P303" in [finding.code for finding in small.findings]
    plan, text = tmp_path / "x.plan.toml", DEMO.read_text(encoding="utf-8")
    plan.write_text("schema_version = 3\n")
    broken = judge_plan(plan, "x", PHONE, {})
    assert broken.findings
    plan.write_text(text.replace('weights = "stores/pi2-demo"', 'weights = "nowhere"'))
    storeless = judge_plan(plan, "x", PHONE, {"cpu": ()})
    assert [finding.code for finding in storeless.findings] == ["P501"]
    assert {found.verdict for found in (refused, small, broken, storeless)} == {"cannot run"}


def test_plan_that_only_counts_needs_nothing_of_the_machine(tmp_path: Path) -> None:
    plan = tmp_path / "x.plan.toml"
    text = DEMO.read_text(encoding="utf-8").replace('cpu = "cpu"', 'cpu = "null"')
    plan.write_text(text.replace('weights = "stores/pi2-demo"', 'weights = "nowhere"'))
    assert judge_plan(plan, "x", PHONE, {}) == PlanVerdict(name="x", verdict="dry run")


def test_folder_that_is_not_there_yet_is_writable_if_it_can_be_made(tmp_path: Path) -> None:
    assert inspect_folder(tmp_path / "a/b").writable
    (tmp_path / "file").write_text("")
    assert not inspect_folder(tmp_path / "file/b").writable


def test_tvm_is_found_without_importing_it() -> None:
    tvm = detect_tvm()
    assert tvm.version is not None and tvm.version.startswith("0.27.")
    assert tvm.runtime_library is not None
    assert tvm.runtime_library.name.startswith("libtvm_runtime.")


def test_programs_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ld", "qemu-aarch64-static"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_programs(("ld", "gcc", "qemu-aarch64")) == {
        "ld": str(tmp_path / "ld"),
        "gcc": None,
        "qemu-aarch64": str(tmp_path / "qemu-aarch64-static"),
    }
