"""Tensors of GGUF files, shown as the original has them: rows in another order, one KV matrix, and
the inverse of llama.cpp's conversion of layers with a state.

Value heads that share a key head follow each other in the original; files of Qwen3.5, unlike
Qwen3-Next's, have the first of every key head, then the second: keys can be repeated as a whole.
``ssm_a`` is -exp(A_log); ``ssm_ba`` has, for every key head, gates and step sizes. ``ssm_in``, of
the first files of Qwen3-Next, has queries, keys, values and gates of outputs."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import numpy as np

from pi2.arrays import F32, I64, Raw
from pi2.formats import Format, Packing, list_published
from pi2.importing.decoded_tensor import DecodedTensor, refuse_shape
from pi2.importing.gguf_file import GgufEntry, GgufFile, check_block, take_blocks
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import Kind, SourceTensor, Taken, turn
from pi2.plan.weights.layout import Precision

_PIECE_WEIGHTS = 2**20
"""Weights that are looked at together."""
_PLAIN = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "f64": "<f8"}
_WHOLE_NUMBERS = ".ffn_gate_tid2eid.weight"
"""Ends the names of tables of numbers of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor(SourceTensor):
    """A tensor of a GGUF file; ``name`` is what the file calls it."""

    block: Format
    order: I64 | None = None
    """The stored row at every row of the tensor; None means that both are in the same order."""
    is_turned: bool = False
    """Whether the file has columns where the tensor has rows."""
    added: float = 0.0
    """Number that the file has added to every element."""
    factor: np.float32 | None = None
    """Factor of all numbers."""

    def read_raw(self, start: int = 0, stop: int | None = None) -> Raw:
        """Rows ``start`` to ``stop``: plain numbers, or bytes [n, bytes]; raises as
        `SourceTensor.read_raw`."""
        stop = self.shape[0] if stop is None else stop
        if self.is_turned:
            return turn(self._decode(self._read_stored(0, self.shape[1])))[start:stop]
        if self.order is None:
            return self._read_stored(start, stop)
        wanted = self.order[start:stop]
        first, last = int(wanted.min()), int(wanted.max())
        return self._read_stored(first, last + 1)[wanted - first]

    def read_turned(self) -> Raw:
        if self.is_turned:
            return self._read_stored(0, self.shape[1])
        rows, columns = self.shape
        step = max(1, _PIECE_WEIGHTS // columns)
        pieces = ((at, min(at + step, rows)) for at in range(0, rows, step))
        turned: Raw | None = None
        for first, last in pieces:
            # Groups lie along the rows: bytes must become numbers before they can be turned.
            numbers = self._decode(self.read_raw(first, last))
            if turned is None:
                turned = np.empty((columns, rows), numbers.dtype)
            turned[:, first:last] = turn(numbers)
        assert turned is not None
        return turned

    def widen(self, raw: Raw) -> F32:
        # A zero-argument super() does not work in classes with slots.
        numbers = SourceTensor.widen(self, self._decode(raw))
        if self.added:
            numbers = numbers - np.float32(self.added)
        if self.factor is not None:
            numbers = numbers * self.factor
        return numbers

    def _decode(self, raw: Raw) -> Raw:
        """Blocks as numbers, and plain numbers as they are."""
        return self.block.decode(raw.view(np.uint8)) if raw.dtype == np.uint8 else raw

    def check_type(self) -> str:
        storage = _PLAIN.get(self.block.name)
        if self.block.name == "i32" and self.name.endswith(_WHOLE_NUMBERS):
            return "<i4"
        if storage is None and (self.block.is_plain or len(self.shape) < 2):
            return SourceTensor.check_type(self)
        if storage is None:
            check_block(self.block, self.name, str(self.file))
        return storage or "|u1"

    def _read_stored(self, start: int, stop: int) -> Raw:
        """Stored rows: plain numbers [n, ...], or blocks uint8 [n, bytes]."""
        storage = self.check_type()
        columns = self.shape[0] if self.is_turned else self.shape[-1]
        width = columns if len(self.shape) > 1 else 1
        if storage == "|u1":
            width = self.block.count_bytes(width)
        size = np.dtype(storage).itemsize
        flat = self.read_flat(self.offset + start * width * size, (stop - start) * width, storage)
        return flat.reshape(stop - start, width) if len(self.shape) > 1 else flat

    @property
    def kind(self) -> Kind:
        name = self.block.name
        return name if self.factor is None and name in list_published() else "computed"

    def is_of(self, packing: Packing) -> bool:
        if packing.top != 1:
            return self.kind == packing.name
        # Files keep -1, 0 and 1 times one number in many formats.
        if not self.block.keeps_signs or len(self.shape) != 2:
            return False
        size: np.float32 | None = None
        rows, columns = self.shape[::-1] if self.is_turned else self.shape
        step = max(1, _PIECE_WEIGHTS // columns)
        for start in range(0, rows, step):
            sizes = np.abs(self.widen(self._read_stored(start, min(start + step, rows))))
            if size is None and sizes.any():
                size = sizes.max()
            if not ((sizes == 0) | (sizes == size)).all():
                return False
        return True

    def take_codes(self, raw: Raw, precision: Precision) -> Taken:
        if raw.dtype != np.uint8 or self.factor is not None:
            return None
        return take_blocks(raw.view(np.uint8), self.block, precision)


def make_tensor(file: GgufFile, entry: GgufEntry) -> GgufTensor:
    return GgufTensor(
        file=file.path,
        name=entry.name,
        dtype=entry.block.name.upper(),
        shape=entry.shape,
        offset=entry.offset,
        size_bytes=entry.size_bytes,
        block=entry.block,
    )


_KEYS, _VALUES, _JOINED = (f".{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHeads(DecodedTensor):
    """The KV matrix [heads (plain + value), rank]."""

    keys: SourceTensor
    """Keys of one head after the other, turned [heads rank, plain]."""
    values: SourceTensor
    """Values of one head after the other [heads value, rank]."""

    @classmethod
    def of(cls, name: str, heads: int, keys: SourceTensor, values: SourceTensor) -> Self:
        """Join ``keys`` and ``values`` of ``heads``."""
        rank, plain, value = values.shape[1], keys.shape[1], values.shape[0] // heads
        each = plain + value

        def decode(start: int, stop: int) -> F32:
            first, last = start // each, -(-stop // each)
            joined = np.empty((last - first, each, rank), np.float32)
            turned = keys.read(first * rank, last * rank).reshape(-1, rank, plain)
            joined[:, :plain] = turned.swapaxes(1, 2)
            own = values.read(first * value, last * value)
            joined[:, plain:] = own.reshape(-1, value, rank)
            return joined.reshape(-1, rank)[start - first * each : stop - first * each]

        shape = heads * each, rank
        return cls.make(name, shape, decode, keys, values, keys=keys, values=values)


def join_heads(tensors: dict[str, SourceTensor]) -> None:
    """Join separate key and value matrices; `UserError` P534 for shapes that do not fit."""
    for name in [name for name in tensors if name.endswith(_KEYS)]:
        keys, values = tensors[name], tensors.get(name.replace(_KEYS, _VALUES))
        if values is None:
            continue
        if len(keys.shape) != 3:
            raise refuse_shape(keys, (0, *values.shape[1:]))
        heads, rank, plain = keys.shape
        value = values.shape[1] if len(values.shape) == 3 else 0
        if values.shape != (heads, value, rank):
            raise refuse_shape(values, (heads, value, rank))
        del tensors[name], tensors[name.replace(_KEYS, _VALUES)]
        joined = name.replace(_KEYS, _JOINED)
        tensors[joined] = JoinedHeads.of(
            joined,
            heads,
            replace(keys, shape=(heads * rank, plain)),
            replace(values, shape=(heads * value, rank)),
        )


MOST_CHANNELS = 2**20
"""Most elements of all heads together."""


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of the layers of a file."""

    keys: int
    values: int
    key_dim: int
    value_dim: int
    is_tiled: bool
    """Whether the value heads of a key head are apart."""

    def order_values(self, size: int) -> I64:
        """Stored element at every element of the value heads, each of ``size``."""
        together = self.values // self.keys
        places = np.arange(self.values).reshape(self.keys, together)
        if self.is_tiled:
            places = np.arange(self.values).reshape(together, self.keys).T
        return np.asarray((places.reshape(-1, 1) * size + np.arange(size)).reshape(-1))

    def order_channels(self) -> I64:
        """The same of QKV."""
        before = 2 * self.keys * self.key_dim
        values = self.order_values(self.value_dim) + before
        return np.concatenate([np.arange(before), values])

    def find_order(self, part: str) -> I64 | None:
        """Stored row, of ``out_proj`` column, at every one of a tensor of the original, whose name
        ends with ``part``; None for tensors without an order of heads."""
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            return self.order_channels()
        if part in ("in_proj_z.weight", "out_proj.weight"):
            return self.order_values(self.value_dim)
        if part in ("in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log"):
            return self.order_values(1)
        return None

    def divide(self, part: str) -> dict[str, I64]:
        """Rows of projections that one of groups of key heads has in it, by the ends of names."""
        together = self.values // self.keys
        if part == "in_proj_ba.weight":
            pairs = np.arange(2 * self.values).reshape(self.keys, 2, together).swapaxes(0, 1)
            names, rows = ("b", "a"), [own.reshape(-1) for own in pairs]
        elif part == "in_proj_qkvz.weight":
            key, value = self.key_dim, together * self.value_dim
            groups = np.arange(2 * self.keys * (key + value)).reshape(self.keys, -1)
            *channels, gates = np.split(groups, [key, 2 * key, 2 * key + value], axis=1)
            names = ("qkv", "z")
            rows = [np.concatenate([own.reshape(-1) for own in channels]), gates.reshape(-1)]
        else:
            return {}
        return {f"in_proj_{name}.weight": own for name, own in zip(names, rows, strict=True)}


def read_delta_heads(metadata: Metadata, is_tiled: bool) -> DeltaHeads | None:
    """Heads of Qwen's layers with a state; None of a file that has none."""
    if not metadata.has("{arch}.ssm.group_count"):
        return None
    count = metadata.read_count
    values = count("{arch}.ssm.time_step_rank")
    heads = DeltaHeads(
        keys=count("{arch}.ssm.group_count"),
        values=values,
        key_dim=count("{arch}.ssm.state_size"),
        value_dim=count("{arch}.ssm.inner_size") // values,
        is_tiled=is_tiled,
    )
    wide = max(heads.keys, heads.values) * max(heads.key_dim, heads.value_dim)
    return None if heads.values % heads.keys or wide > MOST_CHANNELS else heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLogarithms(DecodedTensor):
    """Logarithms of rates of decay, of which a file has the rates themselves."""

    source: SourceTensor
    """The rates: logarithms and back again would round them."""
    is_negated: bool = True
    """Whether the file has them with a minus sign."""

    def read_rates(self, start: int = 0, stop: int | None = None) -> F32:
        """The rates with a minus sign."""
        rates = self.source.read(start, stop)
        return rates if self.is_negated else -rates

    @classmethod
    def of(cls, source: GgufTensor, *, is_negated: bool = True) -> Self:
        def decode(start: int, stop: int) -> F32:
            rates = source.read(start, stop)
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log(-rates if is_negated else rates)

        own: dict[str, Any] = {"source": source, "is_negated": is_negated}
        return cls.make(source.name, source.shape, decode, source, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedColumns(DecodedTensor):
    """A matrix of which a file has the columns in another order."""

    source: GgufTensor
    columns: I64
    """The stored column at every column."""

    @classmethod
    def of(cls, source: GgufTensor, columns: I64) -> Self:
        def decode(start: int, stop: int) -> F32:
            return np.ascontiguousarray(source.read(start, stop)[:, columns])

        name, shape = source.name, source.shape
        return cls.make(name, shape, decode, source, source=source, columns=columns)


_VECTORS = (".D", ".mamba.norm.weight", ".mixer.norm.weight")


def restore_plain(name: str, tensor: GgufTensor, *, is_negated: bool) -> SourceTensor:
    """A tensor of Mamba-2 or of Kimi's delta rule as the original, which calls it ``name``, has it:
    files have other dimensions, and rates of decay, perhaps with a minus sign."""
    if name.endswith("conv1d.weight"):
        return replace(tensor, shape=(prod(tensor.shape[:-1]), 1, tensor.shape[-1]))
    is_column = tensor.shape[-1:] == (1,) and name.endswith(".A_log")
    if is_column or name.endswith(_VECTORS):
        tensor = replace(tensor, shape=(prod(tensor.shape),))
    if name.endswith(".A_log"):
        return RateLogarithms.of(tensor, is_negated=is_negated)
    return tensor


def restore_state(
    name: str, tensor: GgufTensor, heads: DeltaHeads
) -> dict[str, SourceTensor] | None:
    """The tensors of the original that ``tensor`` is, which the original calls ``name``; None if it
    is none of these, or of another shape than the heads say, which is said later."""
    part = name.partition(".linear_attn.")[2]
    count = tensor.shape[0] if tensor.shape else 0
    pieces, order = heads.divide(part), heads.find_order(part)
    if pieces and count == sum(map(len, pieces.values())):
        shapes = {own: (len(rows), *tensor.shape[1:]) for own, rows in pieces.items()}
        return {
            name.replace(part, own): replace(tensor, shape=shapes[own], order=rows)
            for own, rows in pieces.items()
        }
    if order is None:
        return None
    if part == "out_proj.weight":
        is_whole = tensor.shape[1:] == (len(order),)
        return {name: OrderedColumns.of(tensor, order)} if is_whole else None
    if count != len(order):
        return None
    ordered = replace(tensor, order=order)
    if part == "A_log":
        return {name: RateLogarithms.of(ordered)}
    if part == "conv1d.weight" and len(tensor.shape) == 2:
        ordered = replace(ordered, shape=(count, 1, tensor.shape[1]))
    return {name: ordered}
