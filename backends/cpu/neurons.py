"""The FFN's neurons: those that one token needs, gathered from slots, or a row of neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from pi2.arrays import F32, I32, U8, Bits
from pi2.backends.chunk_state import Arguments
from pi2.backends.compiler.runtime import Library
from pi2.backends.cpu.arrays import Arrays, count_tiles
from pi2.backends.cpu.expert_groups import complete_pairs, list_groups
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.workspace import Workspace
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.packing import slice_experts

_MOST_ARENAS = 256
"""Views of arenas that are remembered."""

_NONE: I32 = np.zeros(0, np.int32)


class Neurons:
    """Kernels that add neurons to y, and their arguments.

    What differs from chunk to chunk is given with each call: ``dense`` and ``dense_one`` are those
    of the first.
    """

    def __init__(
        self,
        request: BuildRequest,
        space: Workspace,
        spec: KernelSpec,
        library: Library,
        arrays: Arrays,
        prediction: Prediction,
    ) -> None:
        self._library = library
        self._prediction = prediction
        neurons = request.neurons
        hidden, y, routes = arrays.hidden, arrays.y, arrays.routes
        self._slots = space.make("int32", neurons)
        self._counts = space.make("int32", spec.threads + 1)
        every = space.make("int32", neurons)
        every[:] = np.arange(neurons)
        self._gates = space.make("float32", neurons)
        self._scales = [(space.wrap(item),) for item in request.scales or ()]
        """Of each layer, where they are resident."""
        self._rows = space.make("int32", neurons) if self._scales else None
        rows: Arguments = () if self._rows is None else (space.wrap(self._rows),)
        kinds = ("float32", "int32", *("int32" for _ in rows))
        lists = [
            space.wrap(self._gates),
            *(space.wrap(space.make(dtype, neurons)) for dtype in kinds),
        ]
        partial = space.wrap(space.make("float32", spec.threads, spec.hidden))
        gathers = {True: "add_plain_neurons", False: "add_neurons"}
        self._token: tuple[int, ...] = (0,) if spec.sequences else ()
        """The token that gathered neurons are computed for, where kernels ask."""
        self._gather = library.find(gathers[not spec.has_gathered_ffn])
        self._gather_dense = library.find(gathers[spec.has_plain_ffn])
        self._gather_open = None
        if prediction.has_gates and not spec.has_plain_ffn:
            self._gather_open = library.find("add_open_neurons")
        self._gather_slots = (space.wrap(self._slots), *rows)
        self._gather_every = (space.wrap(every), *rows)
        scratch = (*hidden, *lists, partial) if spec.has_gathered_ffn else (*hidden, partial)
        self._find_gates = library.find("find_gates") if spec.closes_gates else None
        self._find_gates_rest = (*hidden, lists[0])
        self._least_gate = spec.threshold
        self._gather_rest = (*scratch, space.wrap(self._counts), y, *routes)
        # Neurons of a dense layer are not counted as predicted and active.
        uncounted = space.make("int32", spec.threads + 1)
        scratch = (*hidden, partial) if spec.has_plain_ffn else (*hidden, *lists, partial)
        self.dense_one: Arguments = (*scratch, space.wrap(uncounted), y, *routes)
        """Of neurons next to each other, for one token."""
        self._dense = self._dense_step = library.find("add_dense")
        if spec.sequences and spec.has_other_chunks:
            self._dense_step = library.find("add_dense_step")
        values = space.wrap(space.make("float32", request.chunk, PANEL))
        unpacked = space.wrap(space.make("float32", spec.threads, UNPACKED + KEPT, 128))
        masks = space.wrap(space.make("int32", request.chunk, PARTS))
        self.dense: Arguments = (*hidden, values, masks, unpacked, y, *routes)
        """The same for several."""
        self._layout = request.bundle
        self._in_pairs = count_tiles(spec) > 0 and spec.ffn != "fp16"
        self._tokens = space.make("int32", request.chunk if spec.experts else 1)
        self._dense_tokens = space.wrap(self._tokens)
        self._arenas: dict[int, tuple[U8, Any]] = {}

    def select_token(self, number: int) -> None:
        """Let gathered neurons be those of another token."""
        if self._token:
            self._token = (number,)

    def add_gathered(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None, known: bool
    ) -> None:
        """Add the neurons in ``slots`` for one token; gates of ``indices`` may be ``known``."""
        count = len(slots)
        self._slots[:count] = slots
        bundles = self._take_bundles(layer, arena, indices)
        if not known or self._gather_open is None:
            self._gather(count, *self._token, *bundles, *self._gather_slots, *self._gather_rest)
            return
        assert indices is not None
        self._prediction.wanted[:count] = indices
        self._gather_open(
            count,
            *self._token,
            *self._prediction.get_second_limit(layer),
            *bundles,
            *self._gather_slots,
            *self._gather_rest,
            *self._prediction.get_known_gates(*self._token),
        )

    def _take_bundles(self, layer: int, arena: U8, rows: I32 | None) -> Arguments:
        """Return the kernels' views of bundles and, where they are resident, of the layer's scales;
        note the ``rows`` that gathered neurons have there."""
        view = self._wrap_arena(arena)
        if self._rows is None:
            return (view,)
        assert rows is not None, "scales are resident: stored indices say which belong to a neuron"
        self._rows[: len(rows)] = rows
        return (view, *self._scales[layer])

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None) -> Bits:
        """Return whether the gates of the neurons in ``slots`` are open."""
        assert self._find_gates is not None, "every neuron counts whatever its gate is"
        count = len(slots)
        self._slots[:count] = slots
        bundles = self._take_bundles(layer, arena, indices)
        arguments = (*bundles, *self._gather_slots, *self._find_gates_rest)
        self._find_gates(count, *self._token, *arguments)
        opened: Bits = self._gates[:count] > self._least_gate
        return opened

    def add_neighbours(
        self,
        layer: int,
        bundles: U8,
        first: int,
        tokens: int,
        one: Arguments,
        several: Arguments,
        routes: F32 | None = None,
        *,
        is_step: bool = False,
    ) -> None:
        """Add contiguous neurons, of which the first has the stored index ``first``, for all
        tokens of a chunk or a step; in a mixture, where ``routes`` [tokens, experts] are the
        weights of the experts, each to those tokens that its expert computes."""
        if routes is not None:
            self._add_experts(layer, bundles, first, routes, one, several, is_step)
            return
        count = len(bundles)
        rows = None if self._rows is None else np.arange(first, first + count, dtype=np.int32)
        views = self._take_bundles(layer, bundles, rows)
        if tokens == 1:
            self._gather_dense(count, *self._token, *views, *self._gather_every, *one)
        else:
            add = self._dense_step if is_step else self._dense
            add(count, tokens, *self._name_row(first), *views, *several)

    def _name_row(self, first: int) -> tuple[int, ...]:
        """Return the number that says which scales the first of some neighbours has."""
        return () if self._rows is None else (first,)

    def _add_experts(
        self,
        layer: int,
        bundles: U8,
        first: int,
        routes: F32,
        one: Arguments,
        several: Arguments,
        is_step: bool,
    ) -> None:
        experts = slice_experts(bundles, self._layout)
        if len(routes) == 1:
            places = np.flatnonzero(routes[0].take(experts)).astype(np.int32)
            self._slots[: len(places)] = places
            views = self._take_bundles(layer, bundles, places + np.int32(first))
            if len(places):
                arguments = (*views, *self._gather_slots, *one)
                self._gather_dense(len(places), *self._token, *arguments)
            return
        add = self._dense_step if is_step else self._dense
        views = self._take_bundles(layer, bundles, _NONE)
        for neurons, tokens in list_groups(experts, routes):
            if self._in_pairs:
                tokens = complete_pairs(tokens, len(routes))
            self._slots[: len(neurons)] = neurons
            self._tokens[: len(tokens)] = tokens
            chosen = (self._gather_slots[0], self._dense_tokens)
            row = self._name_row(first)
            add(len(neurons), len(tokens), *row, *views, *chosen, *several)

    def count_active(self) -> int:
        """Return the non-zero activations of gathered neurons since the last call."""
        count = int(self._counts[-1])
        self._counts[-1] = 0
        return count

    def _wrap_arena(self, arena: U8) -> Any:
        """Return the kernels' view of an arena; the same array is wrapped once."""
        known = self._arenas.get(id(arena))
        if known is not None and known[0] is arena:
            return known[1]
        view = self._library.wrap(arena)
        if len(self._arenas) >= _MOST_ARENAS:
            self._arenas.clear()
        # The array is kept, so that its identity stays its own.
        self._arenas[id(arena)] = (arena, view)
        return view

    def close(self) -> None:
        """Forget the arenas."""
        self._arenas.clear()
