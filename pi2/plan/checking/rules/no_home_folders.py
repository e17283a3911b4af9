"""A document names no home folder.

Why: a path such as ``/home/alice`` exists on one machine only, and tells the name of an account.

Example: ``store = "/home/alice/stores/bamboo-7b"``.

Fix: write the path relative to the plan, such as ``../stores/bamboo-7b``.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.privacy import report_private

CODE = "P413"
SEVERITY = "warning"
NEEDS = ()


def check(facts: Facts) -> Iterator[Finding]:
    """Look through all texts of all documents."""
    yield from report_private(facts, "home", "somebody's home folder")
