"""Compiles specs: what `library_compiler` runs with MODULE SPEC.json OUT [SPEC.json OUT ...]
[TRIPLE].

MODULE has ``read_program``, which turns the JSON of a spec into its `Program`.  TRIPLE, such as
``aarch64-linux-gnu``, is a machine on which the library runs without TVM (`ahead`); else it is for
this one.

Runs in a process of its own, because the compiler library is far too large for a process that
promises a memory budget.  It forks one for each core to make several libraries.  Writes one JSON
object per line to stdout: ``{"output", "share"}`` while it works.  Exit status `NO_TOOL` and
``{"missing": "..."}``: a compiler that the program needs is not installed."""

import ctypes
import importlib
import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tvm
from tvm import s_tir, tirx

from pi2.backends.compiler.linking import LinkError, link_objects
from pi2.backends.compiler.signature import NO_TOOL, Signature, find_signatures, write_signatures
from pi2.backends.compiler.vectors import Parameters, make_bindable_function

_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call, by architecture (asm/unistd.h of Linux)."""
C_LIBRARY = {"memcpy", "memmove", "memset", "preadv", "strlen", "syscall"}
"""Functions of the C library that functions for other machines may call."""


def aim(target: tvm.target.Target, triple: str) -> tvm.target.Target:
    level = int(target.attrs.get("opt-level", 3))
    options: dict[str, object] = {"kind": "llvm", "mtriple": triple, "opt-level": level}
    for key in ("mcpu", "mattr"):
        if target.attrs.get(key):
            value = target.attrs[key]
            options[key] = str(value) if key == "mcpu" else [str(item) for item in value]
    return tvm.target.Target(options)


def compile_messages(triple: str, folder: Path) -> Path:
    """Write the object file of ``messages.ll`` into ``folder``."""
    code = Path(__file__).with_name("messages.ll").read_text()
    return compile_text(code, triple, folder / "messages.o")


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


Report = Callable[[str, float], None]
"""Takes the name of a finished part, and the finished share of the work."""


class Processor(Protocol):
    """What LLVM must know of a processor."""

    @property
    def mcpu(self) -> str | None:
        """A processor by LLVM's name; None for the least that its architecture has."""

    @property
    def mattr(self) -> tuple[str, ...]:
        """Further instructions that it has, such as ``+dotprod``."""


def make_target(
    processor: Processor | None = None, triple: str | None = None, level: int = 3
) -> tvm.target.Target:
    """Return the compiler's target for a processor, by default for the least one of this machine's
    architecture; ``triple`` for another machine than this; ``level``: how much LLVM optimises."""
    options: dict[str, object] = {"kind": "llvm", "opt-level": level}
    if processor is not None and processor.mcpu is not None:
        options["mcpu"] = processor.mcpu
    if processor is not None and processor.mattr:
        options["mattr"] = list(processor.mattr)
    if triple is not None:
        options["mtriple"] = triple
    return tvm.target.Target(options)


_END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG (sys/prctl.h of Linux)."""


class Program(Protocol):
    """The functions of a library."""

    @property
    def target(self) -> tvm.target.Target:
        """The machine that they run on."""

    def list_functions(self) -> dict[str, Callable[[Parameters], None]]:
        """Return what emits each function, by name."""


@runtime_checkable
class OwnProgram(Protocol):
    """Functions of a library that tvm_ffi does not call: they have no signatures."""

    @property
    def target(self) -> tvm.target.Target:
        """The machine that they run on."""

    def write_objects(self, folder: Path, target: tvm.target.Target, report: Report) -> list[Path]:
        """Write object files for ``target``; ``report`` as for `compile_library`."""


@runtime_checkable
class FileProgram(Protocol):
    """A program for another unit than the processor, which writes its file itself."""

    def write_file(self, output: Path, report: Report) -> None:
        """Compile; raises `MissingTool`.  ``report`` as for `compile_library`."""


class MissingTool(Exception):
    """A compiler is not installed; the text says which and how to get it."""


def lower(module: tvm.IRModule, target: tvm.target.Target, *, packed: bool = True) -> tvm.IRModule:
    """Lower functions for the code generator; ``packed``: as tvm_ffi calls them. They are explicit
    loops: default passes find nothing, and FlattenBuffer turns vector loads into gathers that take
    LLVM seconds to undo."""
    calls = [
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
    ]
    passes = [
        tirx.transform.BindTarget(target.with_host(target)),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LowerOpaqueBlock(),
        *(calls if packed else []),
        tirx.transform.LowerTVMBuiltin(),
        tirx.transform.LowerIntrin(),
    ]
    return tvm.ir.transform.Sequential(passes)(module)


def generate(module: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Return machine code for functions that tvm_ffi calls."""
    return tvm.get_global_func("target.build.llvm")(lower(module, target), target)


def generate_plain(module: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Return machine code for functions with C's calling convention."""
    lowered = lower(module, target, packed=False)
    return tvm.get_global_func("target.build.llvm")(lowered, target)


def compile_library(
    program: Program | OwnProgram, output: Path, report: Report, triple: str | None = None
) -> None:
    """Write a program's shared library and signatures to ``output``; ``triple``: for another
    machine, without TVM."""
    target = program.target
    if triple is not None:
        target = aim(target, triple)
    signatures: dict[str, Signature] = {}
    with tempfile.TemporaryDirectory() as folder:
        files: list[Path] = []
        functions = {} if isinstance(program, OwnProgram) else program.list_functions()
        if isinstance(program, OwnProgram):
            files += program.write_objects(Path(folder), target, report)
        for name, emit in functions.items():
            files.append(Path(folder) / f"{name}.o")
            signatures[name] = _compile_function(name, emit, target, files[-1])
            report(f"compiled {name}", len(files) / (len(functions) + 1))
        if triple is not None:
            files.append(compile_messages(triple, Path(folder)))
        is_android = triple is not None and triple.endswith("android")
        wanted = link_objects(files, output, needed="libc.so" if is_android else None)
        # What a phone's C library may lack is found here, not on the phone.
        if is_android and not C_LIBRARY.issuperset(wanted):
            raise LinkError(f"no library has {sorted({*wanted} - C_LIBRARY)}")
    if signatures:
        find_signatures(output).write_text(write_signatures(signatures))
    report("linked", 1.0)


def _compile_function(
    name: str, emit: Callable[[Parameters], None], target: tvm.target.Target, output: Path
) -> Signature:
    function, signature = make_bindable_function(name, emit)
    code = generate(tvm.IRModule({name: function}), target)
    # LLVM takes the most memory below.  What is freed goes to it: glibc would keep the holes.
    del function
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    code.write_to_file(str(output), "o")
    return signature


def main(arguments: list[str]) -> int:
    """Compile and link; see the module's docstring."""
    module = importlib.import_module(arguments[0])
    pairs = list(zip(arguments[1::2], arguments[2::2], strict=False))
    triple = arguments[-1] if len(arguments) % 2 == 0 else None
    make = partial(_make_library, module, triple=triple)
    workers = min(len(pairs), os.cpu_count() or 1)
    if workers == 1:
        try:
            for pair in pairs:
                make(*pair)
        except MissingTool as error:
            _tell({"missing": str(error)})
            return NO_TOOL
        return 0
    # Each takes the number of the next library, a byte, as soon as it has made one.
    source, sink = os.pipe()
    os.write(sink, bytes(range(len(pairs))))
    os.close(sink)
    children = [_start_worker(pairs, source, make) for _ in range(workers)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if min(ends) < 0:
        # The one that asked is told of the signal: a lack of memory ends processes so.
        os.kill(os.getpid(), -min(ends))
    return max(ends)


def _start_worker(
    pairs: Sequence[tuple[str, str]], source: int, make: Callable[[str, str], None]
) -> int:
    """Fork a process that makes libraries whose numbers come from ``source``; return its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if (control := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
            control(_END_WITH_PARENT, signal.SIGKILL)
        while taken := os.read(source, 1):
            make(*pairs[taken[0]])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # What the parent has begun is not this process's to end.
        os._exit(status)


def _tell(message: Mapping[str, object]) -> None:
    # Several processes share the pipe: each line is one write.
    os.write(1, f"{json.dumps(message)}\n".encode())


def _make_library(module: Any, spec_path: str, output: str, *, triple: str | None) -> None:
    def report(label: str, share: float) -> None:
        _tell({"output": output, "share": share})

    program: Program | OwnProgram | FileProgram = module.read_program(Path(spec_path).read_text())
    if isinstance(program, FileProgram):
        program.write_file(Path(output), report)
    else:
        compile_library(program, Path(output), report, triple)
