"""Parameters of which each push runs some, and CI the others afterwards (`pytest -m slow`)."""

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
STATED: Mapping[str, Mapping[str, Sequence[str]]] = tomllib.loads(
    (TESTS / "slow.toml").read_text("utf-8")
)
"""By file and test, patterns of the parameters that each push runs."""
GPU_APIS = ("opencl", pytest.param("webgpu", marks=pytest.mark.slow), "cuda")
"""Emulated GPUs take long: each push runs one of them."""


def keep_quick(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """``values`` as parameters; all but the ``quick`` ones are marked slow."""
    return [value if value in quick else mark_slow(value) for value in values]


def mark_slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def mark_as_stated(items: Iterable[pytest.Item]) -> list[tuple[str, str, str]]:
    """Mark what `STATED` says of the items' files; return what it says of tests and parameters that
    are not there: file, test, and pattern."""
    unknown: set[tuple[str, str, str]] = set()
    used: set[tuple[str, str, str]] = set()
    for item in items:
        file = os.path.relpath(item.path, TESTS)
        tests = STATED.get(file, {})
        unknown |= {(file, test, own) for test in tests for own in ("", *tests[test])}
        name, _, parameters = item.name.partition("[")
        test = name if name in tests else "*"
        if test not in tests:
            continue
        kept = [own for own in tests[test] if fnmatchcase(parameters.removesuffix("]"), own)]
        used |= {(file, test, own) for own in ("", *kept)}
        if not kept:
            item.add_marker(pytest.mark.slow)
    return sorted(unknown - used)
