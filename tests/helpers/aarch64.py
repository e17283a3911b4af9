"""Kernels for another processor: their assembly, and what they compute under qemu-aarch64."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pi2.backends.kernels.spec import KernelSpec
from tests.helpers.kernels import make_spec

if TYPE_CHECKING:
    from pi2.backends.compiler.compile import Processor

ARM_FEATURES = {
    "neon": ("neon",),
    "dotprod": ("dotprod", "neon"),
    "dotprod, fp16": ("dotprod", "fp16", "neon"),
}
"""Features of the device documents' cores, oldest first."""
COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
HARNESS = Path(__file__).parent.parent / "backend" / "aarch64_harness.c"
_TYPES = {"i": 0, "u": 1, "f": 2}

needs_emulator = pytest.mark.skipif(
    COMPILER is None or EMULATOR is None, reason="needs qemu-user and gcc-aarch64-linux-gnu"
)


def make_arm_spec(features: tuple[str, ...], **changes: Any) -> KernelSpec:
    return dataclasses.replace(make_spec(**changes), architecture="aarch64", features=features)


def generate(
    processor: Processor, architecture: str, name: str, emit: Callable[[Any], None]
) -> Any:
    import tvm

    from pi2.backends.compiler.compile import generate, make_target
    from pi2.backends.compiler.vectors import make_function

    triple = "aarch64-linux-gnu" if architecture == "aarch64" else "x86_64-linux-gnu"
    return generate(tvm.IRModule({name: make_function(name, emit)}), make_target(processor, triple))


def generate_function(spec: KernelSpec, name: str) -> Any:
    from pi2.backends.kernels.program import Program

    program = Program(spec)
    return generate(program.isa, spec.architecture, name, program.list_functions()[name])


def generate_assembly(spec: KernelSpec, name: str) -> str:
    return str(generate_function(spec, name).inspect_source("asm"))


def emulate(spec: KernelSpec, name: str, folder: Path) -> Emulated:
    return Emulated(generate_function(spec, name), name, folder)


class Emulated:
    """A kernel for aarch64, run under qemu."""

    def __init__(self, module: Any, name: str, folder: Path) -> None:
        code = folder / f"{name}.o"
        module.write_to_file(str(code), "o")
        self._program = folder / name
        self._name = name
        assert COMPILER is not None
        subprocess.run(
            [
                *(COMPILER, "-O1", "-static", f"-DKERNEL=__tvm_ffi_{name}"),
                *(str(HARNESS), str(code), "-o", str(self._program), "-lm"),
            ],
            check=True,
        )

    def __call__(self, *arguments: Any) -> None:
        assert EMULATOR is not None
        done = subprocess.run(
            [EMULATOR, "-cpu", "max", str(self._program)],
            input=_encode(arguments),
            capture_output=True,
            check=True,
        )
        assert struct.unpack_from("<i", done.stdout)[0] == 0, done.stderr.decode()
        place = 4
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                data = np.frombuffer(done.stdout, argument.dtype, argument.size, place)
                if argument.flags.writeable:
                    argument[...] = data.reshape(argument.shape)
                place += argument.nbytes


def _encode(arguments: Sequence[Any]) -> bytes:
    message = [struct.pack("<i", len(arguments))]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            kind = argument.dtype
            header = (2, _TYPES[kind.kind], kind.itemsize * 8, argument.size)
            message += [struct.pack("<iiiq", *header), argument.tobytes()]
        elif isinstance(argument, float):
            message.append(struct.pack("<id", 1, argument))
        else:
            message.append(struct.pack("<iq", 0, argument))
    return b"".join(message)
