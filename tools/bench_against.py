"""Let llama.cpp do the same work as a plan, in turns with pi2, and print both.

    python tools/bench_against.py model-Q4_K_M.gguf
    python tools/bench_against.py PLAN --file FILE.gguf -p 128,512 -n 64

Needs llama-cpp-python.  llama.cpp runs mapped and, where the budget is larger than the file,
repacked: the better one counts.  Both read the plan's own GGUF file; a plan of a neuron store needs
--file, such as a file of random weights from tools/write_gguf.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from limited.llama_cpp import LlamaRecipe, check_installed
from limited.program import run_program
from pi2.cli.options import ChosenPlan, choose_plan
from pi2.diagnostics import UserError
from pi2.engine.accounts import TokenBytes
from pi2.measuring import report
from pi2.measuring.contestant import Recipe, RemoteContestant
from pi2.measuring.report import Row, Sample, Workload, list_workloads
from pi2.measuring.session import Course, Outcome, open_limit, open_plan, run_session
from pi2.progress import Progress, ProgressBar


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
    # Repacked weights are a copy: within a budget below the file they prove nothing.
    has_room = plan.resolved.plan.memory.budget > file.stat().st_size
    course = Course(
        workloads=list_workloads(given.prompt_tokens, given.max_tokens, given.depth, (None,)),
        repetitions=given.repetitions,
    )
    conditions = report.describe_conditions(None)
    with ProgressBar() as progress, ExitStack() as stack:
        own = stack.enter_context(open_plan(plan.fitted, None, progress))
        recipes = [
            LlamaRecipe(
                model=plan.resolved.model,
                context=plan.resolved.plan.kv.context,
                threads=own.description.threads,
                file=file,
                repack=repack,
                synthetic=given.file is not None,
            )
            for repack in ((False, True) if has_room else (False,))
        ]
        others, lost = start_others(recipes, progress)
        for other in others:
            stack.enter_context(other)
        limit = stack.enter_context(open_limit(own.description.threads))
        outcomes = keep_whole(run_session([own, *others], course, limit, progress))
    lost += [other.lost for other in others if other.lost is not None]
    write = {"md": report.write_markdown, "json": report.write_json, "csv": report.write_csv}
    print(write[given.format](conditions, outcomes))
    if given.format == "md":
        print("\n".join(("", *write_ratios([item.row for item in outcomes]))))
    if lost:
        raise lost[0]


class Other(RemoteContestant):
    """Another engine, which may end in the middle: `lost` says how."""

    lost: UserError | None = None

    def run(self, workload: Workload) -> Sample:
        """A repetition; one without end once the engine is lost."""
        try:
            if self.lost is None:
                return super().run(workload)
        except UserError as error:
            self.lost = error
        return Sample(tokens=workload.tokens, seconds=math.inf)

    def count_bytes(self, workload: Workload, active: float | None) -> TokenBytes | None:
        return None if self.lost else super().count_bytes(workload, active)

    def read_peak_rss_bytes(self) -> int:
        return 0 if self.lost else super().read_peak_rss_bytes()


def start_others(
    recipes: Sequence[Recipe], progress: Progress
) -> tuple[list[Other], list[UserError]]:
    """Engines that start, and why others do not."""
    found, lost = [], []
    for recipe in recipes:
        try:
            found.append(Other(recipe, progress, "the other engine"))
        except UserError as error:
            if error.diagnostics[0].code not in ("P640", "P652"):
                raise
            lost.append(error)
    return found, lost


def keep_whole(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """What was measured to the end."""
    return [item for item in outcomes if math.isfinite(sum(s.seconds for s in item.row.samples))]


def write_ratios(rows: Sequence[Row]) -> list[str]:
    """Ratios of pi2's medians to those of other engines."""
    return [
        f"- {own.workload.name}: {own.speed.median / row.speed.median:.2f} x "
        f"{row.description.engine} ({own.speed.median:.2f} against {row.speed.median:.2f} t/s, "
        f"medians of {own.speed.repetitions} repetitions in turns)"
        for own in rows
        for row in rows
        if own.description.digest is not None
        and row.description.digest is None
        and row.workload == own.workload
    ]


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
