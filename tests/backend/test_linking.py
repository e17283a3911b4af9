"""Shared libraries that are linked without a linker, here and under qemu-aarch64."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest

from pi2.backends.compiler.linking import LinkError, link_objects
from tests.helpers.aarch64 import COMPILER, EMULATOR, needs_emulator

FIRST = r"""
@numbers = internal global [4 x i64] [i64 1, i64 2, i64 3, i64 4]
@room = internal global [256 x i8] zeroinitializer, align 64
@table = global [2 x ptr] [ptr @numbers, ptr @strlen]
@text = private constant [6 x i8] c"hello\00"
declare i64 @strlen(ptr)
declare ptr @memset(ptr, i32, i64)
declare i64 @double(i64)
define weak i64 @choose() {
  ret i64 1000
}
define i64 @compute() {
  %filled = call ptr @memset(ptr @room, i32 7, i64 256)
  %last = load i8, ptr getelementptr inbounds ([256 x i8], ptr @room, i64 0, i64 255)
  %seven = zext i8 %last to i64
  %list = load ptr, ptr @table
  %place = getelementptr inbounds i64, ptr %list, i64 3
  %four = load i64, ptr %place
  %function = load ptr, ptr getelementptr inbounds ([2 x ptr], ptr @table, i64 0, i64 1)
  %five = call i64 %function(ptr @text)
  %length = call i64 @strlen(ptr @text)
  %ten = call i64 @double(i64 %length)
  %two = call i64 @choose()
  %a = add i64 %seven, %four
  %b = add i64 %five, %ten
  %c = add i64 %a, %b
  %sum = add i64 %c, %two
  ret i64 %sum
}
"""
SECOND = """
@factor = constant double 2.0, align 8
@factors = global ptr null
@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }]
  [{ i32, ptr, ptr } { i32 65535, ptr @start, ptr null }]
define internal void @start() {
  store ptr @factor, ptr @factors
  ret void
}
define i64 @choose() {
  ret i64 2
}
define i64 @double(i64 %value) {
  %place = load ptr, ptr @factors
  %factor = load double, ptr %place
  %wide = sitofp i64 %value to double
  %product = fmul double %wide, %factor
  %third = fdiv double %product, 3.0
  %again = fmul double %third, 3.0
  %rounded = call double @llvm.rint.f64(double %again)
  %result = fptosi double %rounded to i64
  ret i64 %result
}
declare double @llvm.rint.f64(double)
"""
RESULT = 7 + 4 + 5 + 10 + 2
HARNESS = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names) {
    void *library = dlopen(names[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    printf("%ld", ((long (*)(void))dlsym(library, "compute"))());
}
"""


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
    output, source = tmp_path / "library.so", tmp_path / "harness.c"
    link_objects(compile_all(tmp_path, "aarch64", FIRST, SECOND), output, needed="libc.so.6")
    source.write_text(HARNESS)
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
