"""Let llama.cpp do the same work as a plan, in turns with pi2, and print both.

    python tools/bench_against.py model-Q4_K_M.gguf
    python tools/bench_against.py PLAN --file FILE.gguf -p 128,512 -n 64

Needs llama-cpp-python.  llama.cpp runs mapped and, where the budget is larger than the file,
repacked: the better one counts.  Both read the plan's own GGUF file; a plan of a neuron store needs
--file, such as a file of random weights from tools/write_gguf.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from limited.llama_cpp import LlamaRecipe, check_installed
from limited.program import run_program
from pi2.cli.commands import ProgressBar
from pi2.cli.options import ChosenPlan, choose_plan
from pi2.diagnostics import UserError
from pi2.measuring import report
from pi2.measuring.contestant import Recipe
from pi2.measuring.samples import Description, list_workloads
from pi2.measuring.session import Course, measure_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path)
    parser.add_argument("--file", type=Path, help="another GGUF file for llama.cpp")
    parser.add_argument("-p", "--prompt-tokens", type=read_numbers, default=(128, 512))
    parser.add_argument("-n", "--max-tokens", type=read_numbers, default=(64,))
    parser.add_argument("-d", "--depth", type=read_numbers, default=(0,))
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--memory", help="another budget for the plan")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--format", choices=("md", "json", "csv"), default="md")
    given = parser.parse_args(arguments)
    return run_program(lambda: compare(given))


def read_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def compare(given: argparse.Namespace) -> None:
    """Print the table; a failure of llama.cpp is raised after that."""
    plan = choose_plan(given.plan, tuple(given.settings), given.memory)
    file = find_file(plan, given.file)
    check_installed()
    lost: list[UserError] = []

    def list_others(described: Description) -> list[Recipe]:
        # Repacked weights are a copy: within a budget below the file they prove nothing.
        has_room = plan.resolved.plan.memory.budget > file.stat().st_size
        return [
            LlamaRecipe(
                model=plan.resolved.model,
                context=plan.resolved.plan.kv.context,
                threads=described.threads,
                file=file,
                repack=repack,
                synthetic=given.file is not None,
            )
            for repack in ((False, True) if has_room else (False,))
        ]

    course = Course(
        workloads=list_workloads(given.prompt_tokens, given.max_tokens, given.depth, (None,)),
        repetitions=given.repetitions,
    )
    conditions = report.describe_conditions(None)
    with ProgressBar() as progress:
        outcomes = measure_plan(
            plan.fitted, course, others=list_others, progress=progress, note_lost=lost.append
        )
    write = {"md": report.write_markdown, "json": report.write_json, "csv": report.write_csv}
    print(write[given.format](conditions, outcomes))
    if lost:
        raise lost[0]


def find_file(plan: ChosenPlan, file: Path | None) -> Path:
    """The GGUF file that llama.cpp reads; exits with advice where there is none."""
    if file is not None:
        if not file.is_file():
            sys.exit(f"--file {file}: no file has this name")
        return file
    if plan.resolved.file is None:
        sys.exit(
            f"{plan.given} runs a neuron store, which llama.cpp cannot read: name a GGUF file of "
            "the same shape, --file FILE.gguf (tools/write_gguf.py writes one of random weights)"
        )
    return plan.resolved.file.path


if __name__ == "__main__":
    sys.exit(main())
