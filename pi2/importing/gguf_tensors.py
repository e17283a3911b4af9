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

from pi2.arrays import F32, I64
from pi2.importing.decoded_tensor import DecodedTensor, refuse_shape
from pi2.importing.gguf_file import GgufTensor
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import SourceTensor
from pi2.model.states import StateShape, list_pairs, ungroup

_KEYS, _VALUES, _JOINED = (f".{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHeads(DecodedTensor):
    """The KV matrix [heads (plain + value), rank]."""

    keys: SourceTensor
    """Keys of one head after the other, turned [heads rank, plain]."""
    values: SourceTensor
    """Values of one head after the other [heads value, rank]."""

    @classmethod
    def of(
        cls, name: str, heads: int, keys: SourceTensor, values: SourceTensor, **own: Any
    ) -> Self:
        """Join ``keys`` and ``values`` of ``heads``; with further fields of its ``own``."""
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
        return cls.make(name, shape, decode, keys, values, keys=keys, values=values, **own)


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

    shape: StateShape
    is_tiled: bool
    """Whether the value heads of a key head are apart."""

    def order_values(self, size: int) -> I64:
        """Stored element at every element of the value heads, each of ``size``."""
        keys, values = self.shape.key_heads, self.shape.value_heads
        places = np.arange(values).reshape(keys, -1)
        if self.is_tiled:
            places = np.arange(values).reshape(-1, keys).T
        return np.asarray((places.reshape(-1, 1) * size + np.arange(size)).reshape(-1))

    def find_order(self, part: str) -> I64 | None:
        """Stored row, of ``out_proj`` column, at every one of a tensor of the original, whose name
        ends with ``part``; None for tensors without an order of heads."""
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            before = self.shape.channels - self.shape.width
            values = self.order_values(self.shape.value_dim) + before
            return np.concatenate([np.arange(before), values])
        if part in ("in_proj_z.weight", "out_proj.weight"):
            return self.order_values(self.shape.value_dim)
        if part in ("in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log"):
            return self.order_values(1)
        return None

    def divide(self, part: str) -> dict[str, I64]:
        """Rows of projections that one of groups of key heads has in it, by the ends of names."""
        names: tuple[str, ...]
        if part == "in_proj_ba.weight":
            names, rows, first = ("b", "a"), list_pairs(self.shape), self.shape.value_heads
        elif part == "in_proj_qkvz.weight":
            names, rows, first = ("qkv", "z"), ungroup(self.shape), self.shape.channels
        else:
            return {}
        found = np.split(np.asarray(rows, np.int64), [first])
        return {f"in_proj_{name}.weight": own for name, own in zip(names, found, strict=True)}


def read_delta_heads(metadata: Metadata, is_tiled: bool) -> DeltaHeads | None:
    """Heads of Qwen's layers with a state; None of a file that has none."""
    if not metadata.has("{arch}.ssm.group_count"):
        return None
    count = metadata.read_count
    values, keys = count("{arch}.ssm.time_step_rank"), count("{arch}.ssm.group_count")
    key_dim, value_dim = count("{arch}.ssm.state_size"), count("{arch}.ssm.inner_size") // values
    if values % keys or max(keys, values) * max(key_dim, value_dim) > MOST_CHANNELS:
        return None
    shape = StateShape(
        kind="delta",
        kernel=1,
        width=values * value_dim,
        channels=2 * keys * key_dim + values * value_dim,
        key_heads=keys,
        value_heads=values,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    return DeltaHeads(shape, is_tiled)


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
