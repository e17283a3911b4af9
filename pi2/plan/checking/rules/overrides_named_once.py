"""No two overrides have the same id.

Why: plans that extend this one change and remove overrides by their ``id``; with the same id twice
it is unclear which one is meant, and the arrays do not merge at all.

Example: two ``[[layers.overrides]]`` with ``id = "first-layers"``.

Fix: give them different names, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P215"
SEVERITY = "error"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for ids that come again."""
    first: dict[str, int] = {}
    for number, override in enumerate(facts.plan.layers.overrides):
        name = override.id
        if name is None:
            continue
        if name in first:
            path = ("layers", "overrides", first[name], "id")
            yield Finding(
                path=("layers", "overrides", number, "id"),
                message=f"another override is called `{name}` too",
                help="give it another name, or none",
                origins=(Origin(document="plan", path=path, text="the first one"),),
            )
        first.setdefault(name, number)
