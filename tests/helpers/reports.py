"""Findings of every kind, and the reports that each format for machines is to make of them.

``python -m tests.helpers.reports`` writes the golden files anew: read every difference before
committing it.
"""

from pathlib import Path

from pi2.diagnostics import Diagnostic, Span
from pi2.diagnostics.texts import Page, render

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    "github": "report.github.txt",
    "gitlab": "report.gitlab.json",
    "sarif": "report.sarif",
    "junit": "report.junit.xml",
}
SOURCES = {
    "plans/a.plan.toml": "[layers]\nsplit = { cpu = 0.3, npu = 0.8 }\nnotes = '''\n名前\n'''\n",
    "plans/sound.device.toml": "schema_version = 3\n",
}
FINDINGS = (
    Diagnostic(
        code="P210",
        message="the shares add up to 1.1, expected 1: 100% of cpu, npu",
        help="lower npu to 0.7",
        span=Span("plans/a.plan.toml", 2, 9, 2, 33),
        notes=("plans/sound.device.toml:1:1: units: cpu, npu", "no place"),
        path="layers.split",
    ),
    Diagnostic(
        code="P101",
        severity="warning",
        message="unknown key `notes` with the text `名前`",
        span=Span("plans/a.plan.toml", 3, 9, 5, 4),
        path="layers.notes",
    ),
    Diagnostic(
        code="P010",
        message="one line\nand <another> & a bell \x07",
        span=Span("odd: 50%, \u540d\x1b.plan.toml", 1, 1, 1, 2),
    ),
    Diagnostic(code="P001", message="no such file", span=Span.of_file("/gone/b.plan.toml")),
    Diagnostic(code="P900", severity="note", message="about no file"),
)
PAGE = Page(
    code="P210",
    what="Split shares do not add up to 1.",
    why="every neuron is computed once.",
    example="`cpu = 2`.",
    fix="change one.",
)


def find_page(code: str) -> Page | None:
    """The page of P210; the others have none."""
    return PAGE if code == PAGE.code else None


def write_report(name: str) -> str:
    return render(name, FINDINGS, colour=True, sources=SOURCES, find_page=find_page)


def main() -> None:
    for name, file in FILES.items():
        (GOLDEN / file).write_text(write_report(name), encoding="utf-8")


if __name__ == "__main__":
    main()
