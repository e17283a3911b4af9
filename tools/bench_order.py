"""Count the reads of a plan by the order of its store's neurons.

    python tools/bench_order.py PLAN --text FILE STORE...
    python tools/bench_order.py PLAN STORE...

Decodes windows of the text, or else tokens in the order of the vocabulary, with every store, token
by token, everything else being as the plan says, and prints what a token misses: neurons, runs of
neighbours, requests (a request may read across small gaps, `io.merge_gap`), and the cache's hits.
Counts, not times: other work does not disturb them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pi2
from pi2.measuring.report import TokenSource
from pi2.measuring.texts import Passages, read_texts
from pi2.memory import flash
from pi2.memory.io_engine import make_batch
from pi2.plan.toml.source import parse_assignments


@dataclass(slots=True)
class Counter:
    """Stands in for `pi2.memory.io_engine.make_batch` and counts what it plans."""

    neurons: int = 0
    runs: int = 0
    requests: int = 0

    def __call__(self, file: int, indices: Any, slots: Any, **options: Any) -> Any:
        """Plan a batch of reads."""
        batch = make_batch(file, indices, slots, **options)
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
    parser.add_argument("--text", action="append", default=[], type=Path)
    parser.add_argument("--tokens", type=int, default=24, help="without a text, to count (24)")
    parser.add_argument("--warm", type=int, default=8, help="tokens before the counted ones (8)")
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
        with pi2.load(arguments.plan, set=settings | {"weights": str(store.resolve())}) as model:
            first, *windows = list_windows(model, texts, arguments)
            if first:
                for _ in model.iterate_logits(first, mode="decode"):
                    pass
            counter.neurons = counter.runs = counter.requests = 0
            before = model.stats
            tokens = sum(map(len, windows))
            for window in windows:
                for _ in model.iterate_logits(window, mode="decode"):
                    pass
            spent = model.stats - before
        vars(flash)["make_batch"] = make_batch
        print(
            f"| {store.name} | {counter.neurons / tokens:.1f} | {counter.runs / tokens:.1f} "
            f"| {counter.neurons / max(1, counter.runs):.2f} | {counter.requests / tokens:.1f} "
            f"| {spent.flash_read_bytes / tokens / 1024:.1f} | {spent.hit_rate:.1%} |"
        )
    return 0


def list_windows(
    model: pi2.Model, texts: Sequence[str], arguments: argparse.Namespace
) -> Iterator[list[int]]:
    """Tokens to begin with, then those to count."""
    document = model.plan.model
    if texts:
        yield []
        for window in Passages(texts, arguments.context, arguments.windows).cut(model):
            yield list(window.tokens)
        return
    source = TokenSource.walk_vocabulary(document.shape.vocab, document.tokenizer.eos)
    yield source.take(arguments.warm).tolist()
    yield source.take(arguments.tokens).tolist()


if __name__ == "__main__":
    sys.exit(main())
