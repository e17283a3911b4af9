"""No two overrides set the same key of the same layer, and no selector names a layer twice.

Why: which of the two was meant would depend on the order of the tables, and a slip of the pen
would go unnoticed.

Example: overrides for ``"0-3"`` and ``"3-7"`` that both set ``hot``.

Fix: let the selectors be disjoint, or set each key in one of the overrides only.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.findings import Facts, Finding, Origin
from pi2.plan.selectors import parse_selector

CODE = "P213"
SEVERITY = "error"
NEEDS = ("plan",)

Range = tuple[int, int]


def check(facts: Facts) -> Iterator[Finding]:
    """Look for layers that are covered twice."""
    overrides = facts.plan.layers.overrides
    ranges = [parse_selector(override.select) for override in overrides]
    for number in range(len(overrides)):
        repeated = _find_repetition(ranges[number])
        if repeated is not None:
            yield Finding(
                path=("layers", "overrides", number, "select"),
                message=f"the selector names {_name_layers(repeated)} twice",
                help="name every layer once",
            )
        for key in ("split", "hot"):
            yield from _check_earlier(facts, ranges, number, key)


def _check_earlier(
    facts: Facts, ranges: list[list[Range]], number: int, key: str
) -> Iterator[Finding]:
    overrides = facts.plan.layers.overrides
    if getattr(overrides[number], key) is None:
        return
    for earlier in range(number):
        if getattr(overrides[earlier], key) is None:
            continue
        common = _intersect(ranges[earlier], ranges[number])
        if common is not None:
            yield Finding(
                path=("layers", "overrides", number, "select"),
                message=f"`{key}` of {_name_layers(common)} is set by two overrides",
                help="let the selectors be disjoint",
                origins=(
                    Origin(
                        document="plan",
                        path=("layers", "overrides", earlier, "select"),
                        text=f'first set for "{overrides[earlier].select.strip()}"',
                    ),
                ),
            )
            return


def _find_repetition(ranges: list[Range]) -> Range | None:
    for number, item in enumerate(ranges):
        common = _intersect(ranges[:number], [item])
        if common is not None:
            return common
    return None


def _intersect(left: list[Range], right: list[Range]) -> Range | None:
    """The first layers that both select."""
    for first, last in left:
        for other_first, other_last in right:
            low, high = max(first, other_first), min(last, other_last)
            if low <= high:
                return low, high
    return None


def _name_layers(layers: Range) -> str:
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first} to {last}"
