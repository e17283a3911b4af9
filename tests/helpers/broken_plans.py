"""The broken documents of tests/plans/broken and what `pi2 validate` is to say of them.

``python -m tests.helpers.broken_plans`` writes the ``.expected`` files anew: read every difference
before committing it.
"""

import contextlib
import io
import os
from pathlib import Path

from pi2.cli.main import run

BROKEN = Path(__file__).parents[1] / "plans" / "broken"


def list_names() -> list[str]:
    return sorted(path.name for path in BROKEN.glob("*.toml"))


def find_expected(name: str) -> Path:
    return BROKEN / f"{name.removesuffix('.toml')}.expected"


def validate(*arguments: str) -> tuple[int, str, str]:
    """Run `pi2 validate` in the folder of broken files: exit code, stdout, stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(BROKEN)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = run(["validate", *arguments])
    finally:
        os.chdir(before)
    return code, stdout.getvalue(), stderr.getvalue()


def main() -> None:
    for name in list_names():
        _, stdout, _ = validate(name)
        find_expected(name).write_text(stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
