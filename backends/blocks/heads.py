"""Instructions of heads: rotary positions, the KV cache, and attention to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import NORM_PLACES, OPTIONAL, Heads, cuts_normed, describe_heads
from pi2.backends.blocks.instructions import Instruction, Way, put_float
from pi2.backends.blocks.operands import Area, Norm
from pi2.backends.blocks.products import Products
from pi2.backends.blocks.sizes import (
    PARTS,
    SINGLE,
    count_attention_bytes,
    count_list_numbers,
    count_lists,
    count_partial_bytes,
    count_score_rows,
    count_seen_numbers,
    count_tile_tokens,
)
from pi2.model.blocks import Attention
from pi2.plan.documents.model_mixing import Index

if TYPE_CHECKING:
    from pi2.arrays import F32

_LITTLE_JOIN = 4096
"""Elements of all heads up to which one thread joins parts of a context."""
_LEAST_SPREAD = 16
"""Elements that are spread over each other, at least."""


class HeadInstructions(Products):
    """Adds instructions of attention."""

    def add_growth(self, x: Area, length: int, layer: int) -> None:
        """Multiply queries with the factors of their positions, if the layer has them."""
        own = self._model.blocks[layer].attention
        if own is None or own.options.growth == 0.0:
            return
        interval = own.options.growth_interval or self._model.rope.original_context
        if self._context + own.options.growth_offset <= interval:
            return

        def compute() -> F32:
            from pi2.backends.arithmetic import compute_growth

            return compute_growth(self._model, layer, 0, self._context)

        if own.options.growth not in self._growths:
            self._growths[own.options.growth] = self.keep(self._context, compute)
        values = {
            **x.put("x"),
            "length": length,
            "positions": self.positions.ctypes.data,
            "factors": self._growths[own.options.growth].ctypes.data,
        }
        self.add("grow", values, each=1)

    def add_turn(
        self,
        x: Area,
        heads: int,
        own: Attention,
        key: str,
        *,
        neighbours: bool,
        waits: bool,
        width: int | None = None,
    ) -> None:
        """Turn queries or keys, with their norm; ``width``: elements from one head to the next."""
        attention = own.options
        weights, place = 0, "none"
        if attention.head_norm and attention.head_norm_of == "head" and not cuts_normed(attention):
            weights, place = self._read_head_norm(key, own), attention.head_norm_place
        tables, turned = self.turns[own.turn], own.turned_width
        rotated = own.rope.count_rotated(turned)
        if self.is_stored:
            # Element i of a stored head turns with element i + half of all; pairs that do not
            # rotate have angles of 0.
            rotated, neighbours = (turned if rotated else 0), False
        self._add_turn(
            x,
            heads,
            width or own.head_dim,
            Norm(weights, place),
            {
                "cos": tables[0].ctypes.data,
                "sin": tables[1].ctypes.data,
                "table_stride": turned // 2,
                "rotated": rotated,
                "neighbours": int(neighbours),
                "swapped": int(own.rope.pairs == "swapped" and not self.is_stored),
            },
            waits=waits,
        )

    def add_spread_heads(self, x: Area, heads: int, width: int) -> None:
        """Spread the elements of queries or keys if the KV cache rounds keys to a few values: a
        large one would leave the others none.  Products of both stay as they are."""
        block = width & -width
        if self.cache.kind == "int8" and block >= _LEAST_SPREAD:
            values = {**x.put("x"), "heads": heads, "head_dim": width, "block": block}
            self.add("spread_heads", values, each=heads, grain=4)

    def add_parts_norm(self, x: Area, parts: int, width: int, weights: int = 0) -> None:
        """Normalise so many parts of vectors; the address of no weights stands for ones."""
        if weights == 0:
            weights = self.fill(1.0, width)
        self._add_turn(x, parts, width, Norm(weights, "before"), {}, waits=True)

    def _add_turn(
        self, x: Area, heads: int, width: int, norm: Norm, turn: dict[str, int], *, waits: bool
    ) -> None:
        self.add(
            "turn",
            {
                **x.put("x"),
                "heads": heads,
                "head_dim": width,
                "weights": norm.weights,
                "norm_place": NORM_PLACES.index(norm.place),
                "epsilon": put_float(self._model.norm.epsilon),
                "positions": self.positions.ctypes.data,
                **turn,
            },
            each=heads,
            grain=4,
            waits=waits,
        )

    def add_head_norm(self, x: Area, heads: int, own: Attention, key: str) -> None:
        """Normalise heads before they are cut: `add_turn` does it with the rotation otherwise."""
        self.add_parts_norm(x, heads, own.head_dim, self._read_head_norm(key, own))

    def _read_head_norm(self, key: str, own: Attention) -> int:
        if not self._model.attention.head_norm_weights:
            return self.fill(1.0, own.head_dim)
        return self.read_vector(key, self.layer, self._model.norm.weight_offset)

    def add_keep(
        self, keys: Area, values: Area | None, shape: Attention, layer: int, rows: int = 0
    ) -> None:
        """Append a token's vectors to the KV cache; latent ones have no values.  They go to
        ``rows``, by default the tokens' positions."""
        heads = describe_heads(shape)
        places = self._place_cache(heads, layer) | ({"positions": rows} if rows else {})
        self.add(
            "keep",
            {
                "keys": keys.address,
                "values": keys.address if values is None else values.address,
                "x_stride": keys.stride,
                "heads": heads.key_heads,
                **places,
                "value_width": 0 if values is None else heads.value,
            },
            each=heads.key_heads,
            grain=2,
        )

    def _place_cache(self, heads: Heads, layer: int) -> dict[str, int]:
        if not self.is_real:
            return {}
        arrays = self.cache.find(layer)
        # All heads read the same latent vectors, which are their values too.
        is_latent = len(arrays) == 1
        found = self.put_tokens()
        for kind, own, width in (("key", arrays[0], heads.key), ("value", arrays[-1], heads.value)):
            array, scales = own.elements, own.scales
            sequence, head, _, _ = (size // array.itemsize for size in array.strides)
            found |= {
                f"{kind}_width": width,
                f"{kind}_cache": array.ctypes.data,
                f"{kind}_scales": 0 if scales is None else scales.ctypes.data,
                f"{kind}_sequence_stride": sequence,
                f"{kind}_head_stride": 0 if is_latent else head,
            }
        return found

    def add_part_turn(
        self, x: Area, heads: int, width: int, own: Attention, norm: Norm, **more: int
    ) -> None:
        """Turn the first elements of heads of ``width``, as many as attention turns; ``more``:
        arguments that say how, and where they stand if they are no tokens."""
        tables = self.turns[own.turn]
        turn = {
            "cos": tables[0].ctypes.data,
            "sin": tables[1].ctypes.data,
            "table_stride": own.turned_width // 2,
            "rotated": own.rope.count_rotated(own.turned_width),
            "neighbours": 0,
            "swapped": 0,
            **more,
        }
        self._add_turn(x, heads, width, norm, turn, waits=True)

    def place_index(self, layer: int, width: int) -> dict[str, int]:
        """Return the arguments that say where the keys of a layer's index are."""
        if not self.is_real:
            return {"key_width": width}
        array = self.cache.indexes[layer]
        return {
            **self.put_tokens(),
            "key_width": width,
            "key_cache": array.ctypes.data,
            "key_sequence_stride": array.strides[0] // array.itemsize,
        }

    def add_choosing(self, kernel: str, values: dict[str, int], index: Index, *, each: int) -> None:
        """Add the scores of an index, or the choice by them."""
        rows, size = count_score_rows(index, self._threads), 4 * index.width
        scores = self.take_area("index scores", self._context, tokens=rows)
        self._scratch_size = max(self._scratch_size, size * self._interpreter.lanes)
        more = scores.put("scores") | self.put_lists(index) | {"parts": PARTS}
        self.add(kernel, {**values, **more}, each=each, orders=(PARTS, 1))

    def put_lists(self, index: Index | None) -> dict[str, int]:
        """Return the arguments of a choice of keys."""
        if index is None:
            return {}
        stride, lists = count_list_numbers(index), count_lists(index)
        area = self.take_area("chosen", stride * lists, is_tight=True)
        return {"reach": index.reach, "chosen": area.address, "lists": lists, "list_stride": stride}

    def put_seen(self, own: Attention) -> dict[str, int]:
        """Return the arguments of the lists of all places that attention to pooled vectors sees."""
        stride = count_seen_numbers(own, self._context)
        area = self.take_area(f"seen {own.block}", stride, is_tight=True)
        return {"reach": -1, "chosen": area.address, "lists": 1, "list_stride": stride}

    def _read_slopes(self, shape: Attention) -> int:
        """Return the address of slopes of heads, by which scores fall; 0 where they do not."""
        if shape.options.alibi is None:
            return 0

        def compute() -> list[float]:
            from pi2.backends.arithmetic import list_slopes

            return list_slopes(shape)

        place = ("slopes", None, shape.heads, 0.0)
        if place not in self._vectors:
            self._vectors[place] = self.keep(shape.heads, compute)
        return self._vectors[place].ctypes.data

    def add_attention(self, queries: Area, y: Area, shape: Attention, layer: int) -> None:
        """Mix the values that queries see in the KV cache."""
        attention, heads = shape.options, describe_heads(shape)
        source = layer if shape.key_layer is None else shape.key_layer
        # Options are called as the arrays that they ask for.
        named = [name for name in OPTIONAL["attend"] if getattr(attention, name, False)]
        group, lanes = heads.group, self._interpreter.lanes
        size = count_attention_bytes(heads.key, heads.value)
        self._scratch_size = max(self._scratch_size, size)
        tokens = self.extent.step_tokens if self.is_stored else SINGLE
        size = count_partial_bytes(shape.heads, heads.value, self._threads, tokens)
        self._partial_size = max(self._partial_size, size)
        width = shape.head_dim if shape.latent is None else shape.latent.key
        arguments = {
            "queries": queries.address,
            "query_stride": queries.stride,
            "heads": shape.heads,
            "group": group,
            **self._place_cache(heads, source),
            "value_stride": heads.widths[-1],
            "window": 0 if shape.block else shape.window or 0,
            "is_chunked": int(attention.window_kind == "chunked"),
            **(self.put_seen(shape) if shape.block else self.put_lists(shape.index)),
            "scale": put_float(attention.scale or 1 / math.sqrt(width)),
            "cap": put_float(attention.softcap or 0.0),
            **{name: self.read_vector(name, layer) for name in named},
            "slopes": self._read_slopes(shape),
            **y.put("y"),
            "tile": count_tile_tokens(group),
            "parts": PARTS,
        }
        # Several tokens have a context each, in parts; of many, contexts are not divided.
        groups = shape.heads // group
        one = Way(address=self._interpreter.find("attend"), each=groups * PARTS)
        apart = replace(one, each=groups)
        many = apart
        if heads.key % lanes == 0 and heads.value % lanes == 0:
            address, tokens = self._interpreter.find("attend_many"), count_tile_tokens(group)
            many = Way(address=address, each=groups, tokens=tokens)
        join = Way(address=self._interpreter.find("join"), each=shape.heads)
        chosen = []
        if shape.index is not None or shape.block:
            address = self._interpreter.find("attend_chosen")
            few, each = replace(one, address=address), replace(apart, address=address)
            chosen.append(("attend_chosen", (few, few, each), each))
        for kernel, ways, other in (
            *([] if shape.block else [("attend", (one, one, many), apart)]),
            *chosen,
            ("join", (join, join, replace(join, each=0)), replace(join, each=0)),
        ):
            self._append(
                Instruction(
                    kernel=kernel,
                    values=dict(arguments),
                    ways=ways,
                    apart=other,
                    orders=(PARTS, 1),
                    layer=self.layer,
                    is_little=kernel == "join" and shape.heads * heads.value <= _LITTLE_JOIN,
                    label=kernel,
                )
            )
