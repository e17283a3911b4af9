"""Keys and values of prompts in files: blocks of tokens, found by the tokens before them.

A block's name is a hash of all tokens up to its end, so that the same beginning has the same names,
and of whatever else its bytes depend on.  Its file has a checksum; one that is damaged is removed.
Files that were not used for longest go first when there are too many bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32, U8
from pi2.logging import get_logger

_MAGIC = b"pi2kept1"
_HEAD = len(_MAGIC) + 32 + 8 + 1
_SUFFIX = ".kept"


@dataclass(frozen=True, slots=True)
class Block:
    """What is kept of a block of tokens."""

    context: U8
    """Keys and values [n]."""
    state: F32
    """States after its last token [n]; empty for models without, and where they are not known."""
    is_exact: bool
    """Whether it is what any prompt gives that begins with these tokens."""


def name_blocks(identity: bytes, ids: Sequence[int], size: int) -> list[str]:
    """Names of the whole blocks of ``size`` tokens that ``ids`` begin with; ``identity``: what
    their bytes depend on besides."""
    names, digest = [], hashlib.sha256(identity).digest()
    tokens = np.asarray(ids, np.int64)
    for end in range(size, len(tokens) + 1, size):
        digest = hashlib.sha256(digest + tokens[end - size : end].tobytes()).digest()
        names.append(digest.hex())
    return names


class PrefixFiles:
    """A folder of blocks.  Other processes may use it, too."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """``limit_bytes``: what the files may have together."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes of each, those that were used longest ago first."""
        self._total = 0
        self._works = True
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            entries = [entry for entry in os.scandir(folder) if entry.name.endswith(_SUFFIX)]
            found = sorted((entry.stat().st_mtime_ns, entry.name) for entry in entries)
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        except OSError as error:
            self._give_up(error)
            return
        for _, name in found:
            self._note(name.removesuffix(_SUFFIX), sizes[name])
        self._evict()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._total

    def count_known(self, names: Sequence[str]) -> int:
        """How many of ``names`` there are without a gap, from the first."""
        for number, name in enumerate(names):
            if name not in self._sizes:
                return number
        return len(names)

    def read(self, name: str) -> Block | None:
        """What is kept under a name; None if it is damaged or gone, and then it is removed."""
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            self._remove(name)
            return None
        body = memoryview(data)[_HEAD - 9 :]
        stated = data[len(_MAGIC) : len(_MAGIC) + 32]
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != stated:
            get_logger().warning("a damaged prefix is removed", file=path.name)
            self._remove(name)
            return None
        size = int.from_bytes(data[_HEAD - 9 : _HEAD - 1], "little")
        self._sizes.move_to_end(name)
        values = np.frombuffer(data, np.uint8, offset=_HEAD)
        return Block(values[size:], values[:size].view(np.float32), is_exact=data[_HEAD - 1] == 1)

    def write(self, name: str, block: Block) -> None:
        """Keep a block, unless it is there already."""
        if name in self._sizes or not self._works:
            return
        state = block.state.tobytes()
        facts = len(state).to_bytes(8, "little") + bytes([block.is_exact])
        body = facts + state + block.context.tobytes()
        size = _HEAD - len(facts) + len(body)
        if size > self._limit_bytes:
            return
        head = _MAGIC + hashlib.sha256(body).digest()
        path = self._path(name)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            with open(temporary, "wb") as file:
                file.write(head)
                file.write(body)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._give_up(error)
            return
        self._note(name, size)
        self._evict()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _note(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self._total += size

    def _remove(self, name: str) -> None:
        self._total -= self._sizes.pop(name, 0)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def _evict(self) -> None:
        while self._total > self._limit_bytes:
            self._remove(next(iter(self._sizes)))

    def _give_up(self, error: OSError) -> None:
        """Go on without writing: prompts are read instead."""
        if self._works:
            get_logger().warning("prefixes are not kept in files", reason=str(error.strerror))
        self._works = False
