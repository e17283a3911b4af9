"""Where profiles come from and where they are kept: settings of the user, from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pi2.caches import find_cache_folder

GITHUB = "PI2_GITHUB"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run."""

    cache: Path
    """Folder of everything that was fetched."""
    github: str = "https://github.com"
    """What ``gh:`` stands for; companies have their own."""
    timeout_s: float = 60.0
    """Longest time that one file may take to arrive."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings of the environment's variables ``PI2_GITHUB`` and ``PI2_CACHE_DIR``.

    Empty variables count as not set.
    """
    values = os.environ if environment is None else environment
    github = values.get(GITHUB) or Settings.github
    return Settings(
        cache=find_cache_folder("profiles", values),
        github=github.rstrip("/"),
    )
