"""How float32 weights become the codes and scales of a store, and what errors of a column count.

Importance matrices of llama.cpp have mean squares of a matrix's inputs on a calibration text, by
the names that GGUF files have.  Old files (``.dat``) are, after the number of entries, an entry for
each matrix: the name, the number of calls, and sums over them.  GGUF files have ``NAME.in_sum2``
[matrices, columns] and ``NAME.counts`` [matrices, 1].  Both have one row for each expert."""

import re
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from pi2.arrays import F16, F32, U8, Scales
from pi2.caches import is_gguf, read_regular
from pi2.diagnostics import UserError
from pi2.formats import Packing, find_packing
from pi2.formats.fitting import fit_scales, list_tiles, turn_groups
from pi2.importing.gguf_file import read_gguf
from pi2.plan.weights.layout import GROUP, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    tensor: str
    precision: Precision
    relative: float
    """Root of the squared errors' sum, relative to the weights'."""
    largest: float
    """Largest error of a weight."""


@dataclass(slots=True)
class ErrorReport:
    """Adds up errors piece by piece, from several threads."""

    _sums: dict[str, tuple[Precision, float, float, float]] = field(default_factory=dict)
    """Of squared errors, and of squared weights, of each tensor; and its largest error."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, tensor: str, rows: F32, stored: F32, precision: Precision) -> None:
        """Compare ``rows`` [n, length] of ``tensor`` with their ``stored`` version."""
        wrong = stored - rows
        error, size = float(np.vdot(wrong, wrong)), float(np.vdot(rows, rows))
        largest = float(np.abs(wrong).max(initial=0))
        with self._lock:
            known = self._sums.get(tensor, (precision, 0.0, 0.0, 0.0))
            sums = known[1] + error, known[2] + size, max(known[3], largest)
            self._sums[tensor] = known[0], *sums

    def list_errors(self) -> list[TensorError]:
        return [
            TensorError(
                tensor=tensor,
                precision=precision,
                relative=float(np.sqrt(error / size)) if size else 0.0,
                largest=largest,
            )
            for tensor, (precision, error, size, largest) in sorted(self._sums.items())
        ]


def quantize_by_search(
    rows: F32, precision: Precision, importance: F32 | None = None
) -> tuple[U8, Scales | None]:
    """Quantise ``rows`` as `Packing.quantize`, with ``importance`` [length]."""
    packing = find_packing(precision)
    if not packing.is_searched:
        return packing.quantize(rows)
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    weights = None if importance is None else importance.reshape(length // GROUP, GROUP)
    scales = np.empty((count, length // GROUP), np.float16)
    for own in list_tiles(count, length):
        scales[own] = find_scales(groups[own], packing, weights)
    if not np.isfinite(scales).all():
        packing.quantize(rows)  # says what is wrong
    wide = scales.astype(np.float32)[..., None]
    # A scale of 0 stands for zeros.
    codes = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    codes = np.clip(np.rint(codes), -packing.offset, packing.top)
    return packing.pack(codes.astype(np.int8).reshape(count, length)), scales


def find_scales(groups: F32, packing: Packing, importance: F32 | None) -> F16:
    """Best scales float16 [n, g] for ``groups`` [n, g, 32]; ``importance`` [g, 32]."""
    count, per_row, length = groups.shape
    columns = turn_groups(groups, length)
    weights = np.ones_like(columns)
    if importance is not None:
        weights[:] = np.tile(importance.T, (1, count))
    with np.errstate(over="ignore", invalid="ignore"):
        scales = fit_scales(columns, weights, -packing.offset, packing.top)
        return np.asarray(scales.reshape(count, per_row), np.float16)


DAMPING = 0.01
"""Share of the diagonal's mean that is added to the diagonal: inputs that hardly vary would be
trusted too much without it."""


def prepare_moments(moments: F32) -> F32:
    """Upper triangular factor U [length, length] with U^T U = H^-1, from H [length, length]."""
    exact = moments.astype(np.float64)
    mean = float(np.diag(exact).mean())
    exact[np.diag_indices_from(exact)] += DAMPING * mean if mean > 0 else 1.0
    inverse = np.linalg.inv(exact)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T
    return np.ascontiguousarray(factor, np.float32)


def quantize_with_compensation(
    rows: F32, precision: Precision, factor: F32, importance: F32
) -> tuple[U8, F16]:
    """Quantise ``rows`` with ``factor`` [length, length] and ``importance``; ValueError."""
    packing = find_packing(precision)
    count, length = rows.shape
    rest = rows.copy()
    codes = np.empty((count, length), np.int8)
    scales = np.empty((count, length // GROUP), np.float16)
    for group in range(length // GROUP):
        first, end = group * GROUP, (group + 1) * GROUP
        block = rest[:, first:end]
        own = find_scales(block[:, None], packing, importance[None, first:end])[:, 0]
        if not np.isfinite(own).all() or not np.isfinite(block).all():
            raise ValueError("a weight is not a finite number or does not fit into fp16")
        scales[:, group] = own
        wide = own.astype(np.float32)
        reciprocal = np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)
        errors = np.empty((count, GROUP), np.float32)
        for place in range(GROUP):
            column = first + place
            code = np.clip(np.rint(block[:, place] * reciprocal), -packing.offset, packing.top)
            codes[:, column] = code
            error = (block[:, place] - code * wide) / factor[column, column]
            errors[:, place] = error
            block[:, place + 1 :] -= error[:, None] * factor[column, column + 1 : end]
        rest[:, end:] -= errors @ factor[first:end, end:]
    return packing.pack(codes), scales


Method = Literal["nearest", "search", "compensated"]

MOMENTS = "moments"
"""Folder in the statistics of `pi2 activations --moments`."""


def name_moments(layer: int) -> str:
    """File of a layer's second moments E[u u^T] of FFN inputs, float32 [hidden, hidden]."""
    return f"{MOMENTS}/layer-{layer:03d}.npy"


class Quantizer:
    """Quantises rows; thread-safe."""

    def __init__(
        self, method: Method = "nearest", statistics: Path | None = None, *, report: bool = False
    ) -> None:
        """``statistics``: folder of `pi2 activations --moments`, needed by ``compensated``;
        ``report``: keep errors by tensor.  `UserError` P548 if the folder has no moments."""
        self.method: Method = method
        self.errors = ErrorReport() if report else None
        self._statistics = statistics
        self._prepare = lru_cache(maxsize=1)(self._read_moments)
        if statistics is not None and not (statistics / name_moments(0)).is_file():
            raise _explain(statistics, "it has no moments of inputs")
        if method == "compensated" and statistics is None:
            raise UserError.of(
                "P548",
                "the compensated quantiser needs to know the inputs of the matrices",
                help="record them with `pi2 activations PLAN --text FILE -o STATS --moments`, and "
                "give --statistics STATS",
            )

    def describe(self) -> list[object]:
        """What decides the bytes that come out, for the key of a conversion."""
        if self._statistics is None:
            return [self.method]
        files = sorted((self._statistics / MOMENTS).glob("*.npy"))
        return [self.method, *([file.name, file.stat().st_mtime_ns] for file in files)]

    def quantize(
        self,
        rows: F32,
        precision: Precision,
        tensor: str,
        ffn_layer: int | None = None,
        *,
        spread: bool = False,
    ) -> tuple[U8, Scales | None]:
        """Quantise ``rows`` of ``tensor``; ``ffn_layer``: the layer whose input they meet.
        ValueError, `UserError` P548."""
        packing = find_packing(precision)
        if packing.is_searched and self.method != "nearest" and np.isfinite(rows).all():
            packed = self._search(rows, precision, ffn_layer)
        else:
            packed = packing.quantize(rows, spread=spread)
        if self.errors is not None and not packing.is_float32:
            stored = packing.dequantize(*packed, rows.shape[1], spread=spread)
            self.errors.add(tensor, rows, stored, precision)
        return packed

    def _search(
        self, rows: F32, precision: Precision, ffn_layer: int | None
    ) -> tuple[U8, Scales | None]:
        if self._statistics is None or ffn_layer is None:
            return quantize_by_search(rows, precision)
        importance, factor = self._prepare(ffn_layer, rows.shape[1])
        if self.method == "search" or factor is None:
            return quantize_by_search(rows, precision, importance)
        return quantize_with_compensation(rows, precision, factor, importance)

    def _read_moments(self, layer: int, length: int) -> tuple[F32, F32 | None]:
        assert self._statistics is not None
        try:
            moments = np.load(self._statistics / name_moments(layer), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _explain(self._statistics, str(error)) from None
        if moments.shape != (length, length) or not np.isfinite(moments).all():
            raise _explain(self._statistics, f"layer {layer} is of another model")
        importance = np.ascontiguousarray(np.diag(moments), np.float32)
        factor = prepare_moments(moments) if self.method == "compensated" else None
        return importance, factor


def _explain(statistics: Path, problem: str) -> UserError:
    return UserError.of(
        "P548",
        f"{statistics} does not have the inputs of this model's matrices: {problem}",
        help="record them with `pi2 activations PLAN --text FILE -o STATS --moments`",
    )


_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_NAME = 1024
_EXPERT = re.compile(r"(.+\.ffn_(?:gate|up|down|gate_up))\.(\d+)\.weight")
_LEAST = 1e-5
"""Least weight of a column, by the mean: inputs at 0 in the text are not 0 everywhere."""


def name_experts(name: str) -> str:
    """Return what importance matrices call all experts' matrices, of which ``name`` is one."""
    found = _EXPERT.fullmatch(name)
    return name if found is None else f"{found[1]}_exps.weight"


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
    for name, own in sums.items():
        if not (np.isfinite(own) & (own >= 0)).all():
            raise refuse_imatrix(file, f"numbers of {name} are negative or not finite")
    if not sums:
        raise refuse_imatrix(file, "it has no matrix")
    return Importance(file=file, sums=sums)


def refuse_imatrix(file: Path, problem: str) -> UserError:
    return UserError.of(
        "P548",
        f"{file} is not an importance matrix of this model: {problem}",
        help="make it with `llama-imatrix -m MODEL -f TEXT -o FILE` from the same model",
    )


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
        calls = counts.read().reshape(-1, 1)
        rows = entry.read().reshape(len(calls), -1) / np.maximum(calls, 1)
        found[name.removesuffix(_SUMS)] = np.asarray(rows.reshape(-1), np.float32)
    return found
