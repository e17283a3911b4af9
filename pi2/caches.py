"""Where pi2 keeps what it can make or fetch again: one folder of the user's for everything.

``PI2_CACHE_DIR`` names it; without, it is ``pi2`` in the folder that ``XDG_CACHE_HOME`` names, as a
rule ``~/.cache``.  An account without a home has none unless a variable names it.  Compiled
kernels, fetched profiles, what is known of tokenizers, keys and values of prompts and the GGUF
files of comparisons have a folder each in it.  It can be deleted at any time.  Downloads that are
under way (``downloads``) go there, too.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

VARIABLE = "PI2_CACHE_DIR"

_NO_HOME = Path("/nonexistent")
"""What Debian calls the home of accounts without one."""
_NO_CODE = getattr(os, "ST_NOEXEC", 0)

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
    return find_home(values) / ".cache/pi2" / kept


def find_home(environment: Mapping[str, str]) -> Path:
    """The user's home, absolute: ``HOME``, else that of the account.  Where neither is one, a
    folder that is not there and that nobody but root could make."""
    stated = environment.get("HOME", "")
    if Path(stated).is_absolute():
        return Path(stated)
    import pwd  # not every system has it

    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return _NO_HOME
    return home if home.is_absolute() else _NO_HOME


def find_state_folder(environment: Mapping[str, str]) -> Path:
    """The folder for logs of crashes, absolute."""
    common = Path(environment.get("XDG_STATE_HOME", ""))
    return (common if common.is_absolute() else find_home(environment) / ".local/state") / "pi2"


def find_problem(folder: Path, *, runs_code: bool) -> str | None:
    """What keeps files from being written to ``folder``, which is made if it can be; ``runs_code``:
    and libraries from being loaded from it.  None if nothing does."""
    try:
        str(folder).encode("utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".probe-")
        os.close(handle)
        os.unlink(name)
        flags = os.statvfs(folder).f_flag
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    except OSError as error:
        return error.strerror or str(error)
    return "its file system runs no code (noexec)" if runs_code and flags & _NO_CODE else None
