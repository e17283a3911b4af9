"""Documents that commands write: where to, how they refer to others, and that they are sound."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.plan.checking.check import Report
    from pi2.plan.toml.source import Kind

force_option = click.option("--force", is_flag=True, help="Overwrite an existing file.")


def check_output(path: Path, kind: Kind | None, force: bool) -> str:
    """The name of the document that is to be written to ``path``; UserError P009 for another
    suffix than the kind's, P027 for a file that exists."""
    suffix = "" if kind is None else f".{kind}.toml"
    name = path.name.removesuffix(suffix)
    if not path.name.endswith(suffix) or not name:
        message = f"expected a file name that ends in {suffix}"
        raise UserError.of("P009", message, file=str(path), help=f"my{suffix}, for example")
    if os.path.lexists(path) and not force:
        help_text = "use --force to overwrite it"
        raise UserError.of("P027", "the file exists already", file=str(path), help=help_text)
    return name


def refer(reference: str, folder: Path) -> str:
    """A reference to a document as it is written in a file in ``folder``."""
    from pi2.plan.reading.references import has_scheme, is_path

    if has_scheme(reference) or not is_path(reference):
        return reference
    return refer_path(Path(reference), folder)


def refer_path(path: Path, folder: Path) -> str:
    """A path as it is written in a file in ``folder``."""
    return str(path) if path.is_absolute() else Path(os.path.relpath(path, folder)).as_posix()


def write_checked(path: Path, text: str, advice: str) -> Report:
    """Write a document whole or not at all, if it is sound; ``advice`` says what comes next."""
    from pi2.cli.main import print_diagnostics
    from pi2.sharing.files import write_atomically
    from pi2.sharing.resolver import LockedReferences
    from pi2.weights.file_reading import check_document

    make_folder(path)
    report = check_document(path, resolver=LockedReferences(path.parent), text=text)
    if not report.is_sound:
        raise report.make_error()
    print_diagnostics(report.diagnostics, report.sources)
    write_atomically(path, text.encode())
    click.echo(f"{path}: written; {advice}", err=True)
    return report


def make_folder(path: Path) -> None:
    """Make the folder of a file: references go through it; UserError P003."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise UserError.of("P003", message, file=str(path)) from None
