"""The functions of a library."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tvm

from pi2.backends.blocks import attention, elements, panels, routing, rows
from pi2.backends.blocks.contract import ATTENTION, COMMON, STEPS, BlockSpec
from pi2.backends.blocks.tables import Table, make_tabled_function
from pi2.backends.blocks.unpacking import find_unpacking
from pi2.backends.compiler.compile import compile_text, generate_plain, make_target
from pi2.formats import find_format

_PAUSES = {
    "x86-64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def read_program(text: str) -> Program:
    """Return the program of a spec."""
    return Program(BlockSpec.from_json(text))


class Program:
    """Kernels that take a table of arguments."""

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec

    @property
    def target(self) -> tvm.target.Target:
        """The processor that they are for."""
        return make_target(self._spec.isa)

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
        """Return what emits each kernel, by name."""
        isa, library = self._spec.isa, self._spec.library
        if library == STEPS:
            return {}
        if library == ATTENTION:
            return {"attend": partial(attention.emit_attend, isa)}
        if library == COMMON:
            return {
                "normalize": elements.emit_normalize,
                "quantize_q8_k": partial(elements.emit_quantize, "q8_k"),
                "quantize_q8_0": partial(elements.emit_quantize, "q8_0"),
                "turn": elements.emit_turn,
                "keep": elements.emit_keep,
                "join": partial(attention.emit_join, isa),
                "attend_many": partial(attention.emit_attend_many, isa),
                "route": routing.emit_route,
                "group": routing.emit_group,
                "weigh": routing.emit_weigh,
                "gate": elements.emit_gate,
                "cap": elements.emit_cap,
            }
        unpacking = find_unpacking(find_format(library))
        many = partial(panels.emit_multiply_many, isa, unpacking)
        return {
            **({} if unpacking.floats is not None else {"multiply_many": many}),
            "multiply": partial(rows.emit_multiply, isa, unpacking),
            "multiply_few": partial(rows.emit_multiply_few, isa, unpacking),
            "take_rows": partial(rows.emit_take_rows, isa, unpacking),
        }

    def list_texts(self) -> dict[str, str]:
        """Return LLVM's assembly that is part of the library, by name."""
        if self._spec.library != STEPS:
            return {}
        code = Path(__file__).with_name("steps.ll").read_text()
        declaration, call = _PAUSES[self._spec.architecture]
        code = code.replace("PAUSE_DECLARATION", declaration).replace("PAUSE", call)
        return {"steps": code}
