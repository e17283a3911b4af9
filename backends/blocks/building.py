"""Every instruction of a program can be added by its `Builder`."""

from __future__ import annotations

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
)
from pi2.backends.blocks.heads import HeadInstructions
from pi2.backends.blocks.instructions import Instruction, Way, Weight, put_float
from pi2.backends.blocks.operands import Area, Gates, HeadNorm, Matrix, Routed, find_address

if TYPE_CHECKING:
    from pi2.arrays import I32


class Builder(HeadInstructions):
    """Adds gates, routing, looked-up rows and convolutions."""

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

    def keep_numbers(self, numbers: Sequence[int]) -> int:
        kept: I32 = self.keep(len(numbers), lambda: numbers, "int32")
        return kept.ctypes.data
