"""Instructions of a model, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import (
    ACTIVATIONS,
    GATES,
    NORM_PLACES,
    PIECE,
    ROUTERS,
    STATE_BLOCK,
    Heads,
    cuts_normed,
    describe_heads,
)
from pi2.backends.blocks.instructions import Instruction, Way, Weight, put_float
from pi2.backends.blocks.operands import Area, Gates, HeadNorm, Matrix, Norm, Routed, find_address
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
    from pi2.arrays import F32, I32

_LITTLE_JOIN = 4096
"""Elements of all heads up to which one thread joins parts of a context."""
_LEAST_SPREAD = 16
"""Elements that are spread over each other, at least."""


class Builder(Products):
    """Adds instructions other than products: gates, routing, positions, attention."""

    def add_rows(
        self,
        key: str,
        weight: Weight,
        numbers: I32,
        y: Area,
        factor: float,
        *,
        added: bool = False,
        each: int = 1,
    ) -> None:
        """Look rows of a matrix up, ``each`` for a token, which are one after the other."""
        number = self.add(
            "take_rows",
            {
                "weights": find_address(weight),
                "grid": self._find_grid(weight.format),
                "numbers": numbers.ctypes.data,
                **y.put("y"),
                "blocks": weight.length // weight.kind.block,
                "factor": put_float(factor),
                "added": int(added),
            },
            own=weight.format,
            each=each,
            label=key,
        )
        self.matrices.append(Matrix(key, None, weight, (number,), numbers, each=each))

    def add_growth(self, x: Area, length: int, layer: int) -> None:
        """Multiply queries with the factors of their positions, if the layer has them."""
        own = self._model.blocks[layer].attention
        if own is None or own.growth == 0.0:
            return
        interval = own.options.growth_interval or self._model.rope.original_context
        if self._context + own.options.growth_offset <= interval:
            return

        def compute() -> F32:
            from pi2.backends.arithmetic import compute_growth

            return compute_growth(self._model, layer, 0, self._context)

        if own.growth not in self._growths:
            self._growths[own.growth] = self.keep(self._context, compute)
        values = {
            **x.put("x"),
            "length": length,
            "positions": self.positions.ctypes.data,
            "factors": self._growths[own.growth].ctypes.data,
        }
        self.add("grow", values, each=1)

    def add_cut(self, x: Area, length: int, deviations: float) -> None:
        """Cut gates at so many deviations above their mean."""
        values = {**x.put("x"), "length": length, "deviations": put_float(deviations)}
        self.add("cut", values, each=1)

    def add_gate(
        self,
        gates: Area,
        ups: Area | None,
        y: Area,
        length: int,
        *,
        each: int = 1,
        is_routed: bool = False,
    ) -> None:
        """Add the activation of the FFN, ``each`` of a token."""
        ffn = self._model.ffn
        kind, limit, slope, offset = ffn.describe_gate(self.layer, is_routed=is_routed)
        self.add(
            "gate",
            {
                "gates": gates.address,
                "ups": 0 if ups is None else ups.address,
                "x_stride": gates.stride,
                **y.put("y"),
                "length": length,
                "kind": ACTIVATIONS.index(kind),
                "limit": put_float(limit),
                "slope": put_float(slope),
                "up_offset": put_float(offset),
            },
            each=each * -(-length // PIECE),
            label="activation",
        )

    def list_routed(self) -> Routed:
        """Return the pairs of one more layer."""
        moe = self._model.moe
        assert moe is not None
        active, experts = moe.active_experts, moe.experts
        if self.routed is None:
            pairs = active * self._tokens
            self.routed = Routed(
                active=active,
                experts=experts,
                expert_of=self._take_numbers(pairs),
                place_of=0,
                token_of=self.keep(
                    pairs, lambda: [pair // active for pair in range(pairs)], "int32"
                ).ctypes.data,
                starts=self._take_numbers(experts + 1),
                pairs=self._take_numbers(pairs),
                weights=self._take_numbers(pairs),
                predicted=self._take_numbers(pairs),
                predicted_weights=self._take_numbers(pairs),
            )
        places: I32 = self.keep(experts, lambda: range(experts), "int32")
        return replace(self.routed, place_of=places.ctypes.data)

    def add_routing(self, scores: Area, layer: int, routed: Routed) -> None:
        """Add the choice of experts by their scores, and lists of their tokens."""
        self.add_choice(scores, layer, routed.expert_of, routed.weights)
        nothing = Way(address=self._interpreter.find("group"))
        self._append(
            Instruction(
                kernel="group",
                values={
                    "chosen": routed.expert_of,
                    "active": routed.active,
                    "experts": routed.experts,
                    "starts": routed.starts,
                    "pairs": routed.pairs,
                },
                ways=(nothing, nothing, replace(nothing, items=1)),
                layer=layer,
                label="group",
            )
        )

    def add_choice(self, scores: Area, layer: int, chosen: int, weights: int) -> None:
        """Add what a router makes of scores: experts and weights of each pair, at two addresses."""
        moe = self._model.moe
        assert moe is not None
        choice = self.read_vector("choice_bias", layer) if moe.choice_bias else 0
        table = self.read_vector("choice_table", layer) if layer in moe.listed_layers else 0
        scales = self.read_vector("expert_scale", layer) if moe.expert_scale else 0
        self.add(
            "route",
            {
                **scores.put("scores"),
                "experts": moe.experts,
                "active": moe.active_experts,
                "chosen": chosen,
                "weights": weights,
                "choice_bias": choice,
                "expert_scale": scales,
                "kind": ROUTERS.index(moe.router),
                "bias_of_score": int(moe.choice_bias_of == "score"),
                "groups": moe.groups,
                "active_groups": moe.active_groups,
                "best_two": int(moe.group_score == "best-two"),
                "normalise": int(moe.normalise_weights),
                "scaling": put_float(moe.scaling),
                "tolerance": put_float(moe.tolerance),
                "numbers": self.listed.ctypes.data,
                "table": table,
            },
            each=1,
        )
        self._scratch_size = max(self._scratch_size, 4 * (2 * moe.experts + moe.groups))

    def _take_numbers(self, count: int) -> int:
        """Return the address of numbers of 32 bits."""
        numbers: I32 = self.take("int32", count)
        return numbers.ctypes.data

    def add_spread(
        self,
        routed: Routed,
        routes: Area,
        length: int,
        shared: int,
        factor: float,
        scores: Area | None,
    ) -> None:
        """Write the weights of all experts, 0 if a token has not chosen it: then ``shared`` ones,
        whose weight is a factor, times the sigmoid of scores."""
        own = Area(0, 0) if scores is None else scores
        self.add(
            "spread",
            {
                "chosen": routed.expert_of,
                "weights": routed.weights,
                "active": routed.active,
                "experts": routed.experts,
                "shared": shared,
                "factor": put_float(factor),
                **own.put("scores"),
                **routes.put("y"),
                "length": length,
            },
            each=1,
        )

    def add_weighing(self, x: Area, length: int, scores: Area, *, each: int = 1) -> None:
        self.add("weigh", {**x.put("x"), "length": length, **scores.put("scores")}, each=each)

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
        if own.head_norm and attention.head_norm_of == "head" and not cuts_normed(attention):
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

    def add_gates(
        self,
        x: Area,
        y: Area,
        x_of: Sequence[int],
        width: int,
        gates: Gates | None = None,
        norm: HeadNorm | None = None,
        y_of: Sequence[int] | None = None,
    ) -> None:
        """Add gates of heads of ``width`` elements, which begin at elements ``x_of`` of tokens, and
        go one after the other or to ``y_of``; without ``gates`` heads are moved."""
        starts = range(0, width * len(x_of), width)
        gate_of = starts if gates is None else gates.places
        tables = {"x_of": x_of, "gate_of": gate_of, "y_of": starts if y_of is None else y_of}
        norm = norm or HeadNorm(weights=0, step=0, place="none")
        epsilon = self._model.norm.epsilon if norm.epsilon is None else norm.epsilon
        self.add(
            "gate_heads",
            {
                **x.put("x"),
                **(x if gates is None else gates.area).put("gates"),
                **{name: self.keep_numbers(table) for name, table in tables.items()},
                "gate_each": 1 if gates is None else gates.each,
                "kind": -1 if gates is None else GATES.index(gates.kind),
                **y.put("y"),
                "heads": len(x_of),
                "width": width,
                "weights": norm.weights,
                "weights_step": norm.step,
                "norm_place": NORM_PLACES.index(norm.place),
                "epsilon": put_float(epsilon),
            },
            each=len(x_of),
            grain=4,
        )

    def add_convolution(
        self, x: Area, y: Area, channels: int, window: int, more: dict[str, int]
    ) -> None:
        """Add a causal convolution of ``channels`` over ``window`` tokens; ``more``: its weights,
        earlier tokens, and other arguments that are not zero."""
        values = {**x.put("x"), **y.put("y"), "channels": channels, "window": window}
        items = -(-channels // STATE_BLOCK)
        self.add("convolve", values | self.put_tokens() | more, items=items, grain=8)

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

    def keep_numbers(self, numbers: Sequence[int]) -> int:
        kept: I32 = self.keep(len(numbers), lambda: numbers, "int32")
        return kept.ctypes.data

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
        sinks = self.read_vector("sinks", layer) if shape.sinks else 0
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
            "sinks": sinks,
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
