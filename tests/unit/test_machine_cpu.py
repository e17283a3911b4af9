"""Detection of the processor, from files that real machines have."""

from pathlib import Path
from typing import get_args

import pytest

from pi2.backends.kernels.isa import choose_isa
from pi2.diagnostics import UserError
from pi2.machine import detect_cpu
from pi2.machine.cpu import _FEATURES, _TABLE, LEVELS, list_features
from pi2.plan.documents.device import IsaFeature

CASCADE_LAKE = (
    "fpu sse4_1 sse4_2 avx f16c avx2 fma avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
)
ZEN_3 = "fpu sse sse2 ssse3 fma sse4_1 sse4_2 avx f16c bmi1 avx2 bmi2 sha_ni vaes"
CORTEX_A55 = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp"
CORTEX_X1 = CORTEX_A55 + " lrcpc dcpop"


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_x86(root: Path, name: str, flags: list[str], made: str = "X\ncpu family\t: 6") -> None:
    write(
        root,
        "proc/cpuinfo",
        "".join(
            f"processor\t: {i}\nvendor_id\t: {made}\nmodel name\t: {name}\nflags\t\t: {words}\n\n"
            for i, words in enumerate(flags)
        ),
    )


def write_arm(root: Path, parts: list[int], features: list[str], tail: str = "") -> None:
    write(
        root,
        "proc/cpuinfo",
        "".join(
            f"processor\t: {i}\nBogoMIPS\t: 38.40\nFeatures\t: {words}\n"
            f"CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
            f"CPU part\t: {part:#x}\nCPU revision\t: 0\n\n"
            for i, (part, words) in enumerate(zip(parts, features, strict=True))
        )
        + tail,
    )


def test_server_with_vnni(tmp_path: Path) -> None:
    write_x86(tmp_path, "Xeon Gold 6248", [CASCADE_LAKE] * 4)
    cpu = detect_cpu(tmp_path, machine="x86_64", affinity=4)
    assert (cpu.name, cpu.architecture) == ("Xeon Gold 6248", "x86-64")
    assert cpu.features == {
        "sse4.2", "f16c", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni",
    }  # fmt: skip
    assert (cpu.cores_online, cpu.cores, cpu.quota_cores) == (4, 4, None)
    assert [cluster.cores for cluster in cpu.clusters] == [4]


def test_tiles_count_where_all_cores_state_them(tmp_path: Path) -> None:
    write_x86(tmp_path, "Xeon", [f"{CASCADE_LAKE} amx_bf16 amx_tile amx_int8"] * 2)
    assert "amx-int8" in detect_cpu(tmp_path, machine="x86_64", affinity=2).features
    write_x86(tmp_path, "Xeon", [f"{CASCADE_LAKE} amx_tile amx_int8", CASCADE_LAKE])
    assert "amx-int8" not in detect_cpu(tmp_path, machine="x86_64", affinity=2).features


def test_tiles_do_not_count_where_the_system_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi2.machine.cpu.permit_tiles", lambda: False)
    assert "amx-int8" not in detect_cpu().features


def test_phone_has_three_kinds_of_cores(tmp_path: Path) -> None:
    parts = [0xD05] * 4 + [0xD41] * 3 + [0xD44]
    khz = [1_803_000] * 4 + [2_420_000] * 3 + [2_841_000]
    write_arm(tmp_path, parts, [CORTEX_A55] * 7 + [CORTEX_X1], tail="Hardware\t: Made-up SoC\n")
    for i, value in enumerate(khz):
        write(tmp_path, f"sys/devices/system/cpu/cpu{i}/cpufreq/cpuinfo_max_freq", f"{value}\n")
    cpu = detect_cpu(tmp_path, machine="aarch64", affinity=8)
    assert cpu.name == "Made-up SoC"
    found = {c.core: (c.cores, c.max_hz) for c in cpu.clusters}
    cores = {"cortex-x1": (1, 2.841e9), "cortex-a78": (3, 2.42e9), "cortex-a55": (4, 1.803e9)}
    assert list(found.items()) == list(cores.items())
    assert cpu.features == {"neon", "fp16", "dotprod"}


def test_a_feature_counts_only_if_all_cores_have_it(tmp_path: Path) -> None:
    newer = CORTEX_X1 + " i8mm sve"
    write_arm(tmp_path, [0xD05, 0xD82], [CORTEX_A55, newer])
    features = detect_cpu(tmp_path, machine="aarch64", affinity=2).features
    assert features == {"neon", "fp16", "dotprod"}


def test_board_names_the_chip_where_cpuinfo_does_not(tmp_path: Path) -> None:
    write_arm(tmp_path, [0xD08] * 4, ["fp asimd"] * 4)
    write(tmp_path, "sys/firmware/devicetree/base/model", "Raspberry Pi 4 Model B\0")
    cpu = detect_cpu(tmp_path, machine="aarch64", affinity=4)
    assert cpu.name == "Raspberry Pi 4 Model B"
    (tmp_path / "sys/firmware/devicetree/base/model").unlink()
    assert detect_cpu(tmp_path, machine="aarch64", affinity=4).name == "4x cortex-a72"


def test_system_without_proc_still_answers(tmp_path: Path) -> None:
    cpu = detect_cpu(tmp_path, machine="arm64", affinity=3)
    assert cpu.architecture == "aarch64" and cpu.features == {"neon"}
    assert (cpu.cores, len(cpu.clusters)) == (3, 1)


def test_foreign_architecture_keeps_its_name_and_has_no_features(tmp_path: Path) -> None:
    write_x86(tmp_path, "?", [CASCADE_LAKE])
    cpu = detect_cpu(tmp_path, machine="riscv64", affinity=1)
    assert cpu.architecture == "riscv64" and cpu.features == frozenset()


@pytest.mark.parametrize(
    ("own", "parent", "affinity", "cores"),
    [
        ("250000", "max", 8, 2), ("50000", "max", 8, 1), ("max", "max", 8, 8),
        ("900000", "max", 2, 2), ("max", "300000", 8, 3),
    ],
)  # fmt: skip
def test_the_quota_of_a_group_lowers_the_cores(
    tmp_path: Path, own: str, parent: str, affinity: int, cores: int
) -> None:
    write_x86(tmp_path, "X", [ZEN_3] * 8)
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/cpu.max", f"{parent} 100000\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job/cpu.max", f"{own} 100000\n")
    cpu = detect_cpu(tmp_path, machine="x86_64", affinity=affinity)
    assert cpu.cores == cores and cpu.cores_online == 8


def test_zen_4_fills_the_second_level_cache(tmp_path: Path) -> None:
    found = []
    for family, flags in ((25, CASCADE_LAKE), (25, ZEN_3), (26, CASCADE_LAKE)):
        write_x86(tmp_path, "X", [flags] * 2, f"AuthenticAMD\ncpu family\t: {family}")
        found.append(detect_cpu(tmp_path, machine="AMD64", affinity=2).features)
    assert found[0] - found[2] == {"l2-prefetch"}
    assert found[1] == {"sse4.2", "f16c", "avx2", "fma"}


def test_quota_of_version_1_inside_a_container(tmp_path: Path) -> None:
    """The path is the host's, which the container does not see: its root is its own group."""
    write_x86(tmp_path, "X", [ZEN_3] * 8)
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/docker/0123\n4:memory:/docker/0123\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    cpu = detect_cpu(tmp_path, machine="x86_64", affinity=8)
    assert (cpu.quota_cores, cpu.cores) == (1.5, 1)


def test_features_are_those_of_the_plan_language() -> None:
    tables = [*_FEATURES.values(), *_TABLE["families"].values()]
    spoken = {feature for names in tables for feature in names.values()}
    assert spoken == set(get_args(IsaFeature))


def test_this_machine() -> None:
    cpu = detect_cpu()
    assert cpu.name and 1 <= cpu.cores <= cpu.cores_online
    assert sum(cluster.cores for cluster in cpu.clusters) == cpu.cores_online


LEVELS_OF_SCHEDULES = [*(("x86-64", name) for name in LEVELS["x86-64"]), ("aarch64", "dotprod")]


@pytest.mark.parametrize(("architecture", "level"), LEVELS_OF_SCHEDULES)
def test_a_generation_chooses_the_schedule_of_its_name(architecture: str, level: str) -> None:
    features = list_features(architecture, level)
    assert level in choose_isa(features, architecture).name


def test_newer_features_of_this_processor_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PI2_CPU", raising=False)
    own = detect_cpu()
    if own.architecture != "x86-64":
        pytest.skip(f"features of {own.architecture} have other names")
    for level in ("sse4.2", "x86-64-v2"):
        monkeypatch.setenv("PI2_CPU", level)
        assert detect_cpu().features == own.features & {"sse4.2"}
    levels = LEVELS["x86-64"]
    lacking = [name for name in levels if not list_features("x86-64", name) <= own.features]
    for level in ("avx3", *lacking):
        words = "names no" if level == "avx3" else "needs .*: this processor"
        monkeypatch.setenv("PI2_CPU", level)
        with pytest.raises(UserError, match=f"PI2_CPU={level} {words}") as caught:
            detect_cpu()
        (found,) = caught.value.diagnostics
        assert found.code == "P699" and found.help is not None and "sse4.2" in found.help
        assert level not in found.help
