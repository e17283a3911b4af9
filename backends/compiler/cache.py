"""The cache of compiled kernels, by digest of everything that they depend on."""

from __future__ import annotations

import atexit
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

import pi2
from pi2.backends.compiler.signature import LIBRARY, NO_TOOL, find_signatures
from pi2.caches import VARIABLE, find_cache_folder, find_problem
from pi2.diagnostics import UserError
from pi2.logging import get_logger
from pi2.progress import COMPILING, Progress

if TYPE_CHECKING:
    import subprocess

_DIGITS = 32
_SHARED = (
    *("plan/weights/layout.py", "formats/format.py", "formats/packing.py"),
    *("backends/blocks/machine.py", "backends/blocks/unpacking/block.py"),
    *("backends/blocks/unpacking/codebooks.py", "backends/blocks/unpacking/groups.py"),
    *("backends/blocks/unpacking/k_quants.py", "backends/blocks/room.py"),
    *("model/attention.py", "model/states.py"),
)
"""Modules of pi2 that say how long rows are in kernels, and how blocks of GGUF files are read."""
READY = Path(pi2.__file__).parent / "backends" / "ready"
"""Libraries that were compiled when pi2 was packed, if any."""
_COMPILER = "pi2.backends.compiler.library_compiler"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM_BYTES = 8 << 20
"""Room that compiling needs, or less."""


class Spec(Protocol):
    """Everything but its sources that the code of a library depends on."""

    @property
    def program(self) -> str:
        """The module whose ``read_program`` makes the functions; its folder has their sources."""

    def to_json(self) -> str:
        """Return canonical JSON."""


def compute_key(spec: Spec, triple: str | None = None) -> str:
    """Return the digest of everything that the compiled code depends on; ``triple``: of another
    machine than this one."""
    digest = hashlib.sha256(_hash_sources(_find_sources(spec)))
    digest.update(spec.program.encode())
    digest.update(spec.to_json().encode())
    if triple is not None:
        digest.update(triple.encode())
        digest.update(hashlib.sha256((Path(__file__).parent / "messages.ll").read_bytes()).digest())
    return digest.hexdigest()[:_DIGITS]


@cache
def _hash_sources(folder: Path) -> bytes:
    """The digest of a program's sources and of the compiler, as they are when it is asked first."""
    digest, home = hashlib.sha256(), Path(pi2.__file__).parent
    folders = (Path(__file__).parent, folder)
    sources = [path for own in folders for path in sorted(own.rglob("*.py"))]
    sources += sorted(folder.rglob("*.ll"))
    for path in (*sources, *(home / name for name in _SHARED)):
        digest.update(path.name.encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    # All releases of one version of tvm_ffi call functions alike.
    for package, module, parts in (("apache_tvm", "tvm", 9), ("apache_tvm_ffi", "tvm_ffi", 3)):
        digest.update(".".join(_find_version(package, module).split(".")[:parts]).encode())
    return digest.digest()


def _find_version(package: str, module: str) -> str:
    """The version in the folder's name that an installer left, as `importlib.metadata` says it."""
    found = importlib.util.find_spec(module)
    home = None if found is None or found.origin is None else Path(found.origin).parents[1]
    names = [] if home is None else [path.name for path in home.glob(f"{package}-*.dist-info")]
    if len(names) == 1:
        return names[0].split("-")[1]
    from importlib.metadata import version  # 15 ms

    return version(package)


def _find_sources(spec: Spec) -> Path:
    found = importlib.util.find_spec(spec.program)
    assert found is not None and found.origin is not None, spec.program
    return Path(found.origin).parent


def load_or_compile(spec: Spec, progress: Progress, suffix: str = LIBRARY) -> Path:
    """Return the file of ``spec`` with a suffix, made now unless an intact one is cached."""
    return load_or_compile_several([spec], progress, suffix)[0]


def load_or_compile_several(
    specs: Sequence[Spec], progress: Progress, suffix: str = LIBRARY, triple: str | None = None
) -> list[Path]:
    """Return the files of specs of one program, the slowest to make first; ``triple``: for another
    machine."""
    ready = [None if triple else _find_ready(spec, suffix) for spec in specs]
    rest = [spec for spec, path in zip(specs, ready, strict=True) if path is None]
    made = iter(_keep_or_compile(rest, progress, suffix, triple) if rest else ())
    return [path or next(made) for path in ready]


def _find_ready(spec: Spec, suffix: str) -> Path | None:
    """The library that came with pi2, if one did (`tools/write_ready_kernels.py`)."""
    names = _list_ready()
    return _find_intact(READY, names, compute_key(spec), suffix) if names else None


@cache
def _list_ready() -> list[str]:
    return sorted(os.listdir(READY)) if READY.exists() else []


def _keep_or_compile(
    specs: Sequence[Spec], progress: Progress, suffix: str, triple: str | None
) -> list[Path]:
    # What is for another machine, or for a GPU, is never loaded from the folder.
    runs_code = triple is None and suffix == LIBRARY
    kept = find_cache_folder("kernels")
    problem = _full.get(kept) or find_problem(kept, runs_code=runs_code)
    if problem is None:
        try:
            return _find_or_make(kept, specs, progress, suffix, triple)
        except _NoRoom as error:
            problem = _full[kept] = str(error)
    # A read-only home, say: compile for this process only, and once.
    own = _make_own_folder(kept, problem, runs_code=runs_code)
    try:
        return _find_or_make(own, specs, progress, suffix, triple)
    except _NoRoom as error:
        raise _refuse_folders((kept, problem), (own, str(error))) from None


_full: dict[Path, str] = {}
"""Folders in which there was no room, with the system's words: not tried again."""


class _NoRoom(Exception):
    """A folder has no room for kernels."""


def _find_or_make(
    folder: Path, specs: Sequence[Spec], progress: Progress, suffix: str, triple: str | None
) -> list[Path]:
    """The kernels of ``folder``, made now unless they are there; raises `_NoRoom`."""
    keys = [compute_key(spec, triple) for spec in specs]
    names = sorted(os.listdir(folder))
    found = {key: _find_intact(folder, names, key, suffix) for key in keys}
    missing = {key: spec for key, spec in zip(keys, specs, strict=True) if found[key] is None}
    if not missing:
        get_logger().debug("kernels are cached", files=[str(path) for path in found.values()])
        return [path for key in keys if (path := found[key]) is not None]
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="compiling-") as room:
            made = {key: Path(room) / f"{key}{suffix}" for key in missing}
            _compile(list(missing.values()), list(made.values()), progress, triple)
            for key, temporary in made.items():
                target = folder / f"{key}-{_hash_files(temporary)}{suffix}"
                # The file itself comes last: where a library is, its signatures are.
                if find_signatures(temporary).exists():
                    os.replace(find_signatures(temporary), find_signatures(target))
                os.replace(temporary, target)
                found[key] = target
    except OSError as error:
        if error.errno in _FULL:
            raise _NoRoom(error.strerror) from None
        raise
    except UserError as error:
        words = [os.strerror(number) for number in _FULL]
        notes = "\n".join(error.diagnostics[0].notes)
        word = next((word for word in words if word in notes), None)
        if word is None and shutil.disk_usage(folder).free < _ROOM_BYTES:
            word = words[0]
        if word is not None:
            raise _NoRoom(word) from None
        raise
    seconds = round(time.monotonic() - start, 2)
    files = [str(found[key]) for key in missing]
    get_logger().info("kernels were compiled", files=files, seconds=seconds)
    return [path for key in keys if (path := found[key]) is not None]


@cache
def _make_own_folder(folder: Path, reason: str, *, runs_code: bool) -> Path:
    """Make a folder for this process, and warn that ``folder`` is unusable; `UserError` P655."""
    try:
        common = Path(tempfile.gettempdir())
    except OSError as error:
        raise _refuse_folders((folder, reason), (Path("TMPDIR"), str(error.strerror))) from None
    problem = find_problem(common, runs_code=runs_code)
    if problem is not None:
        raise _refuse_folders((folder, reason), (common, problem))
    get_logger().warning(
        "compiled kernels cannot be kept: every start will compile them again",
        folder=str(folder),
        reason=reason,
        help=f"set {VARIABLE} to a folder that you may write to",
    )
    own = Path(tempfile.mkdtemp(prefix="pi2-kernels-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def _refuse_folders(*tried: tuple[Path, str]) -> UserError:
    (folder, problem), *others = tried
    return UserError.of(
        "P655",
        f"compiled kernels cannot be put into {folder}: {problem}",
        help=f"set {VARIABLE} to a folder with {_ROOM_BYTES >> 20} MiB of room that you may write "
        "to, on a file system that runs code",
        notes=[f"nor into {other}, the folder for temporary files: {why}" for other, why in others],
    )


def _find_intact(folder: Path, names: Sequence[str], key: str, suffix: str) -> Path | None:
    """Return a cached file, of ``names``, named by its content's hash; remove damaged."""
    for name in names:
        if not (name.startswith(f"{key}-") and name.endswith(suffix)):
            continue
        path = folder / name
        try:
            if path.name == f"{key}-{_hash_files(path)}{suffix}":
                return path
            path.unlink()
            find_signatures(path).unlink()
        except OSError:
            continue
    return None


def _hash_files(path: Path) -> str:
    """Return the digest of a file, and of the signatures next to it if it is a library."""
    digest = hashlib.sha256(path.read_bytes())
    signatures = find_signatures(path)
    digest.update(signatures.read_bytes() if signatures.exists() else b"")
    return digest.hexdigest()[:_DIGITS]


def compile_ahead(spec: Spec, output: Path, triple: str, progress: Progress) -> None:
    """Write the library of ``spec`` for another machine, and its signatures next to it, to run
    without TVM; UserError P651 if compiling fails."""
    made = load_or_compile_several([spec], progress, triple=triple)[0]
    shutil.copyfile(made, output)
    if find_signatures(made).exists():
        # Libraries whose kernels take tables have none.
        shutil.copyfile(find_signatures(made), find_signatures(output))


def start_compiler(
    arguments: Sequence[str], errors: TextIO, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start the compiler (`compile`), whose messages are lines of its ``stdout``.

    It takes no code of the working folder, which may have another version of pi2."""
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-P", "-m", _COMPILER, *arguments],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=dict(environment),
    )


def _compile(
    specs: Sequence[Spec], outputs: Sequence[Path], progress: Progress, triple: str | None
) -> None:
    progress(COMPILING, 0.0)
    paths = [str(Path(pi2.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    # The compiler's own files lie beside its output: there is room, or it is said of that folder.
    room = outputs[0].parent
    own = {"TMPDIR": str(room), "LC_ALL": "C"}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | own
    with tempfile.TemporaryDirectory(dir=room) as folder:
        arguments = [specs[0].program]
        for number, (spec, output) in enumerate(zip(specs, outputs, strict=True)):
            spec_path = Path(folder) / f"spec{number}.json"
            spec_path.write_text(spec.to_json())
            arguments += [str(spec_path), str(output)]
        arguments += [triple] if triple else []
        errors = Path(folder) / "errors.txt"
        with errors.open("w") as stream:
            process = start_compiler(arguments, stream, environment)
            missing: str | None = None
            shares: dict[str, float] = {}
            assert process.stdout is not None
            with process:
                try:
                    for line in process.stdout:
                        message = json.loads(line)
                        if "share" in message:
                            shares[message.get("output", "")] = float(message["share"])
                            progress(COMPILING, sum(shares.values()) / len(specs))
                        missing = message.get("missing", missing)
                except BaseException:
                    process.kill()
                    raise
        if process.returncode == 0:
            return
        if process.returncode == NO_TOOL and missing is not None:
            raise UserError.of(
                "P363",
                f"the kernels for the GPU cannot be compiled: {missing}",
                help="pip install 'pi2[cuda]', or run the plan once on a machine that has it and"
                " copy its kernel cache (`pi2 doctor` says where it is)",
            )
        if process.returncode == -signal.SIGKILL:
            raise UserError.of(
                "P651",
                "compiling the kernels was ended by the system, as a rule for lack of memory",
                help="run the plan once where 200 MiB are free: compiled kernels are kept",
            )
        lines = errors.read_text(errors="replace").strip().splitlines()
        raise UserError.of(
            "P651",
            f"compiling the kernels failed (exit status {process.returncode})",
            help="check the installation with `pip check`; apache-tvm needs its exact versions",
            notes=lines[-12:],
        )
