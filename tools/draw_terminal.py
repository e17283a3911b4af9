"""Run README's commands in a terminal, and draw what they show: ``docs/images/terminal.svg``.

    python tools/draw_terminal.py -o docs/images/terminal.svg 'pi2 run smollm2 --chat Hello'
"""  # fmt: skip

import argparse
import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 100


def record(words: list[str]) -> str:
    """What a command shows in a terminal of its own."""
    pid, terminal = pty.fork()
    if not pid:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        os.environ |= {"COLUMNS": str(COLUMNS), "PATH": path}
        os.execvp(words[0], words)
    shown = bytearray()
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # how a terminal of Linux ends
            break
        shown += piece
        if not piece:
            break
    os.waitpid(pid, 0)
    return shown.decode("utf-8", "replace").replace("\r\n", "\n")


def clear(text: str) -> str:
    """The lines that stay: progress bars erase theirs."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[[0-9;?]*[A-HJKSThl])", text):
        if part == "\n":
            row += 1
            lines += [""] * (row >= len(lines))
        elif part.endswith("K"):
            lines[row] = ""
        elif part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part != "\r" and not part.startswith("\x1b[?"):
            lines[row] += part
    return "\n".join(lines).strip("\n")


def draw(commands: list[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(clear(record(shlex.split(command)))))
        console.print()
    svg = console.export_svg(title="pi2")
    # Pictures of READMEs may not fetch fonts.
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("commands", nargs="+")
    given = parser.parse_args()
    given.output.write_text(draw(given.commands), "utf-8")


if __name__ == "__main__":
    main()
