"""Write the JSON Schemas that editors use."""

from __future__ import annotations

from pathlib import Path

import click

GROUP = "More commands"


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
def command(output: Path, check: bool) -> int:
    """Write the JSON Schemas that editors use to check documents.

    Editors find them by the first line of a document, such as
    `#:schema ../schemas/plan.schema.json`.
    """
    from pi2.diagnostics import UserError
    from pi2.plan.authoring.json_schema import make_schemas

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
        try:
            if not current:
                output.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError.of(
                "P003", f"cannot be written: {error.strerror}", file=str(path)
            ) from None
        click.echo(f"{path}: {'unchanged' if current else 'written'}", err=True)
    return code
