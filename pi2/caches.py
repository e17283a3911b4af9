"""Folders of what pi2 can make or fetch again, below ``PI2_CACHE_DIR``, else ``XDG_CACHE_HOME/pi2``
or ``~/.cache/pi2``; deletable at any time."""

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Literal

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a FIFO, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
)

GGUF_MAGICS = {b"GGUF": False, b"PWRI": True}
"""How GGUF files begin.  PowerInfer's have a magic of their own; nothing else differs."""


def check_regular(path: Path) -> os.stat_result:
    """The facts of the file ``path``; `OSError` if it is none."""
    found = os.stat(path)
    _check(path, found.st_mode)
    return found


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a file for reading, with further ``flags`` of the system; returns the descriptor."""
    check_regular(path)
    # It may be another by now: O_NONBLOCK waits for nobody.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    try:
        _check(path, os.fstat(descriptor).st_mode)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_stream(path: Path) -> FileIO:
    """Open a regular file as a stream without a buffer."""
    return FileIO(open_regular(path), "rb")


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` whole or not at all, in a folder that is made; raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_gguf(path: Path) -> bool:
    if path.name.endswith(".toml"):
        return False
    try:
        with open_stream(path) as file:
            return has_gguf_suffix(path) or file.read(4) in GGUF_MAGICS
    except (OSError, ValueError):  # it cannot be read, or no file can have the name
        return False


def has_gguf_suffix(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def show_path(path: Path) -> str:
    """The path as text that can be written anywhere: bytes that are not UTF-8 are ``\\xff``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_regular(path: Path) -> bytes:
    with open_stream(path) as file:
        return file.read()


def _check(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    problem = next((text for test, text in _KINDS if test(mode)), "it is not a file")
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, problem, str(path))


VARIABLE = "PI2_CACHE_DIR"
RECORD = "source.json"
"""A pulled or converted model's file that names its source."""

_NO_HOME = Path("/nonexistent")
"""What Debian calls the home of accounts without one."""
_NO_CODE = getattr(os, "ST_NOEXEC", 0)

Kept = Literal[
    "downloads",
    "kernels",
    "profiles",
    "history",
    "peers",
    "prefixes",
    "tokenizers",
    "checked",
    "found",
]


def find_cache_folder(kept: Kept, environment: Mapping[str, str] | None = None) -> Path:
    """The absolute folder for a ``kept`` kind of data, which may not exist."""
    return find_kept(kept, "XDG_CACHE_HOME", ".cache", environment)


def find_kept(
    name: str, variable: str, usual: str, environment: Mapping[str, str] | None = None
) -> Path:
    """The folder ``name`` below ``PI2_CACHE_DIR``, else below `find_common`."""
    values = os.environ if environment is None else environment
    own = values.get(VARIABLE)
    return (Path(own).absolute() if own else find_common(variable, usual, values)) / name


def find_common(variable: str, usual: str, environment: Mapping[str, str]) -> Path:
    """The folder ``pi2`` in the user's folder that ``variable`` names, else in ``usual`` of the
    home; an empty or relative value does not count."""
    common = Path(environment.get(variable, ""))
    return (common if common.is_absolute() else find_home(environment) / usual) / "pi2"


def find_home(environment: Mapping[str, str]) -> Path:
    """The user's home, absolute: ``HOME``, else the account's.  If neither is one, a missing folder
    that only root could make."""
    stated = environment.get("HOME", "")
    if Path(stated).is_absolute():
        return Path(stated)
    import pwd  # not every system has it

    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return _NO_HOME
    return home if home.is_absolute() else _NO_HOME


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
