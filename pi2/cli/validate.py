"""Check documents, and explain findings."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.cli.documents import find_document_path
from pi2.cli.main import print_diagnostics
from pi2.cli.options import (
    FILE,
    MEMORY,
    SET,
    ChosenPlan,
    choose_plan,
    find_form,
    option,
    parse_changes,
    suggest_codes,
    suggest_plans,
    take_options,
)
from pi2.diagnostics import Diagnostic, UserError
from pi2.diagnostics.baseline import (
    leave_out_known,
    read_baseline,
    read_project,
    sift,
    write_baseline,
)
from pi2.diagnostics.diagnostic import sort_diagnostics
from pi2.diagnostics.texts import Page, list_formats, render
from pi2.fitting.check import Report, find_page, load_pages
from pi2.fitting.inspection import Reuse
from pi2.logging import wants_colour
from pi2.plan.reading.references import find_shipped_folder, list_documents
from pi2.plan.toml.source import CANNOT_READ, display_path
from pi2.plan.toml.text import format_path, write_value
from pi2.progress import ProgressBar
from pi2.weights.file_reading import FileFiller, check_document, find_kind

if TYPE_CHECKING:
    from pi2.authoring.explanation import Explanation


COLUMNS = 88
"""Width of pages that are not written to a terminal."""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    memory: str | None = MEMORY()
    settings: tuple[str, ...] = SET()
    cost: bool = False
    plot: Path | None = option(type=FILE)


@click.command("explain")
@click.argument("what", required=False, metavar="[CODE|KEY]", shell_complete=suggest_codes)
@click.argument("file", required=False, metavar="[FILE]", shell_complete=suggest_plans)
@take_options(ExplainOptions)
def explain_command(what: str | None, file: str | None, given: ExplainOptions) -> None:
    """Explain a CODE such as P210, or a KEY such as kv.context.

    With FILE, a plan, device or model, it shows the key's value in that file, its origin and its
    cost. In a plan, layers.3.hot is a setting of the fourth layer; device.memory.capacity and
    model.shape.ffn refer to its device and model. layers.overrides[].hot and device.units.*.kind
    stand for every item or name. Without arguments, it lists all codes. `pi2 explain PLAN --cost`
    shows the time of a token by term: predicted, not measured."""
    if given.cost or given.plot is not None:
        if what is None or file is not None or not given.cost:
            raise click.UsageError("--cost and --plot go with a plan: pi2 explain PLAN --cost")
        _explain_cost(choose_plan(Path(what), given.settings, given.memory), given.plot)
        return
    if what is not None and file is not None:
        click.echo(_explain_value(what, Path(file), given.settings, given.memory), nl=False)
        return
    pages = load_pages()
    if what is None:
        click.echo("".join(f"{page.code}  {page.what}\n" for page in pages.values()), nl=False)
        return
    page = pages.get(what.upper())
    if page is None:
        from pi2.authoring.explanation import describe_path, is_known_path

        if not is_known_path(what):
            raise _report_unknown(what, pages)
        found = describe_path(what)
        click.echo("\n".join(write_explanation(item) for item in found), nl=False)
    elif wants_colour(sys.stdout):
        _print_in_colour(page)
    else:
        click.echo(write_page(page), nl=False)


def _explain_cost(plan: ChosenPlan, plot: Path | None) -> None:
    """Print the terms of a plan's cost; UserError P351 where its device lacks figures."""
    from pi2.costs.cost import cost_plan
    from pi2.planning.text import draw_cost, write_cost
    from pi2.sharing.fetching import write_atomically

    resolved = plan.measured
    cost = cost_plan(resolved)
    click.echo("\n".join(write_cost(cost)))
    if plot is not None:
        model, device = resolved.model, resolved.device
        title = f"{model.name or model.id} on {device.name or device.id}"
        write_atomically(plot, draw_cost(cost, find_form(plot), title))


def _explain_value(key: str, file: Path, settings: tuple[str, ...], memory: str | None) -> str:
    from pi2.authoring.explanation import explain_values

    path = find_document_path(file)
    kind = find_kind(path)
    if kind == "plan":
        report = ChosenPlan(file, path, *parse_changes(settings, memory)).fitted.report
    else:
        report = check_document(path)
    if kind is None or kind not in report.files:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    found = explain_values(report, kind, key)
    return "\n".join(write_explanation(item) for item in found)


def write_explanation(item: Explanation) -> str:
    from pi2.authoring.explanation import write_chain

    shown = format_path(item.path)
    lines = [f"{shown} (of a {item.kind})"]
    if item.value is not None:
        lines = [f"{shown} = {write_value(item.value)}"]
    if item.doc is not None:
        lines += [_indent(item.doc.text), _indent(f"type: {item.doc.values}")]
        if item.doc.default is not None:
            lines.append(_indent(f"default: {item.doc.default}"))
        elif item.doc.is_required:
            lines.append(_indent("required"))
        if item.doc.examples and item.value is None:
            lines.append(_indent(f"example: {', '.join(item.doc.examples)}"))
    if item.steps:
        lines += [f"  from: {line}" for line in write_chain(item.steps)]
    elif item.value is not None:
        lines.append("  from: the default")
    lines += [_indent(f"costs: {cost}") for cost in item.costs]
    return "\n".join(lines) + "\n"


_fill = partial(textwrap.fill, width=COLUMNS, break_long_words=False, break_on_hyphens=False)
_indent = partial(_fill, initial_indent="  ", subsequent_indent="    ")


def write_page(page: Page) -> str:
    parts = [f"{page.code}: {page.what}"]
    parts += [f"{heading}: {text}" for heading, text in page.sections]
    return "\n\n".join(map(_fill, parts)) + "\n"


def _print_in_colour(page: Page) -> None:
    # Rich takes a tenth of a second to import.
    from rich.console import Console
    from rich.markdown import Markdown

    parts = [f"**{page.code}: {page.what}**"]
    parts += [f"**{heading}:** {text}" for heading, text in page.sections]
    console = Console()
    for part in parts:
        console.print(Markdown(part), width=min(console.width, COLUMNS))
        console.print()


def _report_unknown(code: str, pages: Mapping[str, Page]) -> UserError:
    near = find_near(code, pages)
    listed = " or ".join(f'{item} ("{pages[item].what}")' for item in near)
    return UserError.of(
        "P018",
        f"there is no code {code!r}",
        help=f"did you mean {listed}?" if near else "`pi2 explain` lists all codes",
    )


def find_near(code: str, pages: Mapping[str, Page]) -> list[str]:
    """Up to three codes that are spelt nearly so, or whose first sentence has the word."""
    import difflib

    text = code.upper()
    if text.removeprefix("P").isdigit():
        text = f"P{text.removeprefix('P')}"
        return difflib.get_close_matches(text, pages, n=3, cutoff=0.7)
    word = code.casefold()
    return [item for item, page in pages.items() if word and word in page.what.casefold()][:3]


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    output_format: str = option("--format", type=click.Choice(list_formats()), default="full")
    output_file: Path | None = option("-o", "--output", type=FILE)
    strict: bool = option("--strict")
    baseline: Path | None = option(type=FILE)
    writes: bool = option("--write-baseline")
    locked: bool = False


@click.command("validate")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path),
    shell_complete=suggest_plans,
)
@take_options(ValidateOptions)
def validate_command(files: tuple[Path, ...], given: ValidateOptions) -> int:
    """Check plans, devices and models.

    FILE is a *.plan.toml, *.device.toml or *.model.toml, a folder that is searched for them, or a
    plan's name.  A plan is checked together with its device, its model and, if there is one, its
    neuron store.  Findings go to standard output, a summary to standard error.  The formats github,
    gitlab, sarif and junit are for continuous integration.

    The comment `# pi2: ignore P403 (reason)` leaves a finding of its line out, and [tool.pi2] of
    pyproject.toml a code in some files; an ignore that is not needed is a finding.  Remote
    references are resolved through pi2.lock; nothing is fetched.  Exits with 0 without errors, 1
    with errors, 2 if a file cannot be read."""
    project = read_project(files[0].parent)
    baseline = given.baseline or project.baseline
    if given.writes and baseline is None:
        raise click.UsageError("--write-baseline needs --baseline FILE")
    number, checked, diagnostics, sources = _check_files(files, given.locked)
    sifted = sift(diagnostics, sources, checked, project)
    diagnostics, remarks = sifted.diagnostics, []
    if sifted.ignored:
        remarks.append(f"{sifted.ignored} ignored")
    if given.writes:
        assert baseline is not None
        return _write_baseline(baseline, diagnostics, sources)
    if baseline is not None:
        known = read_baseline(baseline)
        new, gone = leave_out_known(diagnostics, sources, known)
        gone = {item for item in gone if known[item] in checked}
        remarks.append(f"{len(diagnostics) - len(new)} in the baseline")
        if gone:
            remarks.append(f"{len(gone)} of the baseline mended: --write-baseline drops them")
        diagnostics = new
    if given.strict or project.strict:
        diagnostics = tuple(
            replace(item, severity="error") if item.severity == "warning" else item
            for item in diagnostics
        )
    diagnostics = sort_diagnostics(diagnostics)
    _print(diagnostics, checked, sources, given.output_format, given.output_file)
    if diagnostics and given.output_format == "full":
        click.echo(err=True)
    more = f" ({'; '.join(remarks)})" if remarks else ""
    click.echo(summarise(number, diagnostics) + more, err=True)
    if diagnostics and given.output_format == "full":
        worst = min(diagnostics, key=lambda x: ("error", "warning", "note").index(x.severity))
        click.echo(f"for more, run `pi2 explain {worst.code}`", err=True)
    if any(item.code in CANNOT_READ for item in diagnostics):
        return 2
    return 1 if any(item.severity == "error" for item in diagnostics) else 0


def _check_files(
    files: Sequence[Path], locked: bool
) -> tuple[int, set[str], tuple[Diagnostic, ...], dict[str, str]]:
    found: dict[Diagnostic, None] = {}
    sources: dict[str, str] = {}
    reuse, opened = Reuse(), FileFiller()
    paths = list_documents(_find_paths(files, found, opened))
    for path in paths:
        report = check_document(path, locked=locked, reuse=reuse, opened=opened)
        found.update(
            dict.fromkeys([*report.diagnostics, *_check_weights(report), *_check_speed(report)])
        )
        sources.update(report.sources)
    return max(len(paths), len(files)), set(map(display_path, paths)), tuple(found), sources


def _write_baseline(
    file: Path, diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]
) -> int:
    from pi2.sharing.fetching import write_atomically

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
    shown = checked | {item.span.file for item in diagnostics if item.span is not None}
    # Nobody who checks a plan is told of files that came with pi2 and have no findings.
    installed = find_shipped_folder()
    texts = {
        name: text
        for name, text in sources.items()
        if name in shown or not Path(name).resolve().is_relative_to(installed)
    }
    colour = output_file is None and wants_colour(sys.stdout)
    text = render(output_format, diagnostics, colour=colour, sources=texts, find_page=find_page)
    if output_file is not None:
        from pi2.sharing.fetching import write_report

        write_report(output_file, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def _find_paths(
    files: Sequence[Path], found: dict[Diagnostic, None], opened: FileFiller
) -> Iterator[Path]:
    """The files that names mean; a name that nothing has is ``found``."""
    for file in files:
        try:
            yield find_document_path(file, files=opened)
        except UserError as error:
            found.update(dict.fromkeys(error.diagnostics))


def _check_speed(report: Report) -> list[Diagnostic]:
    """What the predicted speed of a plan that states ``speed`` comes to."""
    if report.resolved is None or report.resolved.plan.speed is None:
        return []  # nothing to import for
    from pi2.planning.wish import check_speed

    place = report.files["plan"].spans.find_value(("speed",))
    return [replace(item, span=place, path="speed") for item in check_speed(report.resolved)]


def _check_weights(report: Report) -> list[Diagnostic]:
    """Faults of a plan's store, or of its GGUF file's numbers."""
    if report.resolved is None or not report.resolved.store_path.exists():
        return []  # nothing to import for
    try:
        with ProgressBar() as progress:
            report.resolved.source.check_once(progress)
    except UserError as error:
        return list(error.diagnostics)
    from pi2.fitting.misfits import list_store_findings

    return list_store_findings(report)


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
