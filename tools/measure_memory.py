"""Measure the peak memory of plans, each in a process of its own, beside what is predicted.

    python tools/measure_memory.py plans/demo.plan.toml my.plan.toml --tokens 64

Runs `pi2 run` with a prompt of a few lines.  The constants of pi2/plan/arithmetic/fitting.py come
from such runs: what was measured, less what was used of the segments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pi2.costs.cost import count_memory
from pi2.fitting.check import load_plan
from pi2.machine import list_allowed_cores

MIB = 1 << 20
LINES = "def run(self, value):\n    return value\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes that a plan's run had resident at most."""

    predicted_bytes: int
    measured_bytes: int
    tokens: int

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_bytes / self.measured_bytes - 1.0


def main() -> int:
    """Print a row for every plan."""
    parser = argparse.ArgumentParser(description="Measure plans' peak memory.")
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lines", type=int, default=10, help="of the prompt, in pairs")
    arguments = parser.parse_args()
    print("| plan | tokens | predicted MiB | measured MiB | error |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for plan in arguments.plans:
        peak = measure_peak(plan, arguments.sets, arguments.lines, arguments.tokens)
        name = " ".join([plan.name.removesuffix(".plan.toml"), *arguments.sets])
        print(
            f"| {name} | {peak.tokens} | {peak.predicted_bytes / MIB:.1f} "
            f"| {peak.measured_bytes / MIB:.1f} | {peak.error:+.1%} |",
            flush=True,
        )
    return 0


def measure_peak(plan: Path, sets: list[str], lines: int, tokens: int) -> Peak:
    """Run a plan, with as many threads as there are cores, and predict what it did."""
    sets = [f"threads.compute={len(list_allowed_cores())}", *sets]
    command = [sys.executable, "-m", "pi2", "run", str(plan), "--json", "--ignore-eos"]
    command += ["--prompt", LINES * lines, "--max-tokens", str(tokens)]
    command += [part for value in sets for part in ("--set", value)]
    done = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    overrides = dict(value.split("=", 1) for value in sets)
    used = done["prompt_tokens"] + len(done["token_ids"])
    return Peak(
        predicted_bytes=count_memory(load_plan(plan, overrides=parse_values(overrides)), used),
        measured_bytes=done["peak_rss_bytes"],
        tokens=used,
    )


def parse_values(overrides: dict[str, str]) -> dict[str, object]:
    """Values as TOML has them; what is no number is a text."""
    found: dict[str, object] = {}
    for key, value in overrides.items():
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
