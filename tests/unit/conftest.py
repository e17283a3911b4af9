"""Tests of units compile kernels quickly."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(quick_kernels: None) -> None:
    """What they ask of kernels does not depend on how well these are optimised."""
