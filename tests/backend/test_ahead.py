"""Libraries that are compiled ahead of time run without TVM, on threads of programs."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from pi2.backends.blocks.contract import STEPS, BlockSpec
from pi2.backends.blocks.interpreter import Workers
from pi2.backends.compiler import runtime
from pi2.backends.compiler.cache import load_or_compile
from pi2.backends.compiler.runtime import Library
from pi2.phone.replacements.functions import CompiledFunctions
from pi2.progress import ignore_progress
from tests.helpers.kernels import allocate

ROWS = 37


class Program:
    """A parallel loop, and one that is not."""

    @property
    def target(self) -> Any:
        from pi2.backends.compiler.compile import make_target

        return make_target()

    def list_functions(self) -> dict[str, Callable[[Any], None]]:
        from tvm.tirx.script import builder as T

        from pi2.backends.compiler import vectors as v

        def add(parallel: bool, take: Any) -> None:
            target = take.take_array("target", "float32", ROWS)
            source = take.take_given_array("source", "float32")
            factor = take.take_number("factor", "float32")
            with T.parallel(ROWS) if parallel else T.serial(ROWS) as row:
                v.store(target, row, target[row] + source[row] * factor, 1)

        return {"add_parallel": partial(add, True), "add_serial": partial(add, False)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("is compiled for x86-64")
    from pi2.backends.compiler.compile import compile_library

    path = tmp_path_factory.mktemp("ahead") / "library.so"
    compile_library(Program(), path, lambda label, share: None, "x86_64-linux-gnu")
    return path


@pytest.fixture
def library(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Library]]:
    """Loads copies of the library, with so many threads each."""
    monkeypatch.setattr(runtime, "CompiledFunctions", CompiledFunctions)
    steps = BlockSpec(library=STEPS, architecture="x86-64", features=())
    made: list[Workers] = []

    def load(threads: int) -> Library:
        made.append(Workers(load_or_compile(steps, ignore_progress), threads))
        return Library(compiled, launcher=made[-1].find_launcher())

    yield load
    for own in made:
        own.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parallel_loops_do_every_task_once(threads: int, library: Callable[[int], Library]) -> None:
    loaded = library(threads)
    target, source = allocate("float32", ROWS), np.arange(ROWS, dtype=np.float32)
    views = {"target": loaded.wrap(target)}
    for name in ("add_parallel", "add_serial"):
        target[:] = 0
        call = loaded.bind(name, "source factor", views)
        for _ in range(2000):
            call(source, 0.5)
        np.testing.assert_array_equal(target, source * 1000)
    loaded.close()


def test_a_call_from_another_thread_meanwhile_is_computed_alone(
    library: Callable[[int], Library],
) -> None:
    loaded = library(3)
    targets = [allocate("float32", ROWS), allocate("float32", ROWS)]
    source = np.ones(ROWS, np.float32)
    calls = [
        loaded.bind("add_parallel", "source factor", {"target": loaded.wrap(target)})
        for target in targets
    ]

    def repeat(call: Callable[..., object]) -> None:
        for _ in range(2000):
            call(source, 1.0)

    threads = [Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for target in targets:
        np.testing.assert_array_equal(target, 2000)
    loaded.close()


def test_what_a_function_refuses_is_said(library: Callable[[int], Library]) -> None:
    loaded = library(1)
    wrong = np.zeros(ROWS, np.float64)
    tensor = loaded._functions.make_tensor(wrong)
    given = loaded.signatures["add_serial"].given
    call, before = loaded._functions.bind("add_serial", [tensor], given)
    with pytest.raises(RuntimeError, match=r"add_serial: (?s:.*)Mismatched"):
        call(*before, np.ones(ROWS, np.float32), 1.0)
