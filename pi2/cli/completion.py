"""Print a shell completion script."""

from __future__ import annotations

import click

GROUP = "More commands"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that completes pi2's commands, options and files in SHELL.

    For example `pi2 completion bash >> ~/.bashrc`, `pi2 completion zsh >> ~/.zshrc`, or
    `pi2 completion fish > ~/.config/fish/completions/pi2.fish`.
    """
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
