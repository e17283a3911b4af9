"""Splits for several sequences come in the order of their numbers, and are reached.

Why: an entry of ``layers.batches`` counts from its ``sequences`` up to the next entry's; one that
is out of order, or beyond ``decode.batch``, would never be used.

Example: ``batches = [{ sequences = 4, … }, { sequences = 2, … }]``, or ``sequences = 4`` with
``decode.batch = 2``.

Fix: sort the entries, and raise ``decode.batch`` or take out what is beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.plan_units import BatchSplit
from pi2.plan.toml.paths import KeyPath

CODE = "P266"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look at the numbers of every table."""
    layers, batch = facts.plan.layers, facts.plan.decode.step_tokens
    yield from _check_table(layers.batches, ("layers", "batches"), batch)
    for number, override in enumerate(layers.overrides):
        path: KeyPath = ("layers", "overrides", number, "batches")
        yield from _check_table(override.batches or (), path, batch)


def _check_table(table: Sequence[BatchSplit], path: KeyPath, batch: int) -> Iterator[Finding]:
    last = 1
    for number, entry in enumerate(table):
        place: KeyPath = (*path, number, "sequences")
        if entry.sequences <= last and number:
            yield Finding(
                path=place,
                message=f"{entry.sequences} sequences come after {last}",
                help="write the entries in the order of their sequences, each number once",
            )
        elif entry.sequences > batch:
            yield Finding(
                path=place,
                message=f"no step has {entry.sequences} sequences: decode.batch is {batch}",
                help=f"raise decode.batch to {entry.sequences}, or take the entry out",
                origins=(
                    Origin(document="plan", path=("decode", "batch"), text=f"batch = {batch}"),
                ),
            )
        last = entry.sequences
