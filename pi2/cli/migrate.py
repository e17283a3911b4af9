"""Upgrade documents to the current version of the plan language."""

from __future__ import annotations

import click

from pi2.cli.suggestions import suggest_files

GROUP = "More commands"


@click.command("migrate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=suggest_files)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file would change.")
def command(files: tuple[str, ...], check: bool) -> int:
    """Upgrade documents to the current version of the plan language.

    FILE is a plan, device or model, or a folder of them.  Versions are raised and renamed keys
    replaced; comments, order and layout are kept.  Files that are up to date are not touched.
    """
    from pi2.cli.main import print_diagnostics
    from pi2.diagnostics import Diagnostic, Span
    from pi2.plan.authoring.migration import migrate_text
    from pi2.plan.reading.listing import list_documents
    from pi2.plan.toml.source import CANNOT_READ, detect_kind, display_path, read_text
    from pi2.sharing.files import write_atomically

    findings: list[Diagnostic] = []
    changed = 0
    for path in list_documents(files):
        name = display_path(path)
        kind = detect_kind(path.name)
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
