"""What a real NPU needs beside the kernels: C that is compiled against declarations of the vendor's
SDK, and one object of all graphs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pi2.backends.hexagon as package
from pi2.backends.hexagon import session
from pi2.backends.hexagon.linkers import find_linker
from pi2.backends.hexagon.specification import FfnGraph, FfnShape, HexagonSpec, write_library
from pi2.plan.documents.model_parts import Ffn
from tools.write_npu_library import main

DSP = Path(package.__file__).parent / "dsp"
WARNINGS = ("-O2", "-Wall", "-Wextra", "-Werror", f"-I{DSP}", f"-I{DSP / 'check'}")


def find_clang() -> str:
    for name in ("clang", *(f"clang-{version}" for version in range(22, 13, -1))):
        if shutil.which(name) is None:
            continue
        targets = subprocess.run([name, "--print-targets"], capture_output=True, text=True)
        if "hexagon" in targets.stdout:
            return name
    pytest.skip("there is no clang that compiles for Hexagon: apt install clang")


def test_the_side_of_the_npu_compiles(tmp_path: Path) -> None:
    target = ("--target=hexagon", "-mv68", "-mhvx", "-ffreestanding", "-nostdlibinc")
    output = tmp_path / "skel.o"
    subprocess.run(
        [find_clang(), *target, *WARNINGS, f"-I{DSP / 'check' / 'npu'}"]
        + ["-c", str(DSP / "skel.c"), "-o", str(output)],
        check=True,
    )
    assert output.read_bytes()[:4] == b"\x7fELF"


def test_the_side_of_the_phone_compiles(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-gcc")
    if compiler is None:
        pytest.skip("there is no aarch64-linux-gnu-gcc: apt install gcc-aarch64-linux-gnu")
    output = tmp_path / "host.o"
    subprocess.run([compiler, *WARNINGS, "-c", str(DSP / "host.c"), "-o", str(output)], check=True)
    assert output.read_bytes()[:4] == b"\x7fELF"


def test_both_sides_mean_the_same_by_a_message() -> None:
    text = (DSP / "protocol.h").read_text()
    defined = {name: int(value, 0) for name, value in re.findall(r"#define PI2_(\w+) (\w+)u", text)}
    assert defined == {
        "MAGIC": session.MAGIC,
        "PROTOCOL": session.PROTOCOL,
        "OPERANDS": session.OPERANDS,
        "NOTHING": session.NOTHING,
    }
    numbers = {int(value) for value in re.findall(r"PI2_\w+ = (\d+)", text)}
    assert numbers == {0, *session.FAILURES}


@pytest.mark.parametrize(
    ("plan", "unit", "says"),
    [
        ("nowhere.plan.toml", "npu", "error[P001]: no such file"),
        ("demo.plan.toml", "npu", "the device 'host' has no NPU named 'npu'"),
        ("demo-npu.plan.toml", "cpu", "the device 'host-npu' has no NPU named 'cpu'"),
    ],
)
def test_the_command_says_what_it_cannot_compile(
    plan: str, unit: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "plans" / plan
    try:
        code = main([str(path), unit, str(tmp_path)])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_library_has_a_program_an_object_and_an_index(tmp_path: Path) -> None:
    if find_linker() is None:
        pytest.skip("there is no ld.lld: apt install lld")
    shape = FfnShape(hidden=64, weights="int4", options=Ffn(activation="relu"))
    write_library(
        HexagonSpec(version="v75", ffn=shape, graphs=(FfnGraph(tokens=1, neurons=32),)), tmp_path
    )
    assert '"name": "ffn_1x32"' in (tmp_path / "graphs.json").read_text()
    program, graphs = (tmp_path / name for name in ("graphs.elf", "graphs.o"))
    assert b"pi2_run" in graphs.read_bytes() and b"_start" not in graphs.read_bytes()
    assert program.read_bytes()[:4] == b"\x7fELF"
