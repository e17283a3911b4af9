"""Experts of a layer that are computed in parts: those in memory first, or some after others."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I32
from pi2.backends.blocks.code import Program
from pi2.backends.blocks.instructions import MANY
from pi2.backends.blocks.operands import Matrix, Routed

_TABLES = ("expert_of", "x_of", "y_of", "routes")
_CHANGED = (*_TABLES, "starts", "pairs")


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """Place in the program at which the experts of a layer are computed."""

    layer: int
    chosen: int
    """The first instruction that runs when experts have been chosen."""
    prediction: tuple[int, int]
    """Instructions before ``chosen`` by which the next layer's router chooses early, if any."""
    begin: int
    """The first one that reads an expert."""
    end: int
    matrices: tuple[int, ...]
    """Numbers of the experts' matrices: inputs, then the output."""


def list_routed(
    matrices: Sequence[Matrix], groups: Sequence[int], predictions: Mapping[int, tuple[int, int]]
) -> list[RoutedLayer]:
    """Return the layers with experts; ``groups``: the instructions that list pairs by expert;
    ``predictions``: instructions of early choices, by layer."""
    by_layer: dict[int, list[int]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.weight.experts > 1 and matrix.layer is not None:
            by_layer.setdefault(matrix.layer, []).append(number)
    return [
        RoutedLayer(
            layer=layer,
            chosen=group + 1,
            prediction=predictions.get(layer, (0, 0)),
            begin=matrices[own[0]].instructions[0],
            end=matrices[own[-1]].instructions[0] + 1,
            matrices=tuple(own),
        )
        for group, (layer, own) in zip(groups, by_layer.items(), strict=True)
    ]


class PairTables:
    """Pairs of tokens and experts in the caller's order, shared by all layers: inputs read tokens
    and write rows, outputs read rows and add to tokens."""

    def __init__(
        self, program: Program, routed: Routed, tokens: int, run: Callable[[int, int], None]
    ) -> None:
        """``run`` computes a range of instructions."""
        self._program, self._run = program, run
        self._active, self._experts = routed.active, routed.experts
        pairs = tokens * routed.active
        self._chosen = view_floats(routed.expert_of, pairs).view(np.int32)
        self._listed = view_floats(routed.pairs, pairs).view(np.int32)
        self._predicted = view_floats(routed.predicted, pairs).view(np.int32)
        self._weights: F32 = view_floats(routed.weights, pairs)
        self._steps: I32 = np.arange(pairs, dtype=np.int32)
        self._starts: I32 = np.zeros(routed.experts + 1, np.int32)
        self._inputs, self._outputs = (np.zeros((4, pairs), np.int32) for _ in range(2))
        self._first: dict[int, list[int]] = {}
        """Arguments of instructions that were changed, as they had been."""
        self.count = 0
        """Pairs of the call."""
        self.is_many = self.may_repeat = False
        """Whether rows of weights are computed as panels; whether a token's experts may repeat."""

    def begin(self, tokens: int) -> None:
        """Say how many tokens a call has."""
        self.count, self.is_many = tokens * self._active, tokens >= MANY

    @property
    def active(self) -> int:
        return self._active

    @property
    def experts(self) -> int:
        return self._experts

    @property
    def chosen(self) -> I32:
        """Experts of the call's pairs, token by token; valid until the next layer chooses."""
        return self._chosen[: self.count]

    @property
    def weights(self) -> F32:
        """Their weights, likewise."""
        return self._weights[: self.count]

    def list_chosen(self) -> I32:
        """Experts that the call's tokens need, ascending."""
        return self._unite(self.chosen)

    def list_predicted(self) -> I32:
        """Experts that they may need in the next layer, ascending."""
        return self._unite(self._predicted[: self.count])

    def _unite(self, experts: I32) -> I32:
        is_one = self.count == self._active and not self.may_repeat
        return np.sort(experts) if is_one else np.unique(experts)

    def list_by_expert(self) -> I32:
        """Pairs by expert, ascending, and by token within each; of `MANY` tokens and more."""
        return self._listed[: self.count].copy()

    def keeps_order(self, own: RoutedLayer) -> bool:
        """Whether outputs are added pair by pair, though there are many tokens."""
        last = self._program.instructions[own.end - 1]
        return last.ways[2].address == last.ways[0].address

    def restore(self, own: RoutedLayer) -> None:
        """Let a layer compute all pairs token by token again, all with one call."""
        last = own.begin + len(own.matrices) - 1
        if own.begin not in self._first:
            return
        for number in (*range(own.begin, last), own.end - 1):
            for name, value in zip(_CHANGED, self._first.pop(number), strict=True):
                self._program.set_value(number, name, value)
            self._program.set_value(number, "tokens", self.count)
        for number in range(last, own.end - 1):
            self._set_rows(number, 0, self.count)

    def set_pairs(self, order: I32, rows: I32 | None = None) -> None:
        """Let entry i be pair ``order[i]`` with row ``rows[i]``, or i; outputs go row by row."""
        count = len(order)
        inputs, outputs = self._inputs[:, :count], self._outputs[:, :count]
        weights = self._weights.view(np.int32)
        self._chosen.take(order, out=inputs[0])
        np.floor_divide(order, self._active, out=inputs[1])
        inputs[2] = self._steps[:count] if rows is None else rows
        weights.take(order, out=inputs[3])
        if rows is None:
            outputs[0], outputs[1], outputs[2] = inputs[0], self._steps[:count], inputs[1]
            outputs[3] = inputs[3]
            return
        own = self._steps[:count]
        outputs[0], outputs[1], outputs[3] = self._chosen[:count], own, weights[:count]
        np.floor_divide(own, self._active, out=outputs[2])

    def run_inputs(self, own: RoutedLayer, begin: int, end: int) -> None:
        """Compute gates and ups of entries ``begin`` to ``end``, which are by expert where there
        are many tokens."""
        if begin < end:
            self._run(own.begin, self._set_inputs(own, begin, end))

    def run_outputs(self, own: RoutedLayer, begin: int, end: int) -> None:
        """Compute what follows gates and ups of rows ``begin`` to ``end``."""
        self._run(self._set_outputs(own, begin, end), own.end)

    def run_rows(self, own: RoutedLayer, begin: int, end: int) -> None:
        self._set_inputs(own, begin, end)
        self._set_outputs(own, begin, end)
        self._run(own.begin, own.end)

    def _set_inputs(self, own: RoutedLayer, begin: int, end: int) -> int:
        first, last = own.begin, own.begin + len(own.matrices) - 1
        for number in range(first, last):
            self._set_table(number, self._inputs, begin, end)
        return last

    def _set_outputs(self, own: RoutedLayer, begin: int, end: int) -> int:
        first, last = own.begin + len(own.matrices) - 1, own.end - 1
        for number in range(first, last):
            self._set_rows(number, begin, end)
        self._set_table(last, self._outputs, begin, end)
        return first

    def _set_rows(self, number: int, begin: int, end: int) -> None:
        way = self._program.instructions[number].ways[0]
        each = way.each // self._active
        self._program.set_items(number, begin * each, end * each)

    def _set_table(self, number: int, table: I32, begin: int, end: int) -> None:
        program, instruction = self._program, self._program.instructions[number]
        if number not in self._first:
            self._first[number] = [program.read_value(number, name) for name in _CHANGED]
        takes_panels = self.is_many and (instruction.ways[2].address != instruction.ways[0].address)
        skip = 0 if takes_panels else begin
        for name, row in zip(_TABLES, table, strict=True):
            program.set_value(number, name, row.ctypes.data + 4 * skip)
        if not takes_panels:
            program.set_value(number, "tokens", end - begin)
            return
        starts = table[0, begin:end].searchsorted(np.arange(self._experts + 1))
        np.add(starts, begin, out=self._starts, casting="unsafe")
        program.set_value(number, "starts", self._starts.ctypes.data)
        program.set_value(number, "pairs", self._steps.ctypes.data)


def view_floats(address: int, *shape: int) -> F32:
    raw = (ctypes.c_float * math.prod(shape)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(shape)
