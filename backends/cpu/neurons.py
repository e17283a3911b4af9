"""The FFN's neurons: one token's, gathered from slots, or a row of neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Bits
from pi2.backends.compiler.runtime import BoundCall, Library
from pi2.backends.cpu.arrays import NeuronArrays
from pi2.backends.cpu.prediction import Prediction
from pi2.backends.cpu.views import Views, wrap_all
from pi2.backends.kernels.spec import DENSE_FLOATS, MOST_NAMING, KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.bundles import slice_experts


def list_groups(experts: I32, routes: F32) -> Iterator[tuple[I32, I32]]:
    """An expert's places in ``experts`` [n] and tokens in ``routes`` [T, experts], if any."""
    # A radix sort, where integers are short.
    order = np.argsort(experts.astype(np.uint16), kind="stable").astype(np.int32)
    counts = np.bincount(experts)
    # A few of many experts, where neurons are stored by expert.
    present, start = counts.nonzero()[0], 0
    for expert, count in zip(present.tolist(), counts[present].tolist(), strict=True):
        end = start + count
        tokens = routes[:, expert].nonzero()[0].astype(np.int32)
        if len(tokens):
            yield order[start:end], tokens
        start = end


_MOST_ARENAS = 256
"""Views of arenas that are remembered."""

_NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class NeighbourCalls:
    """Calls that add neurons of a layer that lie next to each other, with the arrays of a chunk."""

    one: BoundCall
    """For one token: all of them, in an MoE model those in slots that are named."""
    several: BoundCall
    """For several tokens."""
    step: BoundCall
    """For a token each of several sequences."""


class Neurons:
    """Kernels that add neurons to y."""

    def __init__(
        self,
        request: BuildRequest,
        arrays: NeuronArrays,
        spec: KernelSpec,
        library: Library,
        views: Views,
        prediction: Prediction,
        scratch: U8,
    ) -> None:
        """``views``: arrays of the first chunk, which single tokens use; ``scratch`` keeps nothing
        from call to call."""
        self._spec = spec
        self._library = library
        self._prediction = prediction
        self._slots, self._tokens = arrays.gathered["slots"], arrays.panel["tokens_of_expert"]
        self._gates, self._counts = arrays.gathered["gates"], arrays.gathered["counts"]
        self._rows = arrays.gathered.get("rows")
        if "slots" in arrays.every:
            arrays.every["slots"][:] = np.arange(request.neurons)
        self._every = wrap_all(library, arrays.every)
        layers = request.model.shape.layers
        self._scales: list[Views] = [{} for _ in range(layers)]
        """Scales of each layer's neurons, if they are resident."""
        if request.scales is not None:
            self._scales = [{"scales": library.wrap(item)} for item in request.scales]
        self._room = wrap_all(library, arrays.gathered)
        """What gathered neurons are computed in."""
        unpacked = scratch[: 4 * spec.threads * DENSE_FLOATS].view(np.float32)
        self._panel = wrap_all(library, arrays.panel | {"unpacked": unpacked})
        """What neurons are computed in for several tokens."""
        self._token = 0
        """The token that gathered neurons are computed for."""
        given = "count token arena"
        self._gather = self._bind("add_neurons", given, self._room, views)
        self._gather_open: list[list[BoundCall]] = []
        """By token and layer."""
        if prediction.has_gates and spec.uses_known_gates:
            known_given = f"count token {'limit' if spec.is_smooth else ''} arena"
            self._gather_open = [
                self._bind("add_open_neurons", known_given, known, self._room, views)
                for known in prediction.known_gates
            ]
        self._find_gates: list[BoundCall] = []
        if spec.closes_gates:
            self._find_gates = self._bind("find_gates", given, self._room, views)
        self._shared: list[BoundCall] = []
        # No gate is kept while neurons are shared.
        self._named: I32 = self._gates.view(np.int32)
        if spec.shares_neurons:
            room = wrap_all(library, arrays.shared | {"named": self._named})
            shared = room, self._room, views
            given = "count tokens arena"
            self._shared = self._bind("add_shared_neurons", given, *shared, name="add_neurons")
        self._least_gate = spec.ffn.threshold
        self._layout = request.bundle
        self._arenas: dict[int, tuple[U8, Any]] = {}

    def _bind(
        self, function: str, given: str, *arrays: Views, name: str | None = None
    ) -> list[BoundCall]:
        """Return the calls of a function by layer."""
        return [
            self._library.bind(function, given, scales, *arrays, layer=layer, name=name)
            for layer, scales in enumerate(self._scales)
        ]

    def bind_chunk(self, views: Views) -> list[NeighbourCalls]:
        """Return the calls for neighbours by layer, of a chunk with ``views``."""
        spec, panel = self._spec, (self._panel, views)
        given = f"count tokens {'' if self._rows is None else 'first'} bundles"
        one = self._bind("add_neurons", "count token arena", self._every, self._room, views)
        several = step = self._bind("add_dense", given, *panel)
        if spec.sequences and spec.has_other_chunks:
            step = self._bind("add_dense_step", given, *panel, name="add_dense")
        return [NeighbourCalls(*own) for own in zip(one, several, step, strict=True)]

    def select_token(self, number: int) -> None:
        self._token = number

    def add_gathered(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None, known: bool
    ) -> None:
        """Add the neurons in ``slots`` for one token; gates of ``indices`` may be ``known``."""
        count = len(slots)
        self._slots[:count] = slots
        bundles = self._take_bundles(arena, indices)
        if not known or not self._gather_open:
            self._gather[layer](count, self._token, bundles)
            return
        assert indices is not None
        self._prediction.wanted[:count] = indices
        add = self._gather_open[self._token][layer]
        add(count, self._token, *self._prediction.get_second_limit(layer), bundles)

    def can_share(self, tokens: int, known: bool) -> bool:
        """Whether `add_shared` adds neurons named by ``tokens``, with gates perhaps ``known``."""
        return bool(self._shared) and not known and 1 < tokens <= MOST_NAMING

    def add_shared(
        self, layer: int, arena: U8, slots: I32, indices: I32 | None, named: I64, tokens: int
    ) -> None:
        """Add the neurons in ``slots`` [n] to ``tokens`` that have ``named`` [n] them, by bits."""
        count = len(slots)
        self._slots[:count] = slots
        self._named[:count] = named
        self._shared[layer](count, tokens, self._take_bundles(arena, indices))

    def _take_bundles(self, arena: U8, rows: I32 | None) -> Any:
        """Return what calls take of bundles; if scales are resident, note the ``rows`` that
        gathered neurons have among them."""
        if self._rows is not None:
            assert rows is not None, "scales are resident: which ones belong to a neuron?"
            self._rows[: len(rows)] = rows
        return self._wrap_arena(arena)

    def find_open(self, layer: int, arena: U8, slots: I32, indices: I32 | None) -> Bits:
        """Return whether the gates of the neurons in ``slots`` are open."""
        assert self._find_gates, "every neuron counts, with any gate"
        count = len(slots)
        self._slots[:count] = slots
        self._find_gates[layer](count, self._token, self._take_bundles(arena, indices))
        opened: Bits = self._gates[:count] > self._least_gate
        return opened

    def add_neighbours(
        self,
        bundles: U8,
        first: int,
        tokens: int,
        calls: NeighbourCalls,
        routes: F32 | None = None,
        *,
        is_step: bool = False,
    ) -> None:
        """Add contiguous neurons from stored index ``first`` for all tokens; in an MoE model each
        to the tokens that its expert computes by ``routes`` [tokens, experts]."""
        if routes is not None:
            self._add_experts(bundles, first, routes, calls, is_step)
            return
        count = len(bundles)
        rows = None if self._rows is None else np.arange(first, first + count, dtype=np.int32)
        taken = self._take_bundles(bundles, rows)
        if tokens == 1:
            calls.one(count, self._token, taken)
        else:
            add = calls.step if is_step else calls.several
            add(count, tokens, *self._name_row(first), taken)

    def _name_row(self, first: int) -> tuple[int, ...]:
        return () if self._rows is None else (first,)

    def _add_experts(
        self, bundles: U8, first: int, routes: F32, calls: NeighbourCalls, is_step: bool
    ) -> None:
        experts = slice_experts(bundles, self._layout)
        if len(routes) == 1:
            places = np.flatnonzero(routes[0].take(experts)).astype(np.int32)
            self._slots[: len(places)] = places
            taken = self._take_bundles(bundles, places + np.int32(first))
            if len(places):
                calls.one(len(places), self._token, taken)
            return
        add = calls.step if is_step else calls.several
        taken = self._take_bundles(bundles, _NONE)
        for neurons, tokens in list_groups(experts, routes):
            self._slots[: len(neurons)] = neurons
            self._tokens[: len(tokens)] = tokens
            add(len(neurons), len(tokens), *self._name_row(first), taken)

    def count_active(self) -> int:
        """Return the non-zero activations of gathered neurons since the last call."""
        count = int(self._counts[-1])
        self._counts[-1] = 0
        return count

    def _wrap_arena(self, arena: U8) -> Any:
        """Return what calls take of an arena; the same array is wrapped once."""
        known = self._arenas.get(id(arena))
        if known is not None and known[0] is arena:
            return known[1]
        tensor = self._library.wrap(arena).tensor
        if len(self._arenas) >= _MOST_ARENAS:
            self._arenas.clear()
        # The array is kept, so that its identity stays its own.
        self._arenas[id(arena)] = (arena, tensor)
        return tensor

    def close(self) -> None:
        self._arenas.clear()
