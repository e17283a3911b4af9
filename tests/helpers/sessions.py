"""Sessions: command lines, the files that they need, and what they are to print.

A file of ``tests/sessions`` is a specification.  Its head of ``#`` lines says what it is about;
``== NAME`` begins a session in an empty folder, after the lines that stand before all sessions.

    = NAME TEXT  ${NAME} stands for TEXT
    + PATH       a file; the indented lines that follow are its text
    $ COMMAND    ``pi2 ...`` runs in this process, ``build ...`` makes one of `BUILDERS`,
                 and anything else is a line of the shell
    ? CODE       exit code of the command, if it is not 0
    > TEXT       what the command prints, among other things
    1> TEXT      the same of standard output; without a text, it prints nothing there
    2> TEXT      the same of standard error
    ! TEXT       what it does not print
    ~ PATTERN    a regular expression that matches lines of what it prints
    & NAME PATTERN  ${NAME} stands for what the pattern's group matches

``${ROOT}`` is this repository, ``${HERE}`` the session's folder.  Git knows an author.
"""

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomlkit

from pi2.cli.main import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/sessions"
SLOW = " (slow)"


def build_tiny(folder: Path) -> None:
    """``store`` with a random model, and ``tiny.plan.toml``, which runs it."""
    from tests.helpers.models import make_tiny
    from tests.helpers.plans import write_plan

    write_plan(folder, make_tiny(folder))


def build_gguf(folder: Path) -> None:
    """``model.gguf``, which runs as it is."""
    from tests.helpers.gguf_files import write_random_gguf

    write_random_gguf(folder, {"hidden": 256, "ffn": 4096, "layers": 4, "context": 512})


def build_checkpoint(folder: Path) -> None:
    """``checkpoint``, and ``tiny.model.toml`` about it."""
    from tests.helpers.checkpoints import write_checkpoint
    from tests.helpers.models import draw_weights, make_model

    model = make_model()
    write_checkpoint(folder / "checkpoint", model, draw_weights(model))
    document = model.model_dump(mode="json", exclude_none=True)
    (folder / "tiny.model.toml").write_text(tomlkit.dumps(document))


def build_tap(folder: Path) -> None:
    """``tap``, a repository of profiles with a device, tagged ``v1``."""
    from tests.helpers.sharing import make_repository

    make_repository(folder / "tap")


BUILDERS: Mapping[str, Callable[[Path], None]] = {
    "tiny": build_tiny,
    "gguf": build_gguf,
    "checkpoint": build_checkpoint,
    "tap": build_tap,
}


@dataclass(slots=True)
class Step:
    """A file or a command, and what stands below it."""

    place: str
    sign: str
    text: str
    lines: list[str]
    """Text of a file."""
    expected: list[tuple[str, str]]
    """Signs and texts that are expected of a command."""


def read_sessions(path: Path) -> dict[str, list[Step]]:
    """Steps of each session, by its name."""
    given: list[Step] = []
    sessions: dict[str, list[Step]] = {}
    steps = given
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        sign, _, text = line.partition(" ")
        if line.startswith("    ") or not line:
            if steps and steps[-1].sign == "+":
                steps[-1].lines.append(line[4:])
        elif sign == "==":
            assert text not in sessions, f"{path.name}:{number}: this name stands twice"
            steps = sessions[text] = []
        elif sign in ("=", "+", "$"):
            steps.append(Step(f"{path.name}:{number}", sign, text, [], []))
        elif sign in ("?", ">", "1>", "2>", "!", "~", "&"):
            steps[-1].expected.append((sign, text))
        else:
            assert sign == "#", f"{path.name}:{number}: unknown sign {sign}"
    return {name: given + own for name, own in sessions.items()}


def list_sessions() -> Iterator[tuple[Path, str]]:
    for path in sorted(FOLDER.glob("*.session")):
        yield from ((path, name) for name in read_sessions(path))


def play(steps: Sequence[Step], folder: Path, capture: pytest.CaptureFixture[str]) -> None:
    """Run a session's steps in ``folder``, the working folder."""
    names = {"ROOT": str(ROOT), "HERE": str(folder)}
    for step in steps:
        if step.sign == "=":
            name, _, text = step.text.partition(" ")
            names[name] = _fill(text, names)
            continue
        if step.sign == "+":
            path = folder / step.text
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_fill("\n".join(step.lines).rstrip("\n") + "\n", names), "utf-8")
            continue
        code, out, err = _run(_fill(step.text, names), folder, capture)
        signs = dict(step.expected)
        told = f"{step.place}: $ {step.text}\nends with {code}\n{out}{err}"
        assert code == int(signs.get("?", 0)), told
        for sign, text in step.expected:
            if sign == "&":
                name, _, pattern = text.partition(" ")
                found = re.search(pattern, out + err, re.MULTILINE)
                assert found is not None, f"{sign} {text}\n{told}"
                names[name] = found[1]
                continue
            assert _holds(sign, _fill(text, names), out, err), f"{sign} {text}\n{told}"


def _fill(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def _run(line: str, folder: Path, capture: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    program, *words = shlex.split(line)
    if program == "pi2":
        capture.readouterr()
        return run(words), *capture.readouterr()
    if program == "build":
        BUILDERS[words[0]](folder)
        return 0, "", ""
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout, done.stderr


def _holds(sign: str, text: str, out: str, err: str) -> bool:
    match sign:
        case "1>" | "2>":
            printed = out if sign == "1>" else err
            return text in printed if text else not printed
        case "!":
            return text not in out + err
        case "~":
            return re.search(text, out + err, re.MULTILINE) is not None
        case _:
            return sign == "?" or text in out + err
