"""Start the language server for editors."""

from __future__ import annotations

import os

import click

from pi2.cli.garbage import collect_as_usual
from pi2.diagnostics import UserError

GROUP = "More commands"


@click.command("lsp")
def command() -> None:
    """Start the language server on standard input and output.

    Editors start it themselves (docs/editors.md).  It needs `pip install 'pi2[lsp]'`.
    """
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
