"""An override sets something.

Why: an override with only a selector changes nothing; a key is missing.

Example: ``[[layers.overrides]]`` with ``select = "0-3"`` and nothing else.

Fix: add ``split`` or ``hot``, or remove the override.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding

CODE = "P214"
SEVERITY = "warning"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for overrides without split and hot."""
    for number, override in enumerate(facts.plan.layers.overrides):
        if override.split is None and override.hot is None:
            yield Finding(
                path=("layers", "overrides", number),
                message="the override sets nothing",
                help="add `split` or `hot`, or remove it",
            )
