"""Compilers for tests, which make more than a hundred libraries of much fewer different functions.

They are processes that begin with TVM loaded, and they take the machine code of a function that
another library has from there.  Code is kept for one session, by its target and by the structural
hash of what it is generated from.  With `QUICK` in the environment LLVM optimises nothing: that
takes a fifth of the time, and what tests of the engine ask of kernels does not depend on it.
"""

import hashlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO
from unittest.mock import patch

import pytest

from pi2.backends.blocks.contract import BlockSpec
from pi2.backends.compiler.cache import start_compiler
from pi2.backends.gpu.kernels.specification import GpuSpec
from pi2.backends.hexagon.specification import HexagonSpec
from pi2.backends.kernels.spec import KernelSpec
from pi2.caches import find_cache_folder
from pi2.memory.host_loops import HostSpec

QUICK = "PI2_TESTS_COMPILE_QUICKLY"
PROGRAMS = [own.program for own in (BlockSpec, KernelSpec, HostSpec, GpuSpec, HexagonSpec)]
COMPILER = "pi2.backends.compiler.compile"
"""The module whose ``main`` a forked process calls."""


class LoadedCompiler:
    """A process forked from one that has TVM, with what the cache uses of a `subprocess.Popen`."""

    def __init__(
        self, arguments: Sequence[str], errors: TextIO, environment: Mapping[str, str],
        objects: Path,
    ) -> None:  # fmt: skip
        context = _start_server(environment["PYTHONPATH"])
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_compile, args=(list(arguments), dict(environment), writer, errors.name, objects)
        )
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stdout.close()
        self._process.join()

    def kill(self) -> None:
        self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


@cache
def _start_server(python_path: str) -> ForkServerContext:
    """Let the server, which starts with the first process, find pi2 where the tests have it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([COMPILER, *PROGRAMS])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = python_path
    try:
        context.Process(target=_do_nothing).start()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _do_nothing() -> None:
    pass


def _compile(
    arguments: list[str], environment: dict[str, str], output: Connection, errors: str,
    objects: Path,
) -> None:  # fmt: skip
    """The compiler's main function, except that it takes known functions' code from ``objects``."""
    compiler = importlib.import_module(COMPILER)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    with open(errors, "a") as stream:
        os.dup2(stream.fileno(), 2)
    blocks = importlib.import_module(BlockSpec.program)
    for user, name in ((compiler, "generate"), (blocks, "generate_plain")):
        patch.object(user, name, partial(_generate_once, objects, getattr(user, name))).start()
    status = compiler.main(arguments)
    sys.stdout.flush()
    os._exit(status)


class _Code:
    """Machine code in a file, with what `compile_library` uses of a module of TVM."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def write_to_file(self, name: str, kind: str) -> None:
        assert kind == "o"
        shutil.copyfile(self.file, name)


def _generate_once(
    objects: Path, generate: Callable[[Any, Any], Any], module: Any, target: Any
) -> _Code:
    from tvm.target import Target
    from tvm_ffi import structural_hash

    if QUICK in os.environ:
        target = Target({**target.export(), "opt-level": 0})
    numbers = [structural_hash(function) for function in module.functions.values()]
    content = f"{generate.__name__} {numbers} {target}"
    name = hashlib.sha256(content.encode()).hexdigest()
    file = objects / f"{name}.o"
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=objects) as folder:
            made = Path(folder) / file.name
            generate(module, target).write_to_file(str(made), "o")
            made.replace(file)
    return _Code(file)


def start_loaded_compiler(
    objects: Path, arguments: Sequence[str], errors: TextIO, environment: Mapping[str, str],
) -> object:  # fmt: skip
    """Start a compiler by forking, or as ever where a test gives it modules of its own;
    ``objects``: a folder for the code of functions."""
    if os.pathsep in environment["PYTHONPATH"]:
        return start_compiler(arguments, errors, environment)
    return LoadedCompiler(arguments, errors, environment, objects)


def make_common_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """A temporary folder that all workers of a session share."""
    folder = factory.getbasetemp()
    own = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    own.mkdir(exist_ok=True)
    return own


def share_kernels(cache: Path) -> Path:
    """Let the folder ``cache`` of a test have the kernels of all tests; returns it."""
    cache.mkdir(parents=True)
    kernels = find_cache_folder("kernels")
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    return cache


def use_own_data(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let pi2 find models and caches in ``folder``, where none are, but for kernels."""
    share_kernels(folder / "cache" / "pi2")
    patch.delenv("PI2_CACHE_DIR", raising=False)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("XDG_DATA_HOME", str(folder / "data"))
