"""A device document against a machine: what fits, what does not, and what to do."""

from __future__ import annotations

from typing import Any

from pi2.diagnostics import Diagnostic
from pi2.fit import find_misfits
from pi2.machine import Cpu, CpuCores, Machine, Memory
from pi2.plan.device import Device

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
            name="made up",
            architecture=facts["architecture"],
            features=facts["features"],
            cores_online=facts["cores"],
            cores=facts["cores"],
            quota_cores=None,
            clusters=(CpuCores(cores=facts["cores"]),),
        ),
        memory=Memory(
            installed_bytes=8 * GIB,
            limit_bytes=facts["limit"],
            available_bytes=facts["available"],
        ),
    )


def make_device(**unit: Any) -> Device:
    """A device with one processor of the given keys."""
    return Device.model_validate(
        {"schema_version": 1, "id": "acme", "units": {"cpu": {"kind": "cpu", **unit}}}
    )


def find(
    device: Device, machine: Machine, budget_bytes: int = GIB, **more: Any
) -> list[Diagnostic]:
    """Shorthand."""
    return find_misfits(device, machine, budget_bytes, **more)


def test_device_that_leaves_all_open_fits_every_machine() -> None:
    assert find(make_device(), make_machine(architecture="riscv64", features=frozenset())) == []


def test_device_that_states_what_the_machine_has_fits() -> None:
    device = make_device(
        architecture="x86-64", features=("avx2", "fma"), clusters=({"id": "all", "cores": 4},)
    )
    assert find(device, make_machine()) == []


def test_other_architecture() -> None:
    device = make_device(architecture="aarch64", features=("neon",))
    (finding,) = find(device, make_machine())
    assert (finding.code, finding.severity) == ("P301", "error")
    assert finding.message == "device 'acme' has an aarch64 processor, this machine has x86-64"
    assert finding.help


def test_missing_features_are_named() -> None:
    device = make_device(features=("avx512vnni", "avx2", "avx512f"))
    (finding,) = find(device, make_machine())
    assert (finding.code, finding.severity) == ("P302", "error")
    assert "lacks avx512f, avx512vnni, which" in finding.message
    assert finding.path == "units.cpu.features"


def test_budget_beyond_the_memory() -> None:
    (finding,) = find(make_device(), make_machine(), 9 * GIB)
    assert (finding.code, finding.severity) == ("P303", "error")
    assert finding.message == "the plan's budget is 9 GiB, 8 GiB of memory is installed"


def test_budget_beyond_the_limit_of_a_container() -> None:
    (finding,) = find(make_device(), make_machine(limit=2 * GIB, available=GIB), 3 * GIB)
    assert finding.code == "P303"
    assert "2 GiB of memory is allowed here" in finding.message


def test_budget_beyond_what_is_free_is_a_warning() -> None:
    (finding,) = find(make_device(), make_machine(), 7 * GIB)
    assert (finding.code, finding.severity) == ("P305", "warning")


def test_more_threads_than_cores_is_a_warning() -> None:
    device = make_device(clusters=({"id": "big", "cores": 2}, {"id": "little", "cores": 6}))
    (finding,) = find(device, make_machine())
    assert (finding.code, finding.severity) == ("P304", "warning")
    assert "8 compute threads" in finding.message
    assert finding.help == "set threads.compute = 4"
    assert find(device, make_machine(), threads=4) == []
    assert find(make_device(), make_machine(), threads=5)[0].code == "P304"


def test_units_that_are_no_processor_are_not_compared() -> None:
    device = Device.model_validate(
        {
            "schema_version": 1,
            "id": "phone",
            "units": {"cpu": {"kind": "cpu"}, "npu": {"kind": "npu", "architecture": "hexagon"}},
        }
    )
    assert find(device, make_machine()) == []


def test_all_misfits_are_reported_at_once() -> None:
    device = make_device(architecture="aarch64", clusters=({"id": "a", "cores": 8},))
    codes = [finding.code for finding in find(device, make_machine(), 100 * GIB)]
    assert codes == ["P301", "P304", "P303"]
