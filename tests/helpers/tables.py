"""Tables of cases: a test's parameters in ``tests/tables``, a file per file of tests.

A row has the names of the test's parameters; one that a row lacks is None.  ``case`` names a row,
and ``slow = true`` marks it.
"""

import tomllib
from collections.abc import Callable
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "tables"


@cache
def read_tables(stem: str) -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((FOLDER / f"{stem}.toml").read_text("utf-8"))


def in_table(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test_NAME`` of ``test_FILE.py`` with each row of ``[[NAME]]`` in ``FILE.toml``."""
    stem = Path(test.__code__.co_filename).stem.removeprefix("test_")
    rows = read_tables(stem)[test.__name__.removeprefix("test_")]
    names = [name for name in signature(test).parameters if any(name in row for row in rows)]
    unknown = {name for row in rows for name in row} - {*names, "case", "slow"}
    assert not unknown, f"{stem}.toml: {test.__name__} has no parameters {unknown}"
    cases = [
        pytest.param(
            *(row.get(name) for name in names),
            id=row.get("case"),
            marks=[pytest.mark.slow] * row.get("slow", False),
        )
        for row in rows
    ]
    return pytest.mark.parametrize(names, cases)(test)
