"""What the cache has: things of every kind with their sizes and last uses, and how they go."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from pi2.caches import Kept, find_cache_folder
from pi2.diagnostics import UserError
from pi2.pulled_models import RECORD, LocalSource, find_models_folder, list_models, remove_model

_COMPILING_S = 3600
PULLED, CONVERTED = "models", "stores"
KINDS: dict[str, str] = {
    "kernels": "compiled kernels; compiled again in seconds to a minute",
    "peers": "GGUF files of comparisons; written again by `pi2 bench --against llama.cpp`",
    "prefixes": "keys and values of prompts; computed again",
    "tokenizers": "what is known of tokenizers; found again",
    "downloads": "pulls that are not finished; fetched again",
    "profiles": "devices that were fetched; `pi2 profile add` fetches them again",
    CONVERTED: "models that `pi2 run FILE` has converted; converted again",
    PULLED: "models that were pulled; `pi2 pull` fetches them again",
    "history": "what was typed in `pi2 chat`; gone for ever",
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
    """Things of a kind, those that were used longest ago first."""
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
    """Whether a compiler that has made a folder must have ended."""
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
    """Delete it; whether it was, which it is not while another process fetches into it.

    `UserError` P768 if it cannot be deleted.
    """
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
    """Hold a folder and those in it as downloads do; gives whether nobody else does."""
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
