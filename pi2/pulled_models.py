"""Pulled models below ``PI2_CACHE_DIR`` or ``XDG_DATA_HOME/pi2/models``: stores with origin."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from pi2.caches import RECORD as RECORD
from pi2.caches import Kept, find_cache_folder, find_kept
from pi2.diagnostics import UserError

PLAN = "default.plan.toml"
FILE = "model.gguf"
"""The weights of a model that runs as a GGUF file."""
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_LEAVING = ".leaving-"
"""Begins the name of a model that is being removed."""


@dataclass(frozen=True)
class _Record:
    """What a model's record says."""

    def write(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class Source(_Record):
    """What a store was made from: a commit of a repository."""

    repository: str
    """``ORG/NAME``."""
    revision: str
    """The request: a branch, a tag or a commit."""
    commit: str
    quantization: str | None
    file: str | None = None
    """The one of several GGUF models."""

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.commit[:12]}" + (f" {self.file}" if self.file else "")


@dataclass(frozen=True, kw_only=True)
class LocalSource(_Record):
    """What a store was made from: a checkpoint on this machine."""

    path: str
    """The file or folder, absolute."""
    files: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change (ns) of each file, which differ if it is another one."""
    quantization: str | None = None
    tokenizer: str | None = None
    """The file of a tokenizer that was given, absolute."""

    @property
    def name(self) -> str:
        return self.path

    @classmethod
    def describe(cls, path: Path, tokenizer: Path | None = None) -> LocalSource:
        """The checkpoint at ``path`` as it is now, with the file of another ``tokenizer``; parts of
        a split GGUF model count."""
        place = path.resolve()
        split = re.fullmatch(r"(.+-)\d{5}(-of-\d{5}\.gguf)", place.name, re.IGNORECASE)
        files = [place]
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.is_file())
        elif split is not None:
            parts = re.compile(re.escape(split[1]) + r"\d{5}" + re.escape(split[2]))
            files = sorted(file for file in place.parent.iterdir() if parts.fullmatch(file.name))
            place = files[0]
        if tokenizer is not None:
            tokenizer = tokenizer.resolve()
            files.append(tokenizer)
        stats = [(file.name, file.stat()) for file in files]
        described = ((name, found.st_size, found.st_mtime_ns) for name, found in stats)
        given = None if tokenizer is None else str(tokenizer)
        return cls(path=str(place), files=tuple(described), tokenizer=given)


_SOURCES: TypeAdapter[Source | LocalSource] = TypeAdapter(Source | LocalSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    name: str
    folder: Path
    source: Source | LocalSource

    @property
    def plan(self) -> Path:
        """The plan that was made for this machine; there may be none."""
        return self.folder / PLAN

    def measure_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def find_models_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder, absolute; it may not exist yet."""
    return find_kept("models", "XDG_DATA_HOME", ".local/share", environment)


def list_models() -> list[PulledModel]:
    """All pulled models, in order of their names."""
    folder = find_models_folder()
    if not folder.is_dir():
        return []
    found = (find_model(path.name) for path in sorted(folder.iterdir()))
    return [model for model in found if model is not None]


def find_model(name: str) -> PulledModel | None:
    if not NAME.fullmatch(name):
        return None
    folder = find_models_folder() / name
    try:
        source = _SOURCES.validate_json((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return None
    return PulledModel(name=name, folder=folder, source=source)


def remove_model(name: str) -> Path:
    """Delete the model ``name`` and leftovers; its folder.  `UserError` P766."""
    model = find_model(name)
    folder = find_models_folder() / name
    partial = folder.with_name(f".{name}.partial")
    leaving = folder.with_name(f"{_LEAVING}{name}")
    is_begun = NAME.fullmatch(name) is not None and partial.is_dir()
    if model is None and not is_begun:
        known = ", ".join(item.name for item in list_models()) or "none"
        raise UserError.of(
            "P766", f"no model {name!r} was pulled or converted", help=f"known are: {known}"
        )
    try:
        for left in (leaving, partial):
            if left.exists():
                shutil.rmtree(left)
        if model is not None:
            folder.rename(leaving)  # a model is there as a whole, or not at all
            shutil.rmtree(leaving)
    except OSError as error:
        raise UserError.of("P766", f"cannot remove {folder}: {error.strerror}") from None
    return folder


_COMPILING_S = 3600
PULLED, CONVERTED = "models", "stores"
KINDS: dict[str, str] = {
    "kernels": "compiled kernels; compiled again in seconds to a minute",
    "peers": "GGUF files of comparisons with llama.cpp; written again by their tools",
    "prefixes": "KV cache of prompts; computed again",
    "tokenizers": "facts about tokenizers; found again",
    "checked": "GGUF files whose scales are finite; checked again",
    "found": "plans of models that other programs fetched; written again",
    "downloads": "pulls that are not finished; fetched again",
    "profiles": "devices that were fetched; `pi2 profile add` fetches them again",
    CONVERTED: "models that `pi2 run FILE` has converted; converted again",
    PULLED: "models that were pulled; `pi2 pull` fetches them again",
    "history": "typed lines of `pi2 chat`; gone for ever",
}
"""Kinds of things, with what becomes of them after they were removed."""
ONLY_NAMED = (CONVERTED, PULLED, "history")
"""Kinds that go if they are named, and not with all others."""
assert set(KINDS) == {*get_args(Kept), PULLED, CONVERTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedThing:
    """A file or folder of the cache."""

    kind: str
    path: Path
    size_bytes: int
    used_s: float
    """When it was read or written last, in seconds since 1970."""


def find_kind_folder(kind: str) -> Path:
    """The folder of a kind; it may not exist."""
    kept = next((name for name in get_args(Kept) if name == kind), None)
    return find_models_folder() if kept is None else find_cache_folder(kept)


def list_cached(kind: str) -> list[CachedThing]:
    """Things of a kind, least recently used first."""
    found = (describe_thing(kind, path) for path in _list_paths(kind))
    return sorted((thing for thing in found if thing is not None), key=lambda thing: thing.used_s)


def _list_paths(kind: str) -> Iterator[Path]:
    if kind in (PULLED, CONVERTED):
        for model in list_models():
            if isinstance(model.source, LocalSource) == (kind == CONVERTED):
                yield model.folder
        return
    folder = find_kind_folder(kind)
    if kind == "profiles":
        folder /= "blobs"
    if folder.is_dir() and not folder.is_symlink():
        for path in sorted(folder.iterdir()):
            if not path.name.startswith("compiling-") or _is_old(path):
                yield path


def _is_old(path: Path) -> bool:
    try:
        return path.lstat().st_mtime < time.time() - _COMPILING_S
    except OSError:
        return False


def describe_thing(kind: str, path: Path) -> CachedThing | None:
    """Size and last use of a file, or of all files of a folder; None if it is gone."""
    try:
        stats = [path.lstat()]
        if path.is_dir() and not path.is_symlink():
            # Listing models reads their records.
            files = [file for file in path.rglob("*") if not file.is_dir()]
            stats += [file.lstat() for file in files if file.name != RECORD or len(files) == 1]
    except OSError:
        return None
    # Of a folder, what is in it counts.
    used = max(max(item.st_atime, item.st_mtime) for item in stats[1:] or stats)
    size = sum(item.st_blocks * 512 for item in stats)
    return CachedThing(kind=kind, path=path, size_bytes=size, used_s=used)


def remove_thing(thing: CachedThing) -> bool:
    """Delete it; False while another process fetches into it.  `UserError` P768."""
    try:
        if thing.kind in (PULLED, CONVERTED):
            remove_model(thing.path.name)
        elif thing.path.is_dir() and not thing.path.is_symlink():
            with _hold(thing.path) as is_free:
                if not is_free:
                    return False
                shutil.rmtree(thing.path)
        else:
            thing.path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError.of("P768", f"cannot remove {thing.path}: {error.strerror}") from None
    return True


@contextmanager
def _hold(folder: Path) -> Iterator[bool]:
    """Hold a folder and its folders as downloads do; whether no other process holds one."""
    held: list[int] = []
    try:
        for path in (folder, *(item for item in folder.rglob("*") if item.is_dir())):
            held.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
            try:
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
    finally:
        for descriptor in held:
            os.close(descriptor)
