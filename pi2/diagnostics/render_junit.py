"""JUnit format: one test case per file, which CI services show as a list of tests.

A case whose file has errors fails once, with all of them in its text; what does not change the exit
code (warnings, notes) is in its ``system-out``.  Files without findings are cases that pass, as are
the devices and models that plans name.  The report is ASCII, whatever the terminal's encoding, and
control characters, which XML cannot hold, are written visibly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pi2.diagnostics.diagnostic import Diagnostic
from pi2.diagnostics.render_full import render as render_full
from pi2.diagnostics.text import escape_controls

if TYPE_CHECKING:
    from pi2.diagnostics.page import FindPage

SUITE = "pi2 validate"
_NOWHERE = "pi2"
"""Case of the findings that belong to no file."""


def render(
    diagnostics: Sequence[Diagnostic],
    *,
    colour: bool = False,
    sources: Mapping[str, str] | None = None,
    find_page: FindPage | None = None,
) -> str:
    """Write a suite of one case per file of ``sources`` and of the diagnostics."""
    del colour, find_page
    from xml.etree import ElementTree

    sources = sources or {}
    cases: dict[str, list[Diagnostic]] = {file: [] for file in sources}
    for item in diagnostics:
        cases.setdefault(_NOWHERE if item.span is None else item.span.file, []).append(item)
    failed = sum(any(item.severity == "error" for item in items) for items in cases.values())
    counts = {"tests": str(len(cases)), "failures": str(failed), "errors": "0"}
    root = ElementTree.Element("testsuites", {"name": SUITE, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, **counts, "skipped": "0"})
    for file, items in cases.items():
        names = {"classname": SUITE, "name": _make_visible(file)}
        case = ElementTree.SubElement(suite, "testcase", names)
        errors = [item for item in items if item.severity == "error"]
        if errors:
            about = {"type": errors[0].code, "message": _make_visible(_summarise(errors))}
            failure = ElementTree.SubElement(case, "failure", about)
            failure.text = _make_visible(render_full(errors, sources=sources))
        remarks = [item for item in items if item.severity != "error"]
        if remarks:
            output = ElementTree.SubElement(case, "system-out")
            output.text = _make_visible(render_full(remarks, sources=sources))
    ElementTree.indent(root)
    report: bytes = ElementTree.tostring(root, encoding="us-ascii")
    return report.decode("ascii") + "\n"


def _summarise(errors: Sequence[Diagnostic]) -> str:
    """The first error, and how many there are besides: a case has one failure at most."""
    text = f"{errors[0].code}: {errors[0].message}"
    return text if len(errors) == 1 else f"{text} (and {len(errors) - 1} more)"


def _make_visible(text: str) -> str:
    """Escape what XML cannot hold, and other control characters, but not line ends."""
    return "\n".join(escape_controls(line) for line in text.split("\n"))
