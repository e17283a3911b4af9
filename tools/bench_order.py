"""Count the reads of a plan by the order of its store's neurons.

    python tools/bench_order.py PLAN --text FILE STORE...

Decodes windows of the text token by token with every store, everything else being as the plan says,
and prints what a token misses: neurons, runs of neighbours, requests (a request may read across
small gaps, `io.merge_gap`), and the cache's hits.  Counts, not times: other work does not disturb
them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pi2
from pi2.memory import flash
from pi2.memory.requests import make_batch
from pi2.plan.overrides import parse_assignments
from pi2.statistics.texts import encode_windows, read_texts


@dataclass(slots=True)
class Counter:
    """Stands in for `pi2.memory.requests.make_batch` and counts what it plans."""

    neurons: int = 0
    runs: int = 0
    requests: int = 0

    def __call__(self, file: int, indices: Any, addresses: Any, **options: Any) -> Any:
        """Plan a batch of reads."""
        batch = make_batch(file, indices, addresses, **options)
        self.neurons += len(indices)
        self.runs += int((np.diff(indices) > 1).sum()) + bool(len(indices))
        self.requests += len(batch.firsts)
        return batch


def main() -> int:
    """Print a row for every store."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("stores", nargs="+", type=Path)
    parser.add_argument("--text", action="append", required=True, type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    arguments = parser.parse_args()
    texts = read_texts(arguments.text)
    settings = parse_assignments(arguments.settings)
    print("| store | missed neurons | runs | neurons a run | requests | KiB read | cache hits |")
    print("|---|---|---|---|---|---|---|")
    for store in arguments.stores:
        counter = Counter()
        vars(flash)["make_batch"] = counter
        with pi2.load(arguments.plan, set=settings | {"store": str(store.resolve())}) as model:
            windows = encode_windows(
                model,
                texts,
                context=arguments.context,
                stride=None,
                count=arguments.windows,
            )
            counter.neurons = counter.runs = counter.requests = 0
            before = model.stats
            tokens = 0
            for window in windows:
                tokens += len(window.tokens)
                for _ in model.iterate_logits(window.tokens, mode="decode"):
                    pass
            spent = model.stats - before
        vars(flash)["make_batch"] = make_batch
        print(
            f"| {store.name} | {counter.neurons / tokens:.1f} | {counter.runs / tokens:.1f} "
            f"| {counter.neurons / max(1, counter.runs):.2f} | {counter.requests / tokens:.1f} "
            f"| {spent.flash_read_bytes / tokens / 1024:.1f} | {spent.hit_rate:.1%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
