"""Compile a library of graphs: ``python -m pi2.backends.hexagon.kernels.compile MODULE SPEC.json
OUTPUT``. ``OUT.elf`` runs in the emulator; ``OUT.o`` is for the vendor's linker
(`backends/hexagon/dsp`)."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pi2.backends.compiler.signature import find_signatures
from pi2.backends.hexagon.kernels.code import generate
from pi2.backends.hexagon.kernels.program import ENTRY, Program
from pi2.backends.hexagon.library import write_index
from pi2.backends.hexagon.linkers import LINKERS, find_linker


def write_objects(
    program: Program, folder: Path, report: Callable[[str, float], None]
) -> list[Path]:
    """Compile every function of ``program`` to a file in ``folder``; the worker comes last."""
    functions = list(program.list_functions())
    files = []
    for number, function in enumerate(functions):
        files.append(folder / f"{function.name}.o")
        generate(function.make(), program.target).write_to_file(str(files[-1]), "o")
        report(f"compiled {function.name}", (number + 1) / (len(functions) + 1))
    return files


def link(files: list[Path], output: Path) -> list[str]:
    """Make a program of all ``files``, or one object of all but the worker; return the fault."""
    linker = find_linker()
    if linker is None:
        return [f"{LINKERS[0]}: not installed"]
    options = ["-static", "--gc-sections", "-s", "-e", ENTRY]
    if output.suffix == ".o":
        options, files = ["-r"], files[:-1]
    done = subprocess.run(
        [linker, *options, "-o", str(output), *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if done.returncode == 0 else [f"{linker}: {done.stderr.strip()}"]


def main(arguments: list[str]) -> int:
    """Compile and link; see the module's docstring."""
    module, spec_path, output = arguments[0], Path(arguments[1]), Path(arguments[2])
    program: Program = importlib.import_module(module).read_program(spec_path.read_text())

    def report(label: str, share: float) -> None:
        print(json.dumps({"label": label, "share": share}), flush=True)

    report("loading the compiler", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        failures = link(write_objects(program, Path(folder), report), output)
    if failures:
        sys.stderr.writelines(failures)
        return 1
    find_signatures(output).write_text(write_index(program.spec))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # The compiler library's clean-up at exit takes time and serves nothing.
    os._exit(status)
