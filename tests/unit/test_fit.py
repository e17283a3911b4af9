"""A device document against a machine: what fits, what does not, and what to do."""

from pathlib import Path
from typing import Any

import pytest

from pi2.diagnostics import Diagnostic
from pi2.fitting.check import load_plan
from pi2.fitting.misfits import find_misfits, find_plan_misfits
from pi2.machine import Cpu, CpuCores, Machine, Memory
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device
from pi2.plan.reading.references import find_shipped_folder

GIB = 1 << 30


def make_machine(**changes: Any) -> Machine:
    """A laptop with four cores and 8 GiB, 6 of them free."""
    facts: dict[str, Any] = {
        "architecture": "x86-64",
        "features": frozenset({"avx2", "fma", "f16c"}),
        "cores": 4,
        "limit": 8 * GIB,
        "available": 6 * GIB,
        **changes,
    }
    return Machine(
        system="Linux 6.1",
        cpu=Cpu(
            name="made up", architecture=facts["architecture"], features=facts["features"],
            cores_online=facts["cores"], cores=facts["cores"], quota_cores=None,
            clusters=(CpuCores(cores=facts["cores"]),),
        ),
        memory=Memory(
            installed_bytes=8 * GIB, limit_bytes=facts["limit"], available_bytes=facts["available"]
        ),
    )  # fmt: skip


def make_device(**unit: Any) -> Device:
    return Device.model_validate(
        {"schema_version": 3, "id": "acme", "units": {"cpu": {"kind": "cpu", **unit}}}
    )


def find(
    device: Device, machine: Machine, budget_bytes: int = GIB, **more: Any
) -> list[Diagnostic]:
    return find_misfits(device, machine, budget_bytes, **more)


PHONE = Device.model_validate(
    {
        "schema_version": 3,
        "id": "phone",
        "units": {"cpu": {"kind": "cpu"}, "npu": {"kind": "npu", "architecture": "hexagon"}},
    }
)


def test_a_device_that_states_nothing_else_fits() -> None:
    assert find(make_device(), make_machine(architecture="riscv64", features=frozenset())) == []
    clusters = ({"id": "all", "cores": 4},)
    own = make_device(architecture="x86-64", features=("avx2", "fma"), clusters=clusters)
    assert find(own, make_machine()) == []
    assert find(PHONE, make_machine()) == []  # units that are no processor are not compared


ARM = make_device(architecture="aarch64", features=("neon",))
FAST = make_device(features=("avx512vnni", "avx2", "avx512f"))


@pytest.mark.parametrize(
    ("device", "machine", "gib", "code", "message"),
    [
        (ARM, {}, 1, "P301", "'acme' has an aarch64 processor, this machine has x86-64"),
        (FAST, {}, 1, "P302", "lacks avx512f, avx512vnni, which"),
        (make_device(), {}, 9, "P303", "plan's budget is 9 GiB, 8 GiB of memory is installed"),
        (make_device(), {"limit": 2 * GIB}, 3, "P303", "2 GiB of memory is allowed here"),
        (make_device(), {}, 7, "P305", ""),
    ],
)
def test_a_misfit_is_named(
    device: Device, machine: dict[str, int], gib: int, code: str, message: str
) -> None:
    (finding,) = find(device, make_machine(**machine), gib * GIB)
    severity = "warning" if code == "P305" else "error"
    assert (finding.code, finding.severity) == (code, severity)
    assert message in finding.message and (finding.help or code != "P301")
    assert finding.path == "device" or code != "P302"


def test_more_threads_than_cores_is_a_warning() -> None:
    device = make_device(clusters=({"id": "big", "cores": 2}, {"id": "little", "cores": 6}))
    (finding,) = find(device, make_machine())
    assert (finding.code, finding.severity) == ("P304", "warning")
    assert "8 compute threads" in finding.message
    assert finding.help == "set threads.compute = 4"
    assert find(device, make_machine(), threads=4) == []
    assert find(make_device(), make_machine(), threads=5)[0].code == "P304"


def test_a_core_to_bind_to_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.fitting.misfits.list_allowed_cores", lambda: [0, 2])
    assert find(make_device(), make_machine(), bound=[2, 0]) == []
    (finding,) = find(make_device(), make_machine(), bound=[0, 1])
    assert (finding.code, finding.severity, finding.path) == ("P306", "error", "threads.cores")
    assert finding.message == "core 1 is not for this process to use"
    assert "(0, 2)" in str(finding.help)


def test_all_misfits_are_reported_at_once() -> None:
    device = make_device(architecture="aarch64", clusters=({"id": "a", "cores": 8},))
    codes = [finding.code for finding in find(device, make_machine(), 100 * GIB)]
    assert codes == ["P301", "P304", "P303"]


def test_processor_does_not_matter_without_compiled_kernels() -> None:
    device = make_device(architecture="aarch64", clusters=({"id": "a", "cores": 8},))
    assert find(device, make_machine(), native=False) == []
    assert [f.code for f in find(device, make_machine(), 9 * GIB, native=False)] == ["P303"]


def resolve_demo(tmp_path: Path, backend: str) -> ResolvedPlan:
    demo = find_shipped_folder() / "demo.plan.toml"
    text = demo.read_text(encoding="utf-8").replace('"host"', '"arm.device.toml"')
    text = text.replace('cpu = "cpu"', f'cpu = "{backend}"')
    (tmp_path / "x.plan.toml").write_text(text, encoding="utf-8")
    (tmp_path / "arm.device.toml").write_text(
        'schema_version = 3\nid = "arm"\n[units.cpu]\nkind = "cpu"\narchitecture = "aarch64"\n'
    )
    return load_plan(tmp_path / "x.plan.toml")


def test_misfit_of_a_plan_points_into_its_file(tmp_path: Path) -> None:
    resolved = resolve_demo(tmp_path, "cpu")
    (finding,) = find_plan_misfits(resolved, make_machine())
    assert finding.code == "P301" and finding.span is not None
    line = resolved.path.read_text(encoding="utf-8").splitlines()[finding.span.line - 1]
    assert line[finding.span.column - 1 : finding.span.end_column - 1] == '"arm.device.toml"'


def test_plan_for_another_processor_runs_on_numpy_and_on_counting_backend(tmp_path: Path) -> None:
    small = make_machine(limit=GIB // 64, available=GIB // 64)
    assert find_plan_misfits(resolve_demo(tmp_path, "reference"), make_machine()) == []
    numpy_only = find_plan_misfits(resolve_demo(tmp_path, "reference"), small)
    assert [finding.code for finding in numpy_only] == ["P303"]
    assert find_plan_misfits(resolve_demo(tmp_path, "null"), small) == []
