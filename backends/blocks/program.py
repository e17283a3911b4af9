"""The functions of a library."""

from __future__ import annotations

import platform
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import tvm

from pi2.backends.blocks import (
    attention,
    elements,
    index,
    kept,
    numbers,
    panels,
    routing,
    rows,
    states,
    stream_kernels,
    tiles,
)
from pi2.backends.blocks.contract import (
    ATTENTION,
    COMMON,
    INDEX,
    LIBRARIES,
    STEPS,
    BlockSpec,
    read_attention,
)
from pi2.backends.blocks.machine import Table, make_tabled_function
from pi2.backends.blocks.unpacking import find_unpacking
from pi2.backends.compiler.compile import compile_text, generate_plain, make_target
from pi2.formats import find_format

_PAUSES = {
    "x86-64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


MODULES = (
    *(attention, elements, index, kept, numbers, panels, routing, rows, states, stream_kernels),
    tiles,
)


def _find_emitter(name: str, given: dict[str, Any]) -> Callable[[Table], None]:
    emit = next(found for module in MODULES if (found := getattr(module, f"emit_{name}", None)))
    own = {key: given[key] for key in signature(emit).parameters if key in given}
    return lambda table: emit(**own, table=table)


def read_program(text: str) -> Program:
    return Program(BlockSpec.from_json(text))


class Program:
    """Kernels that take a table of arguments."""

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec

    @property
    def target(self) -> tvm.target.Target:
        # LLVM's further levels take it as long again, and kernels of no format gain nothing.
        return make_target(self._spec.isa, level=1 if self._spec.library == COMMON else 3)

    def write_objects(
        self, folder: Path, target: tvm.target.Target, report: Callable[[str, float], None]
    ) -> list[Path]:
        kernels, texts = self.list_kernels(), self.list_texts()
        files = []
        if kernels:
            functions = {name: make_tabled_function(name, emit) for name, emit in kernels.items()}
            files.append(folder / "kernels.o")
            module = generate_plain(tvm.IRModule(functions), target)
            module.write_to_file(str(files[-1]), "o")
        triple = str(target.attrs.get("mtriple", f"{platform.machine()}-linux-gnu"))
        for name, text in texts.items():
            files.append(compile_text(text, triple, folder / f"{name}.o"))
        report(f"compiled {self._spec.library}", 0.9)
        return files

    def list_kernels(self) -> dict[str, Callable[[Table], None]]:
        """Return what emits each kernel, by name: functions ``emit_NAME`` of `MODULES`."""
        library = self._spec.library
        given: dict[str, Any] = {"isa": self._spec.isa, "kind": "fp16"}
        family = library.partition("_")[0]
        if family in (ATTENTION, INDEX):
            given["kind"], given["counts"] = read_attention(library)
        elif library not in LIBRARIES:
            given["unpacking"] = own = find_unpacking(find_format(library))
            family = "formats" if own.floats is not None else "packed_formats"
        return {name: _find_emitter(name, given) for name in LIBRARIES[family]}

    def list_texts(self) -> dict[str, str]:
        """Return LLVM's assembly that is part of the library, by name."""
        if self._spec.library != STEPS:
            return {}
        code = Path(__file__).with_name("steps.ll").read_text()
        declaration, call = _PAUSES[self._spec.architecture]
        code = code.replace("PAUSE_DECLARATION", declaration).replace("PAUSE", call)
        return {"steps": code}
