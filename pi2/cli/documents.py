"""Commands about documents: show, migrate, fit, schemas, and what editors and shells ask for."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from pi2.cli import collect_as_usual
from pi2.cli.main import is_guided, print_diagnostics
from pi2.cli.options import (
    FILE,
    FORCE,
    MEMORY,
    SET,
    ChosenPlan,
    check_output,
    option,
    parse_changes,
    read_sound,
    refer,
    suggest_files,
    suggest_plans,
    take_options,
    take_plan,
    write_checked,
)
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.found_models import find_found
from pi2.loading import find_plan, find_pulled, is_checkpoint
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.reading.references import FOREIGN, list_documents, list_shipped, read_document
from pi2.plan.toml.source import CANNOT_READ, KINDS, Kind, detect_kind, display_path, read_text
from pi2.progress import ProgressBar
from pi2.weights.file_reading import HUB, FileFiller, list_missing


@click.command("migrate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=suggest_files)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file would change.")
def migrate_command(files: tuple[str, ...], check: bool) -> int:
    """Upgrade documents to the current version of the plan language.

    FILE is a plan, device or model, or a folder of them.  Versions are raised and renamed keys
    replaced; comments, order and layout are kept.  Files that are up to date are not touched."""
    from pi2.authoring.difference import migrate_text
    from pi2.sharing.fetching import write_atomically

    findings: list[Diagnostic] = []
    changed = 0
    for path in list_documents(files):
        name = display_path(path)
        kind = detect_kind(path.name)
        source = read_document(path, name, f".{kind}.toml" if kind else "")
        if isinstance(source, list) and source[0].code in FOREIGN:
            findings += source
            continue
        text = read_text(path, name)
        if isinstance(text, Diagnostic):
            findings.append(text)
            continue
        if kind is None:
            message = "expected a file name that ends in .plan.toml, .device.toml or .model.toml"
            findings.append(Diagnostic(code="P009", message=message, span=Span.of_file(name)))
            continue
        result = migrate_text(kind, name, text)
        findings += result.findings
        changed += bool(result.changes)
        for change in result.changes:
            click.echo(f"{name}: {change}")
        if result.changes and not check:
            write_atomically(path.resolve(), result.text.encode())
    print_diagnostics(findings)
    verb = "would change" if check else "changed"
    click.echo(f"{changed} file{'' if changed == 1 else 's'} {verb}", err=True)
    if any(item.code in CANNOT_READ for item in findings):
        return 2
    return 1 if findings or (check and changed) else 0


@click.command("schema")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("schemas"),
    show_default=True,
    help="Output folder of the schemas.",
)
@click.option(
    "--check", is_flag=True, help=("Write nothing; exit with 1 if a file is out of date.")
)
def schema_command(output: Path, check: bool) -> int:
    """Write the JSON Schemas that editors use to check documents.

    Editors find them by the first line of a document, such as
    `#:schema ../schemas/plan.schema.json`."""
    from pi2.authoring.explanation import make_schemas
    from pi2.sharing.fetching import write_atomically

    code = 0
    for name, text in make_schemas().items():
        path = output / name
        try:
            current = path.read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            current = False
        if check:
            state = "current" if current else "not current" if path.exists() else "missing"
            click.echo(f"{path}: {state}", err=True)
            code = code if current else 1
            continue
        if not current:
            write_atomically(path, text.encode())
        click.echo(f"{path}: {'unchanged' if current else 'written'}", err=True)
    return code


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    resolved: bool = option(hidden=True)  # what it does anyway
    origins: bool = False
    document: Literal["plan", "device", "model"] = "plan"
    memory: str | None = MEMORY()
    settings: tuple[str, ...] = SET()


@click.command("show")
@click.argument("plan", metavar="FILE", shell_complete=suggest_plans)
@take_options(ShowOptions)
def show_command(plan: str, given: ShowOptions) -> None:
    """Print FILE with everything resolved, and a plan's digest.

    FILE is a plan, device or model.  The output is a valid document: saved next to the original, it
    resolves to the same digest."""
    from pi2.authoring.writing import write_document, write_plan
    from pi2.costs.cost import describe_speed

    path = find_document_path(Path(plan))
    kind = detect_kind(path.name) or "plan"
    if kind != "plan":
        if given.settings or given.memory or given.document not in ("plan", kind):
            options = "--set, --memory and --document"
            raise UserError.of("P016", f"{options} are for plans, this is a {kind}")
        report = read_sound(path)
        assert report.document is not None
        text = write_document(report.document, report.files[kind], origins=given.origins)
        sys.stdout.write(text)
        return
    chosen = ChosenPlan(Path(plan), path, *parse_changes(given.settings, given.memory))
    found, report = chosen.resolved, chosen.fitted.report
    print_diagnostics(report.diagnostics, report.sources)
    source, other = report.files[given.document], getattr(found, given.document)
    text = (
        write_plan(found, source if given.origins else None)
        if given.document == "plan"
        else write_document(other, source, origins=given.origins)
    )
    speed = describe_speed(found) if given.document == "plan" else None
    sys.stdout.write(text.replace("\n", f"\n# {speed}\n", 1) if speed else text)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a script that completes pi2's commands, options and files in SHELL.

    For example `pi2 completion bash >> ~/.bashrc`, `pi2 completion zsh >> ~/.zshrc`, or
    `pi2 completion fish > ~/.config/fish/completions/pi2.fish`."""
    from click.shell_completion import get_completion_class

    from pi2.cli.main import group

    found = get_completion_class(shell)
    assert found is not None, shell
    # Without bash at hand, its version cannot be asked; the lines are the same.
    text = found(group, {}, "pi2", "_PI2_COMPLETE").source_template % {
        "complete_func": "_pi2_completion",
        "complete_var": "_PI2_COMPLETE",
        "prog_name": "pi2",
    }
    if shell == "bash":
        # After `--set KEY=`, the value follows without a blank.
        blank = '[[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace 2>/dev/null\n\n    return 0'
        assert text.count("return 0") == 1
        text = text.replace("return 0", blank)
    click.echo(text.strip())


@click.command("lsp")
def lsp_command() -> None:
    """Start the language server on standard input and output.

    Editors start it themselves (docs/howto/check-in-ci.md).  It needs `pip install 'pi2[lsp]'`."""
    try:
        from pi2.lsp.server import make_server
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise UserError.of(
            "P750", "the language server is not installed", help="`pip install 'pi2[lsp]'`"
        ) from None
    collect_as_usual()
    # The server closes its streams; those of the process are flushed once more at its end.
    with os.fdopen(os.dup(0), "rb") as stdin, os.fdopen(os.dup(1), "wb") as stdout:
        make_server().start_io(stdin, stdout)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    output: Path | None = option("-o", "--output", type=FILE, metavar="FILE")
    force: bool = FORCE()


@click.command("fit")
@take_options(FitOptions)
@take_plan()
def fit_command(plan: ChosenPlan, given: FitOptions) -> None:
    """Fit PLAN to --memory, and to values of --set such as kv.context=8192 or decode.batch=4.

    Segments, shares of hot neurons and splits are worked out again; the changes go to standard
    error.  The new plan extends PLAN and states what differs.  Without -o it goes to standard
    output."""
    from pi2.costs.cost import describe_speed

    if plan.memory_bytes is None and not plan.settings:
        raise click.UsageError("give --memory, --set or both")
    if given.output is not None:
        check_output(given.output, "plan", given.force)
    need = format_bytes(plan.resolved.plan.memory.budget)
    remark = f"Fitted by `pi2 fit`: {need} for the whole process."
    speed = describe_speed(plan.resolved)
    write_fitted(plan, given.output, [remark, *([f"{speed}."] if speed else [])])


def write_fitted(
    plan: ChosenPlan, output: Path | None, remarks: Sequence[str], device: str = ""
) -> None:
    """Write a plan that extends ``plan``, or runs its GGUF file, and states what differs; without
    an ``output`` to standard output. ``device`` is another reference to the plan's."""
    from pi2.authoring.drafting import refer_from, write_overlay

    target = output or Path("fitted.plan.toml")
    if os.path.realpath(target) == os.path.realpath(plan.path):
        raise click.UsageError("-o names PLAN itself: choose another file, which extends it")
    shipped = {path.resolve(): name for name, path in list_shipped("plan").items()}
    base = shipped.get(plan.path.resolve()) or refer_from(plan.path, target)
    values = _state_arrays(plan) | ({"device": refer(device, target.parent)} if device else {})
    is_plan = plan.path.name.endswith(".toml")
    text = write_overlay(base, values, remarks, "extends" if is_plan else "weights")
    if output is None:
        click.echo(text, nl=False)
    else:
        write_checked(output, text, f"`pi2 diff {plan.given} {output}` compares the two")


def _state_arrays(plan: ChosenPlan) -> dict[str, object]:
    """The overrides of a plan; an array with one changed item is stated as a whole."""
    values: dict[str, object] = {}
    document = plan.resolved.plan.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key, value in plan.overrides.items():
        parts = key.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            values[key] = value
            continue
        found = document
        for part in parts[:number]:
            found = found[part]
        values[".".join(parts[:number])] = found
    return values


def find_plan_path(path: Path, *, files: FileFiller | None = None) -> Path:
    """`find_plan` with a progress bar; missing weights of the hub are offered on a terminal."""
    found = _find(path, ("plan",), files)
    if is_guided():
        from pi2.cli.models import pull_weights

        for weights in list_missing(found):
            if click.confirm(f"{weights} is not on this machine: fetch it?", err=True):
                pull_weights(found)
    return found


def find_document_path(path: Path, *, files: FileFiller | None = None) -> Path:
    """The plan, device or model that ``path`` names; a folder stays one."""
    return _find(path, KINDS, files)


def find_retokenized(
    path: Path, tokenizer: Path | None, *, files: FileFiller | None = None
) -> tuple[Path, dict[str, object]]:
    """The named plan with ``tokenizer``, and its overrides; UsageError without a checkpoint."""
    if tokenizer is None:
        return find_plan_path(path, files=files), {}
    if not is_checkpoint(path):
        raise click.UsageError(f"--tokenizer is for a checkpoint; {path} has its tokenizer")
    if (files or FileFiller()).runs_as_it_is(path):
        return path, {"tokenizer": str(tokenizer.absolute())}
    with ProgressBar() as progress:
        from pi2.model_folders import convert_once

        return convert_once(path, tokenizer, progress), {}


def _find(path: Path, kinds: Sequence[Kind], files: FileFiller | None = None) -> Path:
    name = str(path)
    is_missing = name.startswith(HUB) and find_pulled(name) is None and find_found(name) is None
    if is_missing and is_guided():
        from pi2.model_folders import fetch_model

        question = f"{name} is not on this machine: fetch and convert it?"
        if click.confirm(question, default=True, err=True):
            with ProgressBar() as progress:
                return fetch_model(name, progress=progress).plan
    with ProgressBar() as progress:
        return find_plan(path, kinds, files=files, progress=progress)
