"""Reads the list of shards of a folder of MLC-LLM, and checks shards against it.

``{"records": [{"dataPath", "format": "raw-shard", "nbytes", "md5sum", "records": [{"name", "shape",
"dtype", "format", "nbytes", "byteOffset"}]}]}``; numbers are little-endian, and tensors of the
format ``f32-to-bf16`` are stored in half of their float32's bytes.
"""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pi2.diagnostics import UserError
from pi2.importing.checkpoint import read_json
from pi2.importing.places import check_place
from pi2.regular_file import open_stream

STORAGE = {
    "float16": "<f2",
    "float32": "<f4",
    "bfloat16": "<u2",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "int8": "|i1",
    "int32": "<i4",
}
"""Names that numpy has for the list's types."""
_READ_BYTES = 2**22


class Shard:
    """A file of tensors; it is compared with its MD5 sum when it is first read."""

    def __init__(self, file: Path, size_bytes: int, md5: str | None) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self._md5 = md5
        self._lock = threading.Lock()

    def check(self, tensor: str) -> None:
        """`UserError` P532, naming ``tensor``, if the file is not what the list says."""
        with self._lock:
            if self._md5 is None:
                return
            digest = hashlib.md5(usedforsecurity=False)
            try:
                with open_stream(self.file) as file:
                    while piece := file.read(_READ_BYTES):
                        digest.update(piece)
            except OSError as error:
                raise _bad_file(self.file, error.strerror or str(error)) from None
            if digest.hexdigest() != self._md5:
                raise _bad_file(
                    self.file, f"its MD5 sum is not the listed one; it holds tensor {tensor!r}"
                )
            self._md5 = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A tensor of the list and the place of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Type of the tensor as the list states it."""
    storage: str
    """The type that is in the file: ``bfloat16`` where float32 was shortened."""
    shard: Shard
    offset: int
    size_bytes: int


def list_records(folder: Path, index: Path) -> dict[str, Record]:
    """Tensors of all shards by name; raises as `pi2.importing.mlc_checkpoint.open_mlc`."""
    shards = read_json(index).get("records")
    if not isinstance(shards, list) or not shards:
        raise _bad_file(index, "it has no records")
    found: dict[str, Record] = {}
    for number, entry in enumerate(shards):
        shard = _open_shard(folder, index, number, entry)
        end, before = 0, ""
        records = [_read_record(index, shard, record) for record in entry["records"]]
        for record in sorted(records, key=lambda record: record.offset):
            if record.name in found:
                raise UserError.of("P536", f"{index} has tensor {record.name!r} twice")
            if record.offset < end:
                raise _bad_file(
                    index, f"the tensors {before!r} and {record.name!r} overlap in {shard.file}"
                )
            end, before = record.offset + record.size_bytes, record.name
            if end > shard.size_bytes:
                raise _bad_file(
                    shard.file,
                    f"it is cut: {shard.size_bytes} bytes, but tensor {before!r} ends at {end}",
                )
            found[record.name] = record
    return found


def _open_shard(folder: Path, index: Path, number: int, entry: Any) -> Shard:
    try:
        name, size, inner = entry["dataPath"], entry["nbytes"], entry["records"]
        kind, md5 = entry.get("format", "raw-shard"), entry.get("md5sum")
        fits = isinstance(name, str) and type(size) is int and isinstance(inner, list)
        if not fits or kind != "raw-shard" or not isinstance(md5, str | None):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise _bad_file(index, f"the entry of shard {number} is malformed") from None
    if name != Path(name).name or name in ("", ".", ".."):
        raise UserError.of(
            "P538",
            f"the list puts tensors into {name!r}, which is not a file name",
            help="shards must lie in the folder itself",
            file=str(index),
        )
    tensor = _name_first(inner)
    file = folder / name
    try:
        found = check_place(folder, file).st_size
    except FileNotFoundError:
        raise UserError.of(
            "P533",
            f"there is no {file}, which should hold tensor {tensor!r}",
            help="download the folder again",
        ) from None
    except OSError as error:
        raise _bad_file(file, error.strerror or str(error)) from None
    if found != size:
        problem = "it is cut" if found < size else "it is not the listed file"
        raise _bad_file(file, f"{problem}: {found} bytes, not {size}; it holds tensor {tensor!r}")
    return Shard(file, size, md5)


def _read_record(index: Path, shard: Shard, entry: Any) -> Record:
    try:
        name, shape, dtype = entry["name"], entry["shape"], entry["dtype"]
        size, offset, kind = entry["nbytes"], entry["byteOffset"], entry.get("format", "raw")
        numbers = [*shape, size, offset]
        if not isinstance(name, str) or not all(type(number) is int for number in numbers):
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        label = _name_first([entry])
        problem = f"the entry of tensor {label!r} in {shard.file.name} is malformed"
        raise _bad_file(index, problem) from None
    storage = "bfloat16" if kind == "f32-to-bf16" and dtype == "float32" else dtype
    if storage not in STORAGE:
        raise UserError.of(
            "P535",
            f"tensor {name!r} in {shard.file} has the type {dtype}",
            help=f"convert it to one of {', '.join(STORAGE)}",
        )
    if not shape or min(numbers) < 0:
        raise _bad_file(index, f"tensor {name!r} has a negative size, or none")
    if math.prod(shape) * np.dtype(STORAGE[storage]).itemsize != size:
        raise _bad_file(index, f"tensor {name!r} has not the bytes that its shape needs")
    return Record(
        name=name,
        shape=tuple(shape),
        dtype=dtype,
        storage=storage,
        shard=shard,
        offset=offset,
        size_bytes=size,
    )


def _name_first(records: list[Any]) -> str:
    """Name of the first tensor of a list that may be malformed."""
    first = records[0] if records else None
    return str(first.get("name", "?")) if isinstance(first, dict) else "?"


def _bad_file(path: Path, problem: str) -> UserError:
    return UserError.of(
        "P532", f"cannot read {path}: {problem}", help="download or export the folder again"
    )
