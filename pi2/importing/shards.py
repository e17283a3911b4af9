"""Weight files of a checkpoint that come when they are read, and go when nothing needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pi2.arrays import Raw
from pi2.importing.safetensors_file import SourceTensor, parse_safetensors

_SMALL_BYTES = 2**20
"""Most bytes that are read from where the file comes from, without fetching all of it."""


class Shards(Protocol):
    """Where the weight files of a checkpoint come from; `UserError` P761-P764 if they do not."""

    def read_header(self, file: Path) -> tuple[bytes, int]:
        """The first 8 bytes and the header of a safetensors file, and the whole file's size."""

    def read_bytes(self, file: Path, offset: int, count: int) -> bytes:
        """``count`` bytes of a file, without fetching the others."""

    def reserve(self, needed: Collection[Path], most_bytes: int) -> None:
        """Drop all files but those that are ``needed``, and see that there is room for
        ``most_bytes``, the most that will be there at a time."""

    def bring(self, file: Path) -> None:
        """Let the file be there as a whole."""

    def drop(self, file: Path) -> None:
        """Delete the file: nothing needs it any more."""

    def measure(self, file: Path) -> int:
        """Bytes of the file."""

    def describe(self, file: Path) -> list[str | int]:
        """What is equal where the contents of the file are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedTensor(SourceTensor):
    """A tensor of a file that may not be there yet."""

    shards: Shards

    def read_flat(self, offset: int, count: int, storage: str) -> Raw:
        size_bytes = count * np.dtype(storage).itemsize
        if size_bytes <= _SMALL_BYTES and not self.file.exists():
            return np.frombuffer(self.shards.read_bytes(self.file, offset, size_bytes), storage)
        self.shards.bring(self.file)
        # A zero-argument super() does not work in classes with slots.
        return SourceTensor.read_flat(self, offset, count, storage)


def list_streamed(file: Path, shards: Shards) -> dict[str, SourceTensor]:
    """Tensors of a safetensors file that may not be there, by name.

    Raises `UserError` as `parse_safetensors` and `Shards.read_header` do.
    """
    header, size = shards.read_header(file)
    return {
        name: StreamedTensor(
            **{field.name: getattr(tensor, field.name) for field in fields(tensor)}, shards=shards
        )
        for name, tensor in parse_safetensors(file, header, size).items()
    }


def list_files(part: object) -> set[Path]:
    """Files in which a tensor lies, and all those that it is made of; ``part`` may also be rows of
    tensors, a predictor, or a list of such."""
    found = {part.file} if isinstance(part, SourceTensor) else set()
    if is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            found |= list_files(getattr(part, field.name))
    elif isinstance(part, Mapping):
        found |= list_files(list(part.values()))
    elif isinstance(part, list | tuple):
        for item in part:
            found |= list_files(item)
    return found
