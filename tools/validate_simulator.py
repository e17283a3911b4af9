"""Compare the simulator with published figures, and write the tables of the documents.

    python tools/validate_simulator.py            # rewrite the tables of docs
    python tools/validate_simulator.py --check    # exit 1 if they are out of date
    python tools/validate_simulator.py --print    # print the comparison only
    python tools/validate_simulator.py --print --budget 8.5 --system PowerInfer-2
                                                  # TurboSparse-Mixtral-47B with 8.5 GB

The text around the tables is written by people; what stands between ``<!-- name -->`` and the next
``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paper.comparison import SHORT_TOKENS, Comparison, compare, predict, summarise
from paper.document import find_tables, make_tables, render_document
from paper.points import OP12, PI2, list_held_out, list_points, list_predictions
from paper.scenarios import MIXTRAL, SYSTEMS, Scenario
from pi2.costs.constants import Constants

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = (REPOSITORY / "docs/howto/simulate.md", REPOSITORY / "tools/results/simulator.md")


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
    tables = make_tables(rows, held_out, predictions, Constants())
    return update_documents(DOCUMENTS, tables, check=options.check)


def update_documents(
    documents: Sequence[Path], tables: Mapping[str, Iterable[str]], *, check: bool
) -> int:
    """Write the tables into the documents; with ``check`` only compare: 1 where one is old."""
    texts = {path: path.read_text("utf-8") for path in documents}
    missing = tables.keys() - {name for text in texts.values() for name in find_tables(text)}
    assert not missing, f"no document has a place for {', '.join(sorted(missing))}"
    outdated = 0
    for path, old in texts.items():
        new = render_document(old, tables)
        if check:
            print(f"{path.name}: {'current' if new == old else 'not current'}", file=sys.stderr)
            outdated |= new != old
        else:
            path.write_text(new, "utf-8")
    return int(outdated)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the simulator with published figures; write the documents' tables."
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
