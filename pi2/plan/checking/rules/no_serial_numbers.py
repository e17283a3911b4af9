"""A document holds no serial number.

Why: a document describes a kind of machine, for everybody who has one. A serial number, an IMEI or
a hardware address tells whose machine it was, and cannot be taken back once it is shared.

Example: ``source = "measured on serial number R58N70ABCDE"``.

Fix: leave it out; `pi2 profile publish` takes it out too, from comments as well. Keep notes about
your own units elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.privacy import report_private

CODE = "P411"
SEVERITY = "warning"
NEEDS = ()


def check(facts: Facts) -> Iterator[Finding]:
    """Look through all texts of all documents."""
    yield from report_private(facts, "serial", "a serial number or hardware address")
