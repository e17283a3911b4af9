"""Shared libraries that are linked without a linker, here and under qemu-aarch64."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest

from pi2.backends.compiler.linking import LinkError, link_objects
from tests.helpers.aarch64 import COMPILER, EMULATOR, needs_emulator

FOLDER = Path(__file__).parent / "linking"
FIRST = (FOLDER / "first.ll").read_text()
SECOND = (FOLDER / "second.ll").read_text()
RESULT = 7 + 4 + 5 + 10 + 2


def compile_all(folder: Path, architecture: str, *texts: str) -> list[Path]:
    from pi2.backends.compiler.compile import compile_text

    names = [folder / f"{place}-{architecture}.o" for place in range(len(texts))]
    for path, text in zip(names, texts, strict=True):
        compile_text(text, f"{architecture}-linux-gnu", path)
    return names


@pytest.mark.skipif(platform.machine() != "x86_64", reason="is compiled for x86-64")
@pytest.mark.parametrize("texts", [(FIRST, SECOND), (SECOND, FIRST)])
def test_code_data_and_names_meet(texts: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "library.so"
    foreign = link_objects(compile_all(tmp_path, "x86_64", *texts), output)
    assert set(foreign) - {"rint"} == {"memset", "strlen"}
    assert ctypes.CDLL(str(output)).compute() == RESULT
    assert not hasattr(ctypes.CDLL(str(output)), "numbers")


@needs_emulator
def test_code_data_and_names_meet_on_arm64(tmp_path: Path) -> None:
    output, source = tmp_path / "library.so", FOLDER / "harness.c"
    link_objects(compile_all(tmp_path, "aarch64", FIRST, SECOND), output, needed="libc.so.6")
    assert COMPILER is not None and EMULATOR is not None
    program = tmp_path / "harness"
    subprocess.run([COMPILER, "-o", str(program), str(source), "-ldl"], check=True)
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, str(RESULT)), done.stdout + done.stderr


def test_what_it_does_not_know_it_refuses(tmp_path: Path) -> None:
    output = tmp_path / "library.so"
    (own,) = compile_all(tmp_path, "x86_64", FIRST)
    (other,) = compile_all(tmp_path, "aarch64", SECOND)
    (tmp_path / "other").mkdir()
    (kept,) = compile_all(tmp_path / "other", "x86_64", "@own = thread_local global i32 1")
    (tmp_path / "text.o").write_bytes(b"no object file".ljust(200))
    for files, words in (
        ([own, other], "for another machine"),
        ([own, kept], r"has a section \.tdata"),
        ([tmp_path / "text.o"], "no object file"),
    ):
        with pytest.raises(LinkError, match=words):
            link_objects(files, output)
    assert not output.exists()
