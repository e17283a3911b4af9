"""The JSON Schemas are what editors understand, and say something about every key."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.helpers.shipped_plans import SCHEMAS

ROOT = Path(__file__).parents[2]


def walk_keys(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for table, item in {"": schema, **schema["definitions"]}.items():
        for key, value in item.get("properties", {}).items():
            yield f"{table}.{key}", value


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def leads_to_table(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    """Whether the value is a table or an array of tables that the schema describes."""
    item = value.get("items", value)
    options = item.get("allOf", [item])
    return any("$ref" in option for option in options) or "patternProperties" in item


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_key_is_described(file: str) -> None:
    for key, value in walk_keys(SCHEMAS[file]):
        text = value["description"]
        assert text[0].isupper() or text[0] in "`*", (key, text)
        assert text.rstrip().endswith((".", "`)")), (key, text)
        assert "``" not in text, key
        assert value["title"], key


@pytest.mark.parametrize("file", SCHEMAS)
def test_every_value_has_examples_that_fit(file: str) -> None:
    schema = SCHEMAS[file]
    for key, value in walk_keys(schema):
        if leads_to_table(schema, value):
            continue
        assert value.get("examples"), key
        rules = jsonschema.Draft7Validator({**value, "definitions": schema["definitions"]})
        for example in value["examples"]:
            rules.validate(example)


@pytest.mark.parametrize("file", SCHEMAS)
def test_it_is_draft_7_of_what_all_editors_know(file: str) -> None:
    schema = SCHEMAS[file]
    jsonschema.Draft7Validator.check_schema(schema)
    for item in walk(schema):
        assert not {"prefixItems", "$defs", "unevaluatedProperties", "dependentSchemas"} & set(item)
        assert item.get("type") != "null"
        if "$ref" in item:
            assert set(item) == {"$ref"}
        if isinstance(item.get("properties"), dict):
            assert item["additionalProperties"] is False


def lint(folder: Path, *files: str) -> tuple[int, str]:
    """What Tombi, the editors' checker of TOML, says of files; it finds schemas by their lines."""
    program = Path(sys.executable).parent / "tombi"
    done = subprocess.run(
        [str(program), "lint", "--offline", *files],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Schemas, and shipped documents beside them."""
    shutil.copytree(ROOT / "schemas", tmp_path / "schemas")
    shutil.copytree(ROOT / "plans", tmp_path / "plans", ignore=shutil.ignore_patterns("stores"))
    return tmp_path


def test_tombi_takes_every_shipped_document(copied: Path) -> None:
    files = sorted(str(path.relative_to(copied)) for path in copied.rglob("plans/**/*.toml"))
    code, output = lint(copied, *files)
    assert code == 0, output
    assert f"{len(files)} files linted" in output


def test_tombi_points_at_mistakes(copied: Path) -> None:
    path = copied / "plans/demo.plan.toml"
    text = path.read_text("utf-8")
    mistakes = {'\nbudget = "': '\nbudgte = "', ", hot = 0": ", hot = 9", '"fp16"': '"fp"'}
    places = []
    for old, new in mistakes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
        places.append(text[: text.index(new) + (new[0] == "\n")].count("\n") + 1)
    path.write_text(text, "utf-8")
    code, output = lint(copied, "plans/demo.plan.toml")
    assert code != 0
    found = re.findall(r"demo\.plan\.toml:(\d+):", output)
    assert sorted({int(line) for line in found}) == sorted(places), output
