"""Latent attention in GGUF files: what llama.cpp's converter does to DeepSeek's, undone.

Files of May 2025 and later have the matrix that makes keys and values of what is kept as two
stacks with a matrix for each head: those of keys are turned, so that queries can be multiplied with
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.importing.decoded_tensor import DecodedTensor, describe_decoded, refuse_shape
from pi2.importing.gguf_metadata import Metadata
from pi2.importing.safetensors_file import SourceTensor

_KEYS, _VALUES, _JOINED = (f".self_attn.{name}_proj.weight" for name in ("k_b", "v_b", "kv_b"))


def read_latent(metadata: Metadata, rotated: int) -> dict[str, Any]:
    """Sizes of latent attention; ``rotated``: elements of a key that positions turn.

    Raises `UserError` P532 as `Metadata.read`.
    """
    read = metadata.read
    # Where keys are kept as a whole, the newer keys are not there.
    key = read("{arch}.attention.key_length_mla", int, 0)
    key = key or metadata.read_count("{arch}.attention.key_length")
    value = read("{arch}.attention.value_length_mla", int, 0)
    value = value or metadata.read_count("{arch}.attention.value_length")
    rank = read("{arch}.attention.q_lora_rank", int, 0)
    return {
        "kv_lora_rank": metadata.read_count("{arch}.attention.kv_lora_rank"),
        "q_lora_rank": rank or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }


def read_score_factor(metadata: Metadata) -> dict[str, Any]:
    """What scaled positions multiply scores with; files have a tenth of it, and not what sines and
    cosines are multiplied with, which DeepSeek's configurations make 1."""
    if not metadata.has("{arch}.rope.scaling.yarn_log_multiplier"):
        return {}
    tenth = metadata.read("{arch}.rope.scaling.yarn_log_multiplier", float)
    return dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedHeads(DecodedTensor):
    """The matrix of keys and values [heads (plain + value), rank]."""

    keys: SourceTensor
    """Those of one head after the other, turned [heads rank, plain]."""
    values: SourceTensor
    """Those of one head after the other [heads value, rank]."""

    def decode(self, start: int, stop: int) -> F32:
        plain, rank = self.keys.shape[1], self.shape[1]
        heads = self.keys.shape[0] // rank
        each, value = self.shape[0] // heads, self.values.shape[0] // heads
        first, last = start // each, -(-stop // each)
        joined = np.empty((last - first, each, rank), np.float32)
        turned = self.keys.read(first * rank, last * rank).reshape(-1, rank, plain)
        joined[:, :plain] = turned.swapaxes(1, 2)
        joined[:, plain:] = self.values.read(first * value, last * value).reshape(-1, value, rank)
        return joined.reshape(-1, rank)[start - first * each : stop - first * each]


def join_heads(tensors: dict[str, SourceTensor]) -> None:
    """Put the matrices of keys and values together that ``tensors`` have apart.

    Raises `UserError` P534 for shapes that do not belong together; where one of two is missing, the
    joined one is, which is said later.
    """
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
        tensors[joined] = _JoinedHeads(
            **describe_decoded(joined, (heads * (plain + value), rank), keys, values),
            keys=replace(keys, shape=(heads * rank, plain)),
            values=replace(values, shape=(heads * value, rank)),
        )


def complete_latent(config: dict[str, Any], tensors: dict[str, SourceTensor]) -> None:
    """Put matrices together, and state how experts are chosen.  Raises as `join_heads`."""
    join_heads(tensors)
    # Files of GLM 4.7 Flash do not say how they route; only sigmoids have this bias.
    if any(name.endswith(".e_score_correction_bias") for name in tensors):
        config["model_type"] = "deepseek_v3"
    elif config.get("n_group", 1) > 1:
        config["topk_method"] = "group_limited_greedy"
