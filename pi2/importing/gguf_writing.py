"""Writes GGUF files: header, then tensors one after the other, made as they are written."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pi2.arrays import U8
from pi2.diagnostics import UserError
from pi2.formats import Format

_ALIGNMENT = 32
_NUMBER, _TEXT = 4, 8
Pieces = Callable[[], Iterable[U8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    """Rows first."""
    format: Format
    pieces: Pieces
    """Gives its bytes, one after the other."""

    @property
    def size_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.format.count_bytes(self.shape[-1])


def write_number(key: str, value: int) -> bytes:
    """A key with a whole number of 32 bits."""
    return _write_text(key.encode()) + struct.pack("<II", _NUMBER, value)


def write_text(key: str, value: bytes) -> bytes:
    """A key with a text in UTF-8."""
    return _write_text(key.encode()) + struct.pack("<I", _TEXT) + _write_text(value)


def write_gguf(file: Path, keys: Mapping[str, bytes], tensors: Sequence[NewTensor]) -> None:
    """Write ``file``, which appears when it is whole.  ``keys``: each with its value, as bytes.

    Raises `UserError` P523 if it cannot be written, and what pieces raise.
    """
    keys = {"general.alignment": write_number("general.alignment", _ALIGNMENT), **keys}
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
            stream.writelines(keys.values())
            stream.writelines(_describe(tensors))
            for tensor in tensors:
                stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
                start = stream.tell()
                for piece in tensor.pieces():
                    piece.tofile(stream)
                written = stream.tell() - start
                assert written == tensor.size_bytes, (tensor.name, written)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        raise UserError.of(
            "P523",
            f"cannot write {file}: {error.strerror}",
            help="choose another file with -o, or free disk space",
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _describe(tensors: Iterable[NewTensor]) -> Iterator[bytes]:
    offset = 0
    for tensor in tensors:
        sizes = tensor.shape[::-1]
        yield _write_text(tensor.name.encode())
        yield struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        yield struct.pack("<IQ", tensor.format.number, offset)
        offset += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT


def _write_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
