"""Measure the demo model from the shipped store: the figures of docs/reference/demo-model.md.

    python tools/evaluate_demo.py             # print the figures
    python tools/evaluate_demo.py --write     # put them into docs/reference/demo-model.md
    python tools/evaluate_demo.py --check     # exit 1 if the card says something else

They are what `pi2 evaluate` prints for the held-out text in the store.  All are deterministic on
one machine; other processors may differ in the last digit shown.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from pi2.measuring.evaluation import evaluate_plan, write_markdown
from pi2.measuring.texts import Passages, read_texts

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "plans" / "demo.plan.toml"
HELDOUT = ROOT / "plans" / "stores" / "pi2-demo" / "heldout.txt"
CARD = ROOT / "docs" / "reference" / "demo-model.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
CONTEXT, WINDOWS = 256, 8


def main() -> int:
    """Print, write or check the figures."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    evaluation = evaluate_plan(
        PLAN,
        Passages(read_texts([HELDOUT]), context=CONTEXT, count=WINDOWS),
        against=["reference", "gate"],
    )
    # The plan's digest changes with every new key of the plan language, the figures do not.
    figures = re.sub(r", plan \w+", "", write_markdown(evaluation))
    print(figures)
    if not (arguments.write or arguments.check):
        return 0
    card = CARD.read_text("utf-8")
    block = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
    expected = block.sub(lambda _: f"{BEGIN}\n{figures}\n{END}", card)
    if arguments.check:
        if expected != card:
            print("the model card says something else", file=sys.stderr)
        return int(expected != card)
    CARD.write_text(expected, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
