"""Guides in docs say what is true: their examples run, and their files and codes exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

import pi2
from pi2.cli.main import LazyGroup
from pi2.fitting.check import check_file
from tests.helpers.programs import Ask
from tools import list_models, write_api_docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def find_blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_python_reference_is_as_the_docstrings_are() -> None:
    text = write_api_docs.PAGE.read_text("utf-8")
    assert text == write_api_docs.make_page(text), "run `python tools/write_api_docs.py`"


def test_the_python_reference_has_every_public_name() -> None:
    text = write_api_docs.PAGE.read_text("utf-8")
    for name in pi2.__all__:
        assert name == "__version__" or f"## pi2.{name}\n" in text, name
    for name in ("generate()", "generate_batch()", "logits()", "close()"):
        assert f"### {name}\n" in text


@pytest.mark.slow
def test_the_examples_in_python_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    examples = find_blocks("howto/use-from-python.md", "python")
    assert len(examples) == 4
    exec("\n".join(examples), {})
    printed = capsys.readouterr().out
    assert "length" in printed and "P231" in printed


def test_the_device_guide_quotes_the_shipped_file() -> None:
    file = (ROOT / "plans/devices/oneplus-12.device.toml").read_text("utf-8")
    blocks = find_blocks("howto/describe-a-device.md", "toml")
    assert len(blocks) == 3
    assert [block for block in blocks if block not in file] == []


def test_the_codes_that_guides_name_are_about_what_they_say() -> None:
    wanted = {
        "howto/describe-a-device.md": {
            "P203": "Budget", "P221": "Stride", "P230": "threads", "P330": "Figure",
            "P351": "Figure", "P403": "vendor",
        },
        "start/concepts.md": {
            "P210": "add up to 1", "P211": "Unit", "P262": "too many units", "P263": "hot",
            "P265": "Backend cannot compute", "P614": "during the run",
        },
    }  # fmt: skip
    from pi2.fitting.check import load_pages

    pages = load_pages()
    for page, codes in wanted.items():
        named = set(re.findall(r"P\d{3}", (DOCS / page).read_text("utf-8")))
        assert named == set(codes), page
        for code, word in codes.items():
            assert word in pages[code].what, (code, pages[code].what)


def test_the_commands_for_dry_runs_run_dry(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.chdir(ROOT)
    lines = find_blocks("howto/simulate.md", "sh")[1].splitlines()
    assert len(lines) == 2
    for line in lines:
        assert ask(shlex.split(line)[1:]).err.count("dry run:") == 1


def test_the_split_means_the_neurons_that_the_guide_says(tmp_path: Path) -> None:
    """The split of the example, in a plan for a layer of 14,336 neurons."""
    text = find_blocks("start/concepts.md", "toml")[0]
    path = tmp_path / "my.plan.toml"
    path.write_text(
        'schema_version = 3\nextends = ["oneplus-12/bamboo-7b-half"]\nremove = ["layers"]\n'
        'memory.budget = "8 GiB"\n' + text
    )
    resolved = check_file(path).resolved
    assert resolved is not None and resolved.model.layer_neurons == 14336
    assert resolved.layers[4].hot_neurons == 6451
    assert dict(resolved.layers[4].split) == {"npu": 0.45, "cpu": 0.55}
    assert dict(resolved.layers[0].split) == {"cpu": 1.0}


def test_the_models_are_as_the_code_has_them() -> None:
    text = list_models.PAGE.read_text("utf-8")
    assert text == list_models.make_page(), "run `python tools/list_models.py`"


def test_the_glossary_has_at_most_thirty_terms_in_order() -> None:
    _, _, glossary = (DOCS / "start/concepts.md").read_text("utf-8").partition("## Glossary\n")
    terms = re.findall(r"^\| ([a-z][^|]*?) \|", glossary, re.MULTILINE | re.IGNORECASE)[1:]
    assert len(terms) <= 30 and terms == sorted(terms, key=str.lower)


def test_every_command_that_a_page_shows_exists() -> None:
    """Its words and its options, in blocks of shell and in text."""
    group = LazyGroup()
    around = click.Context(group)
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8").replace("\\\n", "")
        blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"^    pi2 .*$", text, re.MULTILINE)
        shown = re.findall(r"(?:^[$ ]*|&& )pi2 ([a-z][^\n#]*)", "\n".join(blocks), re.MULTILINE)
        shown += re.findall(r"`pi2 ([a-z][^`\n]*)`", text)
        for line in shown:
            name, *words = line.split()
            command = group.get_command(around, name)
            assert command is not None, (page.name, line)
            if isinstance(command, click.Group) and words and words[0] in command.commands:
                command = command.commands[words[0]]
            known = {text for item in command.params for text in (*item.opts, *item.secondary_opts)}
            named = {word.partition("=")[0] for word in words if word.startswith("--")}
            named = {word.rstrip(".,;:)") for word in named}
            assert named - known - {"--help"} == set(), (page.name, line)
