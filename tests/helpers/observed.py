"""Calls of compiled code that the cpu backend makes."""

from collections import Counter
from collections.abc import Callable

from pi2.backends.cpu.executor import CpuExecutor
from pi2.backends.executor import Executor


def count_calls(executor: Executor, compute: Callable[[], object]) -> Counter[str]:
    """Calls while ``compute`` runs: of neurons' functions by name, and of the ``program``."""
    assert isinstance(executor, CpuExecutor)
    found: Counter[str] = Counter()
    program = executor.program
    run = program.run

    def count(begin: int, end: int) -> None:
        found["program"] += 1
        run(begin, end)

    program.run = count
    executor._library.observe(lambda name, *_: found.update([name]))
    try:
        compute()
    finally:
        executor._library.observe(None)
        program.run = run
    return found
