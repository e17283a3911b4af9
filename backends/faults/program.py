"""The handler of faults, as a library."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import tvm

from pi2.backends.compiler.compile import compile_text, make_target
from pi2.backends.faults.guard import RANGES


def read_program(text: str) -> Program:
    return Program()


class Program:
    """One function of LLVM's assembly."""

    @property
    def target(self) -> tvm.target.Target:
        return make_target()

    def write_objects(
        self, folder: Path, target: tvm.target.Target, report: Callable[[str, float], None]
    ) -> list[Path]:
        texts = [
            Path(__file__).with_name(f"{name}.ll").read_text() for name in ("faults", "shortage")
        ]
        code = "\n".join(texts).replace("RANGES", str(RANGES))
        triple = str(target.attrs.get("mtriple", f"{platform.machine()}-linux-gnu"))
        return [compile_text(code, triple, folder / "faults.o")]
