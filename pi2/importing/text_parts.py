"""Checkpoints whose layers are single blocks: Nemotron-H has attention, Mamba-2 or an FFN in each.

A block is normalised, mixed and added to the residual stream alone, so that blocks that mix tokens
and the FFN that follows them are a layer.  A layer may have no mixer, where FFNs follow each other,
and no FFN, at the end of the model or where attention comes a second time.  Tensors are renamed by
these layers; `describe_layers` says what they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "M": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
"""Kinds of blocks by their names in configurations, old and new, and in patterns."""
_OWNERS = {"mamba": "mamba.{mixer}", "attention": "self_attn", "mlp": "mlp", "moe": "mlp"}
_FIXED = (("backbone.embeddings.", "model.embed_tokens."), ("backbone.norm_f.", "model.norm."))
_NUMBERED = re.compile(
    r"(backbone\.layers\.\d{1,9}\.(?:mixer|norm)\."
    r"|model\.layers\.\d{1,9}\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.))(.+)"
)

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks that are a layer together."""

    mixers: tuple[str, ...]
    first: int
    """Number of the first block; the others follow it."""
    ffn: str
    """``mlp`` or ``moe``; nothing where there is none."""


def describe_layers(config: Mapping[str, Any]) -> list[Layer] | str:
    """The layers that the blocks of a configuration are, or what is wrong with them."""
    stated = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not isinstance(stated, list | str) or not stated:
        return "it does not state layers_block_type"
    kinds: list[str] = []
    for item in stated:
        if not isinstance(item, str) or item not in _KINDS:
            return f"{item!r} in layers_block_type is no kind of block"
        kinds.append(_KINDS[item])
    return _group(kinds)


def _group(kinds: Sequence[str]) -> list[Layer]:
    layers, mixers, first = [], list[str](), 0
    for number, kind in enumerate(kinds):
        if kind in ("mlp", "moe"):
            layers.append(Layer(tuple(mixers), first, kind))
            mixers, first = [], number + 1
            continue
        if kind == "attention" and kind in mixers:
            layers.append(Layer(tuple(mixers), first, ""))
            mixers, first = [], number
        mixers.append(kind)
    return [*layers, Layer(tuple(mixers), first, "")] if mixers else layers


def list_beginnings(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Beginnings of names in the checkpoint, and those by which pi2 knows the tensors; none where
    the blocks are no layers, which is said later."""
    if config.get("model_type") == "kimi_linear":
        return _list_kimi(config)
    if config.get("model_type") != "nemotron_h":
        return []
    layers = describe_layers(config)
    if isinstance(layers, str):
        return []
    found = list(_FIXED)
    for number, layer in enumerate(layers):
        norms = [
            f"inner_layernorm.{n}" if n else "input_layernorm" for n in range(len(layer.mixers))
        ]
        parts = list(zip(layer.mixers, norms, strict=True))
        if layer.ffn:
            parts.append((layer.ffn, "post_attention_layernorm"))
        for block, (kind, norm) in enumerate(parts, start=layer.first):
            old, new = f"backbone.layers.{block}", f"model.layers.{number}"
            owner = _OWNERS[kind].format(mixer=block - layer.first)
            found.append((f"{old}.mixer.", f"{new}.{owner}."))
            found.append((f"{old}.norm.", f"{new}.{norm}."))
    return found


def _list_kimi(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """FFNs of Kimi Linear's layers without experts: transformers writes them by the name of a
    mixture."""
    count = config.get("num_hidden_layers")
    layers = [f"model.layers.{n}" for n in range(min(count, 1024) if type(count) is int else 0)]
    return [(f"{layer}.block_sparse_moe.", f"{layer}.mlp.") for layer in layers]


def rename_tensors(
    tensors: Mapping[str, _Tensor], beginnings: Sequence[tuple[str, str]]
) -> dict[str, _Tensor]:
    """The tensors by the names that pi2 knows them by."""
    new_by_old = dict(beginnings)
    renamed = {}
    for name, tensor in tensors.items():
        numbered = _NUMBERED.fullmatch(name)
        fixed = next((old for old, _ in _FIXED if name.startswith(old)), None)
        old = numbered[1] if numbered else fixed
        new = None if old is None else new_by_old.get(old)
        renamed[name if old is None or new is None else new + name[len(old) :]] = tensor
    return renamed
