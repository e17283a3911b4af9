"""Where pi2 keeps what it can make or fetch again: one folder of the user's for everything.

``PI2_CACHE_DIR`` names it; without, it is ``pi2`` in the folder that ``XDG_CACHE_HOME`` names, as a
rule ``~/.cache``.  Compiled kernels, fetched profiles, what is known of tokenizers, keys and
values of prompts and the GGUF files of comparisons have a folder each in it.  It can be deleted at
any time.  Downloads that are under way (``downloads``) go there, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

VARIABLE = "PI2_CACHE_DIR"

Kept = Literal["downloads", "kernels", "profiles", "history", "peers", "prefixes", "tokenizers"]


def find_cache_folder(kept: Kept, environment: Mapping[str, str] | None = None) -> Path:
    """The folder for what is ``kept``, absolute; it may not exist yet.

    ``environment`` stands for the process's variables; empty ones count as not set, and so does a
    relative ``XDG_CACHE_HOME``, as the XDG specification demands.
    """
    values = os.environ if environment is None else environment
    own = values.get(VARIABLE)
    if own:
        return Path(own).absolute() / kept
    common = values.get("XDG_CACHE_HOME")
    if common and Path(common).is_absolute():
        return Path(common) / "pi2" / kept
    return Path(os.path.expanduser("~/.cache")) / "pi2" / kept
