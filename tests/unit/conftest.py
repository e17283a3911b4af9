"""Tests of units compile kernels quickly, and convert a golden model once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.goldens import make_golden_plan


@pytest.fixture(scope="module", autouse=True)
def quick(quick_kernels: None) -> None:
    """What they ask of kernels does not depend on how well these are optimised."""


@pytest.fixture(scope="session")
def make_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Converts a golden model by its name, once for all tests."""
    return cache(lambda name: make_golden_plan(name, tmp_path_factory.mktemp(name)))
