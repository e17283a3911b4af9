"""A measured figure says how often it was measured, or how far the measurements lie apart.

Why: one measurement may be the best of many or the only one; without its spread nobody can say
whether another figure differs from it.

Example: ``status = "measured"`` with neither ``samples`` nor ``spread``, and no range such as
"44 to 48 GB/s" in ``source``.

Fix: measure a few times and write ``samples`` and ``spread``, the standard deviation relative to
the mean; if that is not known any more, the figure is ``estimated``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pi2.plan.checking.figures import walk_figures
from pi2.plan.checking.findings import Facts, Finding

CODE = "P401"
SEVERITY = "warning"
NEEDS = ("device",)

_RANGE = re.compile(r"\d\s*(?:to|-|–|\.\.)\s*\d|±|\+/-")  # noqa: RUF001  # people write dashes


def check(facts: Facts) -> Iterator[Finding]:
    """Look at every measured figure of the device."""
    for path, figure in walk_figures(facts.device):
        if figure.status != "measured" or figure.spread is not None:
            continue
        if figure.samples is None and _RANGE.search(figure.source) is None:
            yield Finding(
                document="device",
                path=(*path, "status"),
                message="a measured figure without `samples` and `spread`",
                help='write both, or status = "estimated" if they are not known',
            )
