"""The page at ``/``: one file without a build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


@cache
def read_page() -> bytes:
    """The page."""
    return FILE.read_bytes()
