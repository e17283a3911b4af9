"""Parameters of which each push runs some, and CI the others afterwards (`pytest -m slow`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

GPU_APIS = ("opencl", pytest.param("webgpu", marks=pytest.mark.slow), "cuda")
"""Emulated GPUs take long: each push runs one of them."""


def keep_quick(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """``values`` as parameters; all but the ``quick`` ones are marked slow."""
    return [value if value in quick else mark_slow(value) for value in values]


def mark_slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
