"""Tests of units compile kernels quickly, into a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pi2.caches import find_cache_folder
from tests.helpers.compiling import QUICK


@pytest.fixture(scope="module", autouse=True)
def quick_kernels() -> Iterator[None]:
    """What is compiled without optimising never lies where users' runs look for kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PI2_CACHE_DIR", str(find_cache_folder("kernels").parent / "tests"))
        patch.setenv(QUICK, "1")
        yield
