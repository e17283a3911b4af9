"""docs/reference/plan-language.md says what is true."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from pi2.cli.main import run
from pi2.diagnostics.texts import render_full as full
from pi2.fitting.check import check_file
from pi2.fitting.rules import list_rules
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking import rules
from pi2.plan.documents.common import find_type
from pi2.plan.documents.device import Device
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import Plan
from pi2.plan.toml.expressions import list_names, parse_expression
from tools import write_key_docs

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/reference/plan-language.md").read_text("utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("my.plan.toml")
    path.write_text(find_blocks("toml")[0], "utf-8")
    return path


def test_the_example_is_a_sound_plan(example: Path) -> None:
    report = check_file(example)
    assert report.diagnostics == () and report.resolved is not None
    assert [layer.hot_neurons for layer in report.resolved.layers] == [512] * 2 + [128] * 6


def test_the_diagnostic_is_what_validate_answers(example: Path) -> None:
    example.write_text(example.read_text("utf-8").replace("hot = 0.5", "hot = 1.0"))
    report = check_file(example)
    texts = [full([item], sources=report.sources) for item in report.diagnostics]
    assert find_blocks("text")[0] in texts


def test_the_commands_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in "".join(find_blocks("sh")).splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "pi2"
        if arguments[0] != "run":
            assert run(arguments) == 0, line


def list_expressions(table: object) -> Iterator[str]:
    """Conditions of a stated rule, and expressions in its texts."""
    if isinstance(table, str):
        yield from re.findall(r"\{([^{}]+?)(?::(?:g|and|\.0%))?\}", table)
    elif isinstance(table, list):
        for item in table:
            yield from list_expressions(item)
    elif isinstance(table, dict):
        for key, value in table.items():
            if key in ("cases", "needs"):
                yield from (*value.values(), *list_expressions([*value]))
            elif key == "when":
                yield value
            else:
                yield from list_expressions(value)


def test_stated_rules_name_keys_of_documents() -> None:
    kinds: dict[str, type[BaseModel]] = {"plan": Plan, "model": Model, "device": Device}
    tables = tomllib.loads((Path(rules.__path__[0]) / "stated.toml").read_text("utf-8"))
    for code, table in tables.items():
        for text in list_expressions(table):
            for name in list_names(parse_expression(text.replace("{each}", "shape.layers"))):
                kind, _, key = name.partition(".")
                if name.partition(".")[0] in ("each", "case", "item", "n"):
                    continue
                if table["of"] == ["resolved"]:
                    first, _, name = name.partition(".")
                    known = {*ResolvedPlan.__dataclass_fields__, *vars(ResolvedPlan)}
                    assert first in known, (code, first)
                    name = f"{first}.{name}" if first in kinds else ""
                if name in ("", *kinds):
                    continue
                if len(table["of"]) == 1 and table["of"] != ["resolved"]:
                    kind, key = table["of"][0], name
                *outer, last = key.split(".")
                is_known = find_type(kinds[kind], (*outer, last)) is not None
                assert is_known or hasattr(find_type(kinds[kind], outer), last), (code, name)


def test_codes_of_rules_are_unique() -> None:
    codes = [rule.code for rule in list_rules()]
    assert len(codes) == len(set(codes))


def test_the_pages_of_keys_are_as_the_docstrings_are() -> None:
    assert write_key_docs.find_differences() == [], "run `python tools/write_key_docs.py`"
    pages = write_key_docs.make_pages()
    assert "| `memory.segments.cold` |" in pages["reference/plan-keys.md"]
    assert "| `layers.overrides[].select` |" in pages["reference/plan-keys.md"]
    assert "| `units.*.clusters[].cores` |" in pages["reference/device-keys.md"]
    assert "| `rope.share` |" in pages["develop/model-keys.md"]
