"""Reads importance matrices of llama.cpp: what squared errors of each column of a matrix count.

They are mean squares of a matrix's inputs on a calibration text, by the names that GGUF files have.
Old files (``.dat``) are, after the number of entries, an entry for each matrix: the name, the
number of calls, and sums over them.  GGUF files have ``NAME.in_sum2`` [matrices, columns] and
``NAME.counts`` [matrices, 1].  Both have one row for each expert."""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F32
from pi2.caches import is_gguf, read_regular
from pi2.diagnostics import UserError
from pi2.importing.gguf_file import read_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_NAME = 1024
_EXPERT = re.compile(r"(.+\.ffn_(?:gate|up|down|gate_up))\.(\d+)\.weight")
_LEAST = 1e-5
"""Least weight of a column, by the mean: inputs at 0 in the text are not 0 everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    file: Path
    sums: Mapping[str, F32]
    """Mean squares of inputs, float32 [numbers], by name; experts one after the other."""

    def find(self, name: str, columns: int, experts: int = 1) -> F32 | None:
        """Return what columns count, float32 [experts, columns]; None if the file does not say.

        ``name``: what GGUF files call the matrix, or one of an expert.  Raises `UserError` P548 if
        the file has it with another number of columns."""
        expert = _EXPERT.fullmatch(name)
        found = self.sums.get(name)
        if found is None and expert is not None:
            found = self.sums.get(f"{expert[1]}_exps.weight")
        if found is None:
            return None
        count, rest = divmod(len(found), columns)
        if rest or (expert is None and count not in (1, experts)):
            raise refuse_imatrix(
                self.file, f"{name} has {columns} columns there are {len(found)} numbers for"
            )
        rows = found.reshape(count, columns)
        if expert is not None and count > int(expert[2]):
            rows = rows[int(expert[2])][None]
        mean = rows.mean(axis=1, keepdims=True)
        mean = np.where(mean > 0, mean, 1)
        scaled = np.maximum(rows / mean, np.float32(_LEAST))
        # An expert that no token chose says nothing.
        scaled[~(rows > 0).any(axis=1)] = 1
        return np.ascontiguousarray(np.broadcast_to(scaled, (experts, columns)), np.float32)


def read_imatrix(file: Path) -> Importance:
    """Read a file of either kind; `UserError` P548 if it is something else."""
    try:
        sums = _read_sums(file) if is_gguf(file) else _read_old(read_regular(file))
    except OSError as error:
        raise refuse_imatrix(file, error.strerror or "it cannot be read") from None
    except (ValueError, struct.error, UnicodeDecodeError):
        raise refuse_imatrix(file, "it is cut, or not a file of llama-imatrix") from None
    broken = next((name for name, own in sums.items() if not _is_sound(own)), None)
    if broken is not None:
        raise refuse_imatrix(file, f"numbers of {broken} are negative or not finite")
    if not sums:
        raise refuse_imatrix(file, "it has no matrix")
    return Importance(file=file, sums=sums)


def refuse_imatrix(file: Path, problem: str) -> UserError:
    return UserError.of(
        "P548",
        f"{file} is not an importance matrix of this model: {problem}",
        help="make it with `llama-imatrix -m MODEL -f TEXT -o FILE` from the same model",
    )


def _is_sound(numbers: F32) -> bool:
    return bool(np.isfinite(numbers).all() and (numbers >= 0).all())


def _read_old(content: bytes) -> dict[str, F32]:
    take = struct.Struct("<i").unpack_from
    found, place = {}, 4
    for _ in range(take(content, 0)[0]):
        (length,) = take(content, place)
        if not 0 < length <= _MOST_NAME:
            raise ValueError
        name = content[place + 4 : place + 4 + length].decode()
        place += 4 + length
        (calls,), (count,) = take(content, place), take(content, place + 4)
        if count <= 0:
            raise ValueError
        numbers = np.frombuffer(content, "<f4", count, place + 8)
        place += 8 + 4 * count
        found[name] = np.asarray(numbers / max(1, calls), np.float32)
    return found


def _read_sums(file: Path) -> dict[str, F32]:
    opened = read_gguf(file)
    found = {}
    for name, entry in opened.entries.items():
        counts = opened.entries.get(name.removesuffix(_SUMS) + _COUNTS)
        if not name.endswith(_SUMS) or counts is None:
            continue
        if entry.block.name != "f32" or counts.block.name != "f32":
            raise ValueError
        sums, calls = (
            np.fromfile(file, "<f4", own.size_bytes // 4, offset=own.offset)
            for own in (entry, counts)
        )
        rows = sums.reshape(len(calls), -1) / np.maximum(calls, 1)[:, None]
        found[name.removesuffix(_SUMS)] = np.asarray(rows.reshape(-1), np.float32)
    return found
