"""The blocks of a model: what each layer computes, by its operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

from pi2.model.attention import Attention
from pi2.model.ffn import Ffn, make_ffn
from pi2.model.states import State, StateKind, shape_state

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_mixing import Index, Rope

__all__ = ["Attention", "Block", "Ffn", "Mixer", "State", "make_blocks"]


Mixer = Attention | State


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer: mixers of tokens, one after the other, then an FFN."""

    mixers: tuple[Mixer, ...]
    ffn: Ffn

    @cached_property
    def attention(self) -> Attention | None:
        """Its attention; no block has two."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, Attention)), None)

    @property
    def states(self) -> tuple[int, ...]:
        return tuple(n for n, mixer in enumerate(self.mixers) if isinstance(mixer, State))


def list_attention(model: Model) -> list[tuple[Attention, int]]:
    """Attention of a model by sizes and keys, each with the number of its layers; the one with the
    heads of ``shape`` comes first. A model without attention has one entry with no layer."""
    shape, found = model.shape, dict[tuple[int, int, int, bool], list[Attention]]()
    for own in filter(None, (block.attention for block in model.blocks)):
        found.setdefault((own.heads, own.kv_heads, own.head_dim, own.has_keys), []).append(own)
    if not found:
        return [(_make_attention(model, 0, True, []), 0)]
    first = (shape.heads, shape.kv_heads, shape.head_dim)
    ordered = sorted(found, key=lambda sizes: (sizes[:3] != first, not sizes[3]))
    return [(found[sizes][0], len(found[sizes])) for sizes in ordered]


def list_turns(model: Model) -> list[tuple[Rope, int]]:
    """`Attention.turn` of all blocks that turn something, each once."""
    owns = (block.attention for block in model.blocks)
    return list(dict.fromkeys(own.turn for own in owns if own and own.turned_width))


def make_blocks(model: Model) -> tuple[Block, ...]:
    """The blocks of a document, which need not have passed the rules."""
    shape, found = model.shape, list[Block]()
    states: dict[str, State] = {}
    for layer in range(shape.layers):
        kinds = () if model.layers is None else model.layers.kinds
        kind = kinds[layer] if layer < len(kinds) else "attention"
        mixers: list[Mixer] = []
        for part in () if kind == "none" else kind.split("+"):
            if part == "attention":
                mixers.append(_make_attention(model, layer, kind == "attention", found))
            else:
                own = cast(StateKind, part)
                state = State(kind=own, shape=shape_state(model, own))
                mixers.append(states.setdefault(own, state))
        found.append(Block(mixers=tuple(mixers), ffn=make_ffn(model, layer)))
    return tuple(found)


def _make_attention(model: Model, layer: int, is_single: bool, before: list[Block]) -> Attention:
    shape, options = model.shape, model.attention.choose(layer)
    heads, rope, pooled = model.other_heads, model.other_rope, options.pooled
    if heads is not None and layer not in heads.layers:
        heads = None
    if rope is None or layer not in rope.layers:
        rope = None

    sizes = (
        (heads and heads.heads) or shape.heads,
        heads.kv_heads if heads else shape.kv_heads,
        heads.head_dim if heads else shape.head_dim,
    )
    first = max(0, shape.layers - options.kv_shared_layers)
    key_layer = None
    if layer >= first:
        alike = (
            number
            for number, block in enumerate(before[:first])
            if (own := block.attention) is not None
            and (own.window, own.heads, own.kv_heads, own.head_dim)
            == (options.sliding_window, *sizes)
            and is_single == (len(block.mixers) == 1)
        )
        key_layer = max(alike, default=None)
    return Attention(
        options=options,
        heads=sizes[0],
        kv_heads=sizes[1],
        head_dim=sizes[2],
        rope=rope or model.rope,
        keys_are_values=heads is not None and heads.keys_are_values,
        key_layer=key_layer,
        chooses=_find_choice(options.index, layer),
        block=pooled.blocks[layer] if pooled is not None and layer < len(pooled.blocks) else 0,
        overlaps=pooled is not None and layer in pooled.overlapping,
    )


def _find_choice(index: Index | None, layer: int) -> Literal["all", "index", "shared"]:
    if index is None or (index.layers is not None and layer not in index.layers):
        return "all"
    return "shared" if layer in index.shared_layers else "index"


def count_indexes(model: Model) -> int:
    """Layers with an index of their own, which keeps a key of each token."""
    attention = (block.attention for block in model.blocks)
    return sum(own is not None and own.chooses == "index" for own in attention)
