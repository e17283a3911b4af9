"""Compare the simulator with published figures, and write the tables of docs/simulator.md.

    python tools/validate_simulator.py            # rewrite the tables of docs/simulator.md
    python tools/validate_simulator.py --check    # exit 1 if they are out of date
    python tools/validate_simulator.py --print    # print the comparison only
    python tools/validate_simulator.py --print --budget 8.5 --system LLMFlash
                                                  # TurboSparse-Mixtral-47B with 8.5 GB

The text around the tables is written by people; what stands between ``<!-- name -->`` and the next
``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paper.comparison import SHORT_TOKENS, Comparison, compare, predict, summarise
from paper.document import make_tables, render_document
from paper.points import OP12, PI2, list_held_out, list_points, list_predictions
from paper.scenarios import MIXTRAL, SYSTEMS, Scenario
from pi2.simulate.constants import Constants

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "simulator.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    options = _parse(arguments)
    tokens = SHORT_TOKENS if options.short else 1024
    if options.budget:
        scenarios = [
            Scenario(system=options.system, device=options.device, model=MIXTRAL, memory=size)
            for size in options.budget
        ]
        for item in predict(scenarios, tokens=tokens):
            print(f"{item.scenario.memory:g} GB: {item.tokens_s:.2f} tokens/s (simulated)")
        return 0
    rows = compare(list_points(), tokens=tokens)
    held_out = compare(list_held_out(), tokens=tokens)
    if options.print:
        print_table(rows)
        print("held out:")
        print_table(held_out)
        return 0
    predictions = predict(list_predictions(), tokens=tokens)
    old = DOCUMENT.read_text("utf-8")
    new = render_document(old, make_tables(rows, held_out, predictions, Constants()))
    if options.check:
        print(f"{DOCUMENT.name}: {'current' if new == old else 'not current'}", file=sys.stderr)
        return int(new != old)
    DOCUMENT.write_text(new, "utf-8")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the simulator with published figures; write docs/simulator.md."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if old")
    parser.add_argument("--print", action="store_true", help="print the comparison only")
    parser.add_argument("--short", action="store_true", help=f"{SHORT_TOKENS} tokens per run")
    parser.add_argument(
        "--budget", type=float, nargs="+", metavar="GB", help="simulate the 47B with these budgets"
    )
    parser.add_argument("--system", choices=sorted(SYSTEMS), default=PI2)
    parser.add_argument("--device", default=OP12)
    return parser.parse_args(arguments)


def print_table(rows: list[Comparison]) -> None:
    """The comparison as text."""
    for row in rows:
        point, scenario = row.point, row.point.scenario
        where = f"{scenario.system:24.24} {scenario.model:24.24} {scenario.memory!s:>5}"
        simulated = "-" if row.simulated is None else f"{row.simulated:9.3f}"
        error = "" if row.error is None else f"{row.error:+7.1%}"
        mark = "" if point.scored else "  (not scored)"
        device = scenario.device.removeprefix("oneplus-")
        print(
            f"{device:6} {where} {point.prompt:4} {point.measure:16} "
            f"{point.published:9.3f} {simulated:>9} {error}{mark}"
        )
    summary = summarise(rows)
    assert summary is not None
    print(f"{summary.count} points: mean {summary.mean:.1%}, worst {summary.worst:.1%}")


if __name__ == "__main__":
    sys.exit(main())
