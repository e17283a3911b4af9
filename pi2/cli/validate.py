"""Check plans, devices and models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.main import wants_colour
from pi2.cli.named_plans import find_document_path
from pi2.cli.suggestions import suggest_plans
from pi2.diagnostics import Diagnostic, UserError
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.diagnostics.formats import find_renderer, list_formats

if TYPE_CHECKING:
    from pi2.diagnostics.page import Page
    from pi2.plan.checking.check import Report

GROUP = "Author"


@click.command("validate")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path),
    shell_complete=suggest_plans,
)
@click.option(
    "--format",
    "--output-format",
    "output_format",
    type=click.Choice(list_formats()),
    default="full",
    show_default=True,
    help="Output format of findings.",
)
@click.option(
    "-o",
    "--output",
    "--output-file",
    "output_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write findings to this file instead of standard output.",
)
@click.option(
    "--strict", "--warnings-as-errors", "strict", is_flag=True, help="Treat warnings as errors."
)
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Report only findings that this file does not list.",
)
@click.option(
    "--write-baseline", "writes", is_flag=True, help="Write today's findings into --baseline."
)
@click.option("--locked", is_flag=True, help="Fail if pi2.lock is out of date.")
def command(
    files: tuple[Path, ...],
    output_format: str,
    output_file: Path | None,
    strict: bool,
    baseline: Path | None,
    writes: bool,
    locked: bool,
) -> int:
    """Check plans, devices and models.

    FILE is a *.plan.toml, *.device.toml or *.model.toml, a folder that is searched for them, or a
    plan's name.  A plan is checked together with its device, its model and, if there is one, its
    neuron store.  Findings go to standard output, a summary to standard error.  The formats github,
    gitlab, sarif and junit are for continuous integration.

    The comment `# pi2: ignore P403 (reason)` leaves a finding of its line out, and [tool.pi2] of
    pyproject.toml a code in some files; an ignore that is not needed is a finding.  Remote
    references are resolved through pi2.lock; nothing is fetched.  Exits with 0 without errors, 1
    with errors, 2 if a file cannot be read.
    """
    from pi2.diagnostics.ignores import read_project, sift
    from pi2.plan.toml.source import CANNOT_READ

    project = read_project(files[0].parent)
    baseline = baseline or project.baseline
    if writes and baseline is None:
        raise click.UsageError("--write-baseline needs --baseline FILE")
    number, checked, diagnostics, sources = _check_files(files, locked)
    sifted = sift(diagnostics, sources, checked, project)
    diagnostics, remarks = sifted.diagnostics, []
    if sifted.ignored:
        remarks.append(f"{sifted.ignored} ignored")
    if writes:
        assert baseline is not None
        return _write_baseline(baseline, diagnostics, sources)
    if baseline is not None:
        from pi2.diagnostics.baseline import leave_out_known, read_baseline

        known = read_baseline(baseline)
        new, gone = leave_out_known(diagnostics, sources, known)
        gone = {item for item in gone if known[item] in checked}
        remarks.append(f"{len(diagnostics) - len(new)} in the baseline")
        if gone:
            remarks.append(f"{len(gone)} of the baseline mended: --write-baseline drops them")
        diagnostics = new
    if strict or project.strict:
        diagnostics = tuple(
            replace(item, severity="error") if item.severity == "warning" else item
            for item in diagnostics
        )
    diagnostics = sort_diagnostics(diagnostics)
    _print(diagnostics, checked, sources, output_format, output_file)
    if diagnostics and output_format == "full":
        click.echo(err=True)
    more = f" ({'; '.join(remarks)})" if remarks else ""
    click.echo(summarise(number, diagnostics) + more, err=True)
    if diagnostics and output_format == "full":
        click.echo(f"for more, run `pi2 explain {_find_worst(diagnostics).code}`", err=True)
    if any(item.code in CANNOT_READ for item in diagnostics):
        return 2
    return 1 if any(item.severity == "error" for item in diagnostics) else 0


def _check_files(
    files: Sequence[Path], locked: bool
) -> tuple[int, set[str], tuple[Diagnostic, ...], dict[str, str]]:
    """How many files were checked, their names, what was found in them, and texts by name."""
    from pi2.plan.checking.reuse import Reuse
    from pi2.plan.reading.listing import list_documents
    from pi2.plan.toml.source import display_path
    from pi2.sharing.resolver import LockedReferences
    from pi2.weights.file_reading import check_document

    found: dict[Diagnostic, None] = {}
    sources: dict[str, str] = {}
    reuse = Reuse()
    paths = list_documents(_find_paths(files, found))
    for path in paths:
        resolver = LockedReferences(path.parent, locked=locked)
        report = check_document(path, name=display_path(path), resolver=resolver, reuse=reuse)
        found.update(dict.fromkeys([*report.diagnostics, *_check_store(report)]))
        sources.update(report.sources)
    return max(len(paths), len(files)), set(map(display_path, paths)), tuple(found), sources


def _write_baseline(
    file: Path, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]
) -> int:
    from pi2.diagnostics.baseline import write_baseline
    from pi2.sharing.files import write_atomically

    write_atomically(file, write_baseline(diagnostics, sources).encode())
    click.echo(f"{file}: {_count(len(diagnostics), 'finding')}", err=True)
    return 0


def _print(
    diagnostics: Sequence[Diagnostic],
    checked: set[str],
    sources: Mapping[str, str],
    output_format: str,
    output_file: Path | None,
) -> None:
    """Write the report to a file or standard output."""
    shown = checked | {item.span.file for item in diagnostics if item.span is not None}
    texts = {
        name: text for name, text in sources.items() if name in shown or not _is_installed(name)
    }
    colour = output_file is None and wants_colour(sys.stdout)
    render = find_renderer(output_format)
    text = render(diagnostics, colour=colour, sources=texts, find_page=_find_page)
    if output_file is not None:
        from pi2.sharing.files import write_report

        write_report(output_file, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def _find_paths(files: Sequence[Path], found: dict[Diagnostic, None]) -> Iterator[Path]:
    """The files that names mean; a name that nothing has is ``found``."""
    for file in files:
        try:
            yield find_document_path(file)
        except UserError as error:
            found.update(dict.fromkeys(error.diagnostics))


def _check_store(report: Report) -> list[Diagnostic]:
    """What the plan's neuron store does not fit in, where there is one."""
    if report.resolved is None or not report.resolved.store_path.exists():
        return []  # nothing to import for
    from pi2.store.agreement import list_store_findings

    return list_store_findings(report)


def _is_installed(name: str) -> bool:
    """Whether a file came with pi2: nobody who checks a plan is told of those without findings."""
    from pi2.plan.reading.references import find_shipped_folder

    return Path(name).resolve().is_relative_to(find_shipped_folder())


def _find_worst(diagnostics: Sequence[Diagnostic]) -> Diagnostic:
    return min(diagnostics, key=lambda item: ("error", "warning", "note").index(item.severity))


def _find_page(code: str) -> Page | None:
    # Imported when a format asks: most do not.
    from pi2.plan.checking.pages import find_page

    return find_page(code)


def summarise(files: int, diagnostics: Sequence[Diagnostic]) -> str:
    """Summarise the findings in one line: ``3 files, 1 error``."""
    parts = [_count(files, "file")]
    for severity in ("error", "warning", "note"):
        number = sum(item.severity == severity for item in diagnostics)
        if number:
            parts.append(_count(number, severity))
    if len(parts) == 1:
        parts.append("no findings")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
