"""Libraries for other machines, which run there without TVM.

Their functions are those that a run compiles for itself, called by the same rules of tvm_ffi; what
they need of TVM's runtime besides is linked to them: `threads.ll`, which says what that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tvm

TRIPLES = ("x86_64-linux-gnu", "aarch64-linux-gnu", "aarch64-linux-android")
"""Machines, by LLVM's names."""
_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call, by architecture (asm/unistd.h of Linux)."""
C_LIBRARY = ("memcpy", "memmove", "memset", "preadv", "strlen", "syscall")
"""Functions of the C library that functions call."""
OPTIONS = (
    "-shared",
    "-Bsymbolic",  # each library has threads of its own
    "--build-id=none",
    "-z",
    "max-page-size=16384",  # Android has pages of 4 or 16 KiB
)
"""What linkers are told."""


def aim(target: tvm.target.Target, triple: str) -> tvm.target.Target:
    """Return ``target`` for the machine ``triple``."""
    options: dict[str, object] = {"kind": "llvm", "mtriple": triple}
    for key in ("mcpu", "mattr"):
        if target.attrs.get(key):
            value = target.attrs[key]
            options[key] = str(value) if key == "mcpu" else [str(item) for item in value]
    return tvm.target.Target(options)


def compile_threads(triple: str, folder: Path) -> Path:
    """Write the object file of ``threads.ll`` into ``folder``."""
    code = Path(__file__).with_name("threads.ll").read_text()
    return compile_text(code, triple, folder / "threads.o")


def compile_stub(triple: str, folder: Path) -> Path:
    """Write an object file that defines the names of the C library's functions.

    Android's linker finds functions of the C library only for what says that it needs
    ``libc.so``.  A library of that name, linked of this, is all that the build needs of it.
    """
    code = "".join(f"define void @{name}() {{\n  ret void\n}}\n" for name in C_LIBRARY)
    return compile_text(code, triple, folder / "stub.o")


def compile_text(text: str, triple: str, output: Path) -> Path:
    """Compile LLVM's assembly, in which FUTEX is the number of the system call."""
    text = text.replace("i64 FUTEX", f"i64 {_FUTEX[triple.partition('-')[0]]}")
    target = f"{{\\22kind\\22: \\22llvm\\22, \\22mtriple\\22: \\22{triple}\\22}}"
    # TVM's loader takes the machine from there.
    text += f'\n!llvm.module.flags = !{{!0}}\n!0 = !{{i32 4, !"tvm_target", !"{target}"}}\n'
    source = output.with_suffix(".ll")
    source.write_text(text)
    tvm.runtime.load_module(str(source)).write_to_file(str(output), "o")
    return output


def list_linkers(triple: str) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return programs that can link for a machine, best first, with their options."""
    own = [(f"{triple}-ld", OPTIONS)] if triple.endswith("-gnu") else []
    return [("ld.lld", OPTIONS), *own]
