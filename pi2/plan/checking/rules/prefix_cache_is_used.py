"""Prefixes that are kept in files are looked for.

Why: with ``serve.prefixes = "none"`` every prompt is read from its beginning, and nothing is kept.

Example: ``serve.prefixes = "none"`` with ``serve.prefix_cache = "4 GiB"``.

Fix: remove ``serve.prefix_cache``, or ``serve.prefixes``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding, Origin

CODE = "P278"
SEVERITY = "warning"
NEEDS = ("plan",)


def check(facts: Facts) -> Iterator[Finding]:
    """Compare both keys."""
    serve = facts.plan.serve
    if serve.prefix_cache is None or serve.prefixes != "none":
        return
    yield Finding(
        path=("serve", "prefix_cache"),
        message="nothing is kept in files: prompts are read from their beginning",
        help="remove it, or serve.prefixes",
        origins=(Origin(document="plan", path=("serve", "prefixes"), text='prefixes = "none"'),),
    )
