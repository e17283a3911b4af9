"""docs/python.md, docs/device-file.md, docs/dry-run.md and docs/split.md say what is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pi2
from pi2.cli.main import run
from pi2.plan.checking.check import check_file
from tools import write_api_docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def find_blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_reference_is_as_the_docstrings_are() -> None:
    text = (DOCS / "python.md").read_text("utf-8")
    wanted = write_api_docs.make_page(text)
    assert text == wanted, "run `python tools/write_api_docs.py` and commit docs/python.md"


def test_the_python_reference_has_every_public_name() -> None:
    text = (DOCS / "python.md").read_text("utf-8")
    for name in pi2.__all__:
        assert name == "__version__" or f"### pi2.{name}\n" in text, name
    for name in ("generate()", "generate_batch()", "logits()", "close()"):
        assert f"#### {name}\n" in text


def test_the_examples_in_python_run() -> None:
    guide = (DOCS / "python.md").read_text("utf-8").partition(write_api_docs.BEGIN)[0]
    examples = re.findall(r"^```python\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "length" in done.stdout
    assert "P231" in done.stdout


def test_the_device_file_is_explained_from_its_first_line_to_its_last() -> None:
    shown = "\n".join(find_blocks("device-file.md", "toml"))
    file = (ROOT / "plans/devices/oneplus-12.device.toml").read_text("utf-8")
    assert [line for line in shown.splitlines() if line] == [
        line for line in file.splitlines() if line
    ]


def test_the_codes_that_guides_name_are_about_what_they_say() -> None:
    wanted = {
        "device-file.md": {
            "P203": "budget",
            "P221": "stride",
            "P230": "threads",
            "P330": "figures",
            "P351": "figures",
            "P403": "vendor",
        },
        "split.md": {
            "P210": "add up to 1",
            "P211": "units",
            "P262": "at most one dense unit",
            "P263": "is hot",
            "P265": "backend can compute",
            "P614": "end of the run",
        },
    }
    from pi2.plan.checking.check import load_pages

    pages = load_pages()
    for page, codes in wanted.items():
        named = set(re.findall(r"P\d{3}", (DOCS / page).read_text("utf-8")))
        assert named == set(codes), page
        for code, word in codes.items():
            assert word in pages[code].what, (code, pages[code].what)


def test_the_commands_for_dry_runs_run_dry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    lines = find_blocks("dry-run.md", "sh")[0].splitlines()
    assert len(lines) == 2
    for line in lines:
        assert run(shlex.split(line)[1:]) == 0
        assert capsys.readouterr().err.count("dry run:") == 1


def test_the_split_means_the_neurons_that_the_guide_says(tmp_path: Path) -> None:
    """The split of the example, in a plan for a layer of 14,336 neurons."""
    text = find_blocks("split.md", "toml")[0]
    path = tmp_path / "my.plan.toml"
    path.write_text(
        'schema_version = 2\nextends = ["oneplus-12/bamboo-7b-half"]\nremove = ["layers"]\n'
        'memory.budget = "8 GiB"\n' + text
    )
    resolved = check_file(path).resolved
    assert resolved is not None
    assert resolved.model.layer_neurons == 14336
    assert resolved.layers[4].hot_neurons == 6451
    assert dict(resolved.layers[4].split) == {"npu": 0.45, "cpu": 0.55}
    assert dict(resolved.layers[0].split) == {"cpu": 1.0}
