"""What a vendor claims is not called measured.

Why: a data sheet states what is reached under the vendor's conditions, often never in use. A
prediction that takes it for a measurement promises too much.

Example: ``status = "measured"`` with ``source = "data sheet: up to 4200 MB/s"``.

Fix: write ``status = "vendor-claimed"``, or measure it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pi2.plan.checking.figures import walk_figures
from pi2.plan.checking.findings import Facts, Finding

CODE = "P402"
SEVERITY = "warning"
NEEDS = ("device",)

_CLAIM = re.compile(
    r"\b(?:data ?sheet|spec(?:ification)?s?(?: sheet)?|product (?:page|brief)|press release"
    r"|(?:vendor|manufacturer|maker)(?:'s)?|marketing|advertised|up to)\b",
    re.IGNORECASE,
)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for the words of data sheets in the sources of measured figures."""
    for path, figure in walk_figures(facts.device):
        found = _CLAIM.search(figure.source) if figure.status == "measured" else None
        if found is not None:
            yield Finding(
                document="device",
                path=(*path, "status"),
                message=f"called measured, but its source is a claim: `{found[0]}`",
                help='write status = "vendor-claimed", or say how it was measured',
            )
