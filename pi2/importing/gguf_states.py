"""Layers with a state in GGUF files: their sizes, and the inverse of llama.cpp's conversion of
Qwen's DeltaNet.

Value heads that share a key head follow each other in the original; files of Qwen3.5, unlike
Qwen3-Next's, have the first of every key head, then the second: keys can be repeated as a whole.
``ssm_a`` is -exp(A_log); ``ssm_ba`` has, for every key head, gates and step sizes. ``ssm_in``, of
the first files of Qwen3-Next, has queries, keys, values and gates of outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pi2.arrays import F32, I64, Raw
from pi2.diagnostics import UserError
from pi2.importing.config import ROTATED_SHARE, TURN_FACTOR
from pi2.importing.decoded_tensor import DecodedTensor, PackedTensor, describe_decoded
from pi2.importing.gguf_decoders import Metadata
from pi2.importing.safetensors_file import SourceTensor

_FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LONG_FAMILIES = ("granite", "minicpm3", "phi3", "phimoe")
"""Families with LongRoPE; as Granite pi2 reads MiniCPM."""
POSITIONS = (_FREQUENCIES, _LONG, _SHORT)
"""Tensors that `scale_positions` reads."""


def scale_positions(
    config: dict[str, Any], metadata: Metadata, read: Callable[[str], F32 | None]
) -> None:
    """State the scaling in ``config``; ``read`` gives a tensor [pairs] or None. P544, P532."""
    divisors = read(_FREQUENCIES)
    stated = config.get("rope_scaling")
    if divisors is not None and not _scale(config, divisors):
        raise _refuse(metadata.file, _FREQUENCIES)
    if stated is not None and config["rope_scaling"] is not stated:
        raise _refuse_both(metadata, _FREQUENCIES)
    long, short = read(_LONG), read(_SHORT)
    if long is None and short is None:
        return
    if long is None or short is None or config["model_type"] not in _LONG_FAMILIES:
        raise _refuse(metadata.file, _SHORT if long is None else _LONG)
    if stated is not None and (stated["rope_type"], stated["factor"]) != ("longrope", 1.0):
        raise _refuse_both(metadata, _LONG)
    context = metadata.read_count("{arch}.rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": context,
        # Files have 32 bits of what people wrote in decimals.
        "long_factor": [float(str(number)) for number in long],
        "short_factor": [float(str(number)) for number in short],
    }
    if metadata.has("{arch}.rope.scaling.attn_factor"):
        # It is all that they are multiplied by.
        scaling["attention_factor"] = config.pop(TURN_FACTOR)
    config |= {"rope_scaling": scaling, "original_max_position_embeddings": context}


def _refuse_both(metadata: Metadata, name: str) -> UserError:
    return metadata.refuse(
        f"{metadata.architecture}.rope.scaling scales positions, and so does tensor {name!r}"
    )


_STILL = 1e20
"""Divisors of frequencies from here on turn nothing."""


def _scale(config: dict[str, Any], divisors: F32) -> bool:
    """State in a configuration what divisors of frequencies [pairs] say; whether that is known."""
    full = config.get("rope_parameters", {}).get("full_attention", {})
    if full.get("rope_type") != "proportional":
        return scale_llama3(config, divisors)
    turning = int(np.count_nonzero(divisors == 1.0))
    is_known = turning > 0 and bool((divisors[:turning] == 1.0).all())
    full["partial_rotary_factor"] = turning / len(divisors)
    return is_known and bool((divisors[turning:] >= _STILL).all())


def scale_llama3(config: dict[str, Any], divisors: F32) -> bool:
    """State the llama3 scaling; whether it is one."""
    theta, size = config.get("rope_theta", 10000.0), config.get("head_dim", 1)
    full = config.get("rope_parameters", {}).get("full_attention", {})
    size = int(size * full.get("partial_rotary_factor", config.get(ROTATED_SHARE, 1.0)))
    # Elements that do not turn may have ones; what scales positions otherwise is no part of it.
    is_known = full.get("rope_type", "default") == "default"
    is_known &= bool((divisors[size // 2 :] == 1.0).all())
    scaling = _recover_llama3(divisors[: size // 2], theta, size) if is_known else None
    if scaling:
        config["rope_scaling"] = scaling
        full.update(scaling)
    return scaling is not None


def _recover_llama3(factors: F32, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling with divisors ``factors`` [head_dim / 2] (``rope_freqs.weight``); {} for
    none, None if unknown."""
    if (factors == 1.0).all():
        return {}
    if theta <= 1.0 or not (np.isfinite(factors) & (factors >= 1.0)).all():
        return None
    factor = float(factors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) * 2 / head_dim)
    low = 1.0
    # Llama 4 has nothing between the two.
    for original, high in product((2**power for power in range(4, 20)), (4.0, 1.0, 32.0)):
        turns = original / wavelengths
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns >= low
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def _refuse(file: Path, name: str) -> UserError:
    return UserError.of(
        "P544",
        f"tensor {name!r} in {file} scales positions in a way that is unknown",
        help="convert the original checkpoint",
        file=str(file),
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

    def decode(self, start: int, stop: int) -> F32:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(-self.read_rates(start, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedColumns(DecodedTensor):
    """A matrix of which a file has the columns in another order."""

    source: PackedTensor
    columns: I64
    """The stored column at every column."""

    def decode(self, start: int, stop: int) -> F32:
        return np.ascontiguousarray(self.source.read(start, stop)[:, self.columns])

    def read_turned(self) -> Raw:
        return np.ascontiguousarray(self.read_raw().T)


_VECTORS = (".D", ".mamba.norm.weight", ".mixer.norm.weight")


def restore_plain(name: str, tensor: PackedTensor, *, is_negated: bool) -> SourceTensor:
    """A tensor of Mamba-2 or of Kimi's delta rule as the original, which calls it ``name``, has it:
    files have other dimensions, and rates of decay, perhaps with a minus sign."""
    if name.endswith("conv1d.weight"):
        return replace(tensor, shape=(prod(tensor.shape[:-1]), 1, tensor.shape[-1]))
    is_column = tensor.shape[-1:] == (1,) and name.endswith(".A_log")
    if is_column or name.endswith(_VECTORS):
        tensor = replace(tensor, shape=(prod(tensor.shape),))
    if name.endswith(".A_log"):
        described = describe_decoded(tensor.name, tensor.shape, tensor)
        return RateLogarithms(**described, source=tensor, is_negated=is_negated)
    return tensor


def restore_state(
    name: str, tensor: PackedTensor, heads: DeltaHeads
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
    described = describe_decoded(tensor.name, tensor.shape, tensor)
    if order is None:
        return None
    if part == "out_proj.weight":
        is_whole = tensor.shape[1:] == (len(order),)
        columns = OrderedColumns(**described, source=tensor, columns=order)
        return {name: columns} if is_whole else None
    if count != len(order):
        return None
    ordered = replace(tensor, order=order)
    if part == "A_log":
        return {name: RateLogarithms(**described, source=ordered)}
    if part == "conv1d.weight" and len(tensor.shape) == 2:
        ordered = replace(ordered, shape=(count, 1, tensor.shape[1]))
    return {name: ordered}
