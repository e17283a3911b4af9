"""No placeholder is left to replace.

Why: a template's placeholder is no value; what it stands for was forgotten.

Example: ``store = "stores/REPLACE_ME"``.

Fix: write the value, or remove the key where it has a default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pi2.plan.checking.figures import walk_texts
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.toml.source import KINDS

CODE = "P420"
SEVERITY = "error"
NEEDS = ()

_PLACEHOLDER = re.compile(r"(?<![A-Za-z])(?:REPLACE|CHANGE)[ _-]?(?:ME|THIS)(?![A-Za-z])")


def check(facts: Facts) -> Iterator[Finding]:
    """Look through all texts of all documents."""
    for document in KINDS:
        for path, text in walk_texts(facts.known.get(document)):
            found = _PLACEHOLDER.search(text)
            if found is not None:
                yield Finding(
                    document=document,
                    path=path,
                    message=f"`{found[0]}` is left in",
                    help="write the value, or remove the key where it has a default",
                )
