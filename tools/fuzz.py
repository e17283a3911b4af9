"""Give pi2 what strangers might: spoilt documents, checkpoints, tokenizers, templates and stores.

    python tools/fuzz.py --cases 1000
    python tools/fuzz.py --target gguf --target config --cases 50000 --seed 7 --keep failures

Each case must end with a finding or a right result: other exceptions, warnings of numpy, processes
that die and wrong tokens are failures.  They are printed, and written to a folder, from which they
go into tests/corpus.  Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from fuzzing.targets import Target, make_targets

BATCH = 200
"""Cases of a process, which may die."""
MEMORY_GIB = 6
CASE_S = 60
"""Longer than anything takes: a case that is not over by then hangs."""


def main(arguments: list[str]) -> int:
    """Fuzz; see the module's docstring."""
    options = read_options(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PI2_CACHE_DIR"] = os.environ.get("PI2_FUZZ_CACHE", f"{folder}/cache")
        names = options.target or list(make_targets(Path(folder)))
        failed = 0
        for name in names:
            failed += fuzz_target(name, Path(folder), options)
    return 1 if failed else 0


def fuzz_target(name: str, folder: Path, options: argparse.Namespace) -> int:
    """Run all cases of a target; returns how many failed."""
    outcomes: Counter[str] = Counter()
    failures: dict[str, tuple[int, str]] = {}
    start = time.monotonic()
    first, count = options.seed * 10**9, 0
    while count < options.cases:
        size = min(BATCH, options.cases - count)
        for seed, outcome, problem in run_batch(name, folder, first + count, size):
            count += 1
            outcomes[outcome] += 1
            if problem and problem not in failures:
                failures[problem] = (seed, outcome)
                print(f"{name} {seed}: {problem}", flush=True)
                keep_case(name, folder, seed, options.keep)
    took = time.monotonic() - start
    parts = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
    print(f"{name}: {count} cases in {took:.0f} s: {parts}; {len(failures)} kinds of failures")
    return len(failures)


def run_batch(name: str, folder: Path, first: int, size: int) -> Iterator[tuple[int, str, str]]:
    """Seeds, outcomes and problems ("" without one) of cases; a process that dies is a problem of
    its last case, and the others are run by the next one."""
    seed, end = first, first + size
    while seed < end:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.Process(target=work, args=(name, folder, seed, end, there))
        process.start()
        there.close()
        while seed < end:
            if not here.poll(CASE_S) and not here.poll(CASE_S / 10):  # the machine may have slept
                break
            try:
                outcome, problem = here.recv()
            except EOFError:
                break
            yield seed, outcome, problem
            seed += 1
        if seed < end:
            process.kill()
            process.join()
            yield seed, "died", f"the process died or hung (exit status {process.exitcode})"
            seed += 1
        process.join()
        here.close()


def work(name: str, folder: Path, first: int, end: int, pipe: Connection) -> None:
    """Be such a process."""
    size = MEMORY_GIB << 30
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    target = make_targets(folder)[name]
    for seed in range(first, end):
        pipe.send(judge(target, seed))
    pipe.close()


def judge(target: Target, seed: int) -> tuple[str, str]:
    """What became of a case, and what is wrong with that, "" if nothing is."""
    case = b""
    try:
        case = target.make(Random(seed))
        return target.run(case), ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        places = traceback.extract_tb(error.__traceback__)
        place = places[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return "FAILED", f"{type(error).__name__} at {where}: {str(error)[:200]}"


def keep_case(name: str, folder: Path, seed: int, output: Path | None) -> None:
    """Write a case that has failed to ``output``."""
    if output is None:
        return
    (output / name).mkdir(parents=True, exist_ok=True)
    case = make_targets(folder)[name].make(Random(seed))
    (output / name / f"{seed}.case").write_bytes(case)


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", action="append", help="of what; all by default")
    parser.add_argument("--cases", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=1, help="start of the random numbers")
    parser.add_argument("--keep", type=Path, help="folder for cases that fail")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
