"""A document holds no account, mail address or host name.

Why: documents are shared, and names of accounts and hosts tell who wrote them and where to try to
get in.

Example: ``source = "alice@build-7: pi2 bench"``.

Fix: leave it out; name the tool and its version instead. Authors can be credited in the
repository's history.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.checking.privacy import report_private

CODE = "P412"
SEVERITY = "warning"
NEEDS = ()


def check(facts: Facts) -> Iterator[Finding]:
    """Look through all texts of all documents."""
    yield from report_private(facts, "account", "an account, a mail address or a key")
