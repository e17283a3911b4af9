"""A command reads its plan, and each document that it names, once, whatever its options change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNT = """
import collections, sys
opened = collections.Counter()
def note(event, arguments):
    name = str(arguments[0]).rpartition("/")[2] if event == "open" else ""
    if name.endswith((".plan.toml", ".device.toml", ".model.toml")):
        opened[name] += 1
sys.addaudithook(note)
from pi2.cli.main import run
code = run(sys.argv[1:])
print(sorted(opened.items()), file=sys.stderr)
sys.exit(code)
"""
PLAN = str(ROOT / "plans/demo-two-units.plan.toml")
DOCUMENTS = (
    "[('demo-two-units.plan.toml', 1), ('demo.plan.toml', 1), ('host-two-units.device.toml', 1), "
    "('host.device.toml', 1), ('pi2-demo.model.toml', 1)]"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--prompt", "def ", "--max-tokens", "2"],
        ["run", "--prompt", "def ", "--max-tokens", "2", "--memory", "150 MiB"],
        ["run", "--prompt", "def ", "--max-tokens", "2", "--set", "io.threads=2"],
        ["chat"],
        ["evaluate", "--text", str(ROOT / "README.md"), "--windows", "1", "--context", "32"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[5:6]),
)
def test_a_command_reads_each_document_once(arguments: list[str]) -> None:
    command, *options = arguments
    backend = ["--set", 'backends.cpu="reference"']
    done = subprocess.run(
        [sys.executable, "-c", COUNT, command, PLAN, *options, *backend],
        capture_output=True,
        text=True,
        input="hello\n",
        timeout=120,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == DOCUMENTS, done.stderr
