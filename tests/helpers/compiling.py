"""Compiling processes that begin with TVM loaded: loading it takes as long as compiling a small
program, and tests compile a hundred."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Self, TextIO

from pi2.backends.compiler.cache import start_compiler
from pi2.backends.compiler.compilers import LIBRARIES


class LoadedCompiler:
    """A process that was forked from one that has TVM, with what `pi2.backends.compiler.cache` uses
    of a `subprocess.Popen`."""

    def __init__(
        self, arguments: Sequence[str], errors: TextIO, environment: Mapping[str, str]
    ) -> None:
        context = _start_server(environment["PYTHONPATH"])
        reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_compile, args=(list(arguments), dict(environment), writer, errors.name)
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
    context.set_forkserver_preload([LIBRARIES.module])
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
    arguments: list[str], environment: dict[str, str], output: Connection, errors: str
) -> None:
    """What the new process does: the same as ``python -m`` of the compiler's module."""
    from pi2.backends.compiler.compile import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    with open(errors, "a") as stream:
        os.dup2(stream.fileno(), 2)
    status = main(arguments)
    sys.stdout.flush()
    os._exit(status)


def start_loaded_compiler(
    module: str, arguments: Sequence[str], errors: TextIO, environment: Mapping[str, str]
) -> object:
    """Start the compiler of libraries by forking, and others as ever."""
    if module != LIBRARIES.module:
        return start_compiler(module, arguments, errors, environment)
    return LoadedCompiler(arguments, errors, environment)
