"""The README keeps its word: its commands, its plan and its Python examples are real."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pi2.cli.commands import list_commands, list_groups

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def find_blocks(language: str) -> list[str]:
    """Code blocks of the README in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def find_excess(part: Any, whole: Any, place: str = "") -> list[str]:
    """Where ``part`` says something that ``whole`` does not."""
    if isinstance(part, dict) and isinstance(whole, dict):
        found = []
        for key, value in part.items():
            found += find_excess(value, whole.get(key), f"{place}.{key}".lstrip("."))
        return found
    return [] if part == whole else [place]


def test_exactly_two_commands_to_copy() -> None:
    first, second = find_blocks("sh")
    assert first.startswith("python3 -m venv .venv && ")
    assert "pi2 run plans/demo.plan.toml" in first
    assert second.startswith("python3 -m venv .venv && ")
    assert second.rstrip().endswith("-m pytest -q -n 2 --dist loadfile")
    assert first.count("\n") == second.count("\n") == 1


def test_commands_come_right_after_three_sentences() -> None:
    opening = README.split("```sh")[0].removeprefix("# pi2").strip()
    sentences = re.split(r"(?<=\.)\s+", opening.split("\n\n")[0])
    assert len(sentences) == 3


def test_plan_excerpt_is_in_the_demo_plan() -> None:
    (excerpt,) = find_blocks("toml")
    demo = tomllib.loads((ROOT / "plans/demo.plan.toml").read_text(encoding="utf-8"))
    assert find_excess(tomllib.loads(excerpt), demo) == []


def test_every_command_is_in_the_table() -> None:
    assert set(re.findall(r"`pi2 (\w+)", README)) == set(list_commands())


def test_tables_of_commands_are_the_sections_of_the_help() -> None:
    tables = re.findall(r"^\| (\w+) \| \|\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    found = {name.capitalize(): set(re.findall(r"`pi2 (\w+)", rows)) for name, rows in tables}
    assert found == {name: set(commands) for name, commands in list_groups().items()}


@pytest.mark.parametrize("number", range(2))
def test_python_example_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = find_blocks("python")[number]
    monkeypatch.chdir(ROOT)
    exec(compile(example, f"README example {number + 1}", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
