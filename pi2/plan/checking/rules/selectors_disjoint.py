"""Every override has an effect, and no selector names a layer twice.

Why: of two overrides that set the same key of a layer, the later one counts. An override whose
layers are all set again by later ones does nothing, which is a mistake.

Example: an override of ``hot`` for ``"0-3"``, followed by one for ``"0-7"``.

Fix: put the general one first, or remove the one that does nothing; name every layer of a selector
once.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.selectors import parse_selector

CODE = "P213"
SEVERITY = "warning"
NEEDS = ("plan",)

Range = tuple[int, int]


def check(facts: Facts) -> Iterator[Finding]:
    """Look for overrides that later ones cover, and for layers that are named twice."""
    overrides = facts.plan.layers.overrides
    ranges = [parse_selector(override.select) for override in overrides]
    for number, override in enumerate(overrides):
        path = ("layers", "overrides", number, "select")
        repeated = _find_repetition(ranges[number])
        if repeated is not None:
            yield Finding(
                path=path,
                message=f"the selector names {_name_layers(repeated)} twice",
                help="name every layer once",
            )
        keys = [key for key in ("split", "hot") if getattr(override, key) is not None]
        coverers = [_find_coverers(facts, ranges, number, key) for key in keys]
        if coverers and all(coverers):
            last = max(item for found in coverers for item in found)
            names = " and ".join(f"`{key}`" for key in keys)
            yield Finding(
                path=path,
                message=f"this override does nothing: later ones set {names} of all its layers",
                help="put it after them, or remove it",
                origins=(
                    Origin(
                        document="plan",
                        path=("layers", "overrides", last, "select"),
                        text=f'set again for "{overrides[last].select.strip()}"',
                    ),
                ),
            )


def _find_coverers(facts: Facts, ranges: list[list[Range]], number: int, key: str) -> list[int]:
    """Later overrides that together set ``key`` of all the layers; empty if some are left."""
    left = [item for item in ranges[number] if item[0] <= item[1]]
    found = []
    overrides = facts.plan.layers.overrides
    for later in range(number + 1, len(overrides)):
        if left and getattr(overrides[later], key) is not None:
            rest = _subtract(left, ranges[later])
            if rest != left:
                found.append(later)
            left = rest
    return [] if left else found


def _subtract(left: list[Range], right: list[Range]) -> list[Range]:
    """The layers of ``left`` that are not in ``right``."""
    for first, last in right:
        rest = []
        for low, high in left:
            if last < low or high < first or first > last:
                rest.append((low, high))
                continue
            if low < first:
                rest.append((low, first - 1))
            if last < high:
                rest.append((last + 1, high))
        left = rest
    return left


def _find_repetition(ranges: list[Range]) -> Range | None:
    for number, (first, last) in enumerate(ranges):
        for other_first, other_last in ranges[:number]:
            low, high = max(first, other_first), min(last, other_last)
            if low <= high:
                return low, high
    return None


def _name_layers(layers: Range) -> str:
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first} to {last}"
