"""The FFN of resident neurons: a layer's neurons in a device's memory, inputs in, sums out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, U8
from pi2.backends.gpu.images import load_kernels
from pi2.backends.gpu.kernels.specification import FfnKernels, GpuSpec
from pi2.backends.gpu.launchers.interface import DeviceArray, Event, Launch, Launcher
from pi2.backends.gpu.packing import TILE, count_tile_bytes, pack_neurons
from pi2.plan.documents.model import Activation
from pi2.plan.weights.layout import BundleLayout
from pi2.progress import Progress

_FEW_TOKENS = 16
"""With more tokens, products by tiles of 64 tokens are the cheaper ones."""
_GROUPS_PER_UNIT = 8
"""Work groups that keep a compute unit busy."""
_UNKNOWN_UNITS = 32
"""Compute units where the API does not say."""
_PARTIAL_ROWS = 64
"""Sums of parts of the neurons that there is room for, at least."""
_COLUMNS = {1: 256, 4: 256, 64: 64}
"""Elements of the sum that a work group computes, by the tokens of the kernel."""


def describe_ffn(
    layout: BundleLayout, activation: Activation, threshold: float = 0.0, experts: int = 0
) -> FfnKernels:
    """Return the kernels for neurons of ``layout``."""
    return FfnKernels(
        hidden=layout.hidden,
        precision=layout.precision,
        activation=activation,
        threshold=threshold,
        gated=layout.is_gated,
        bias=bool(layout.biases),
        experts=experts,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    neurons: int
    arrays: Mapping[str, DeviceArray]
    launches: Mapping[str, Launch]


class DenseFfn:
    """Layers of resident neurons on one device."""

    def __init__(
        self,
        launcher: Launcher,
        layout: BundleLayout,
        ffn: FfnKernels,
        counts: Sequence[int],
        chunk: int,
        progress: Progress,
    ) -> None:
        """Make room for ``counts`` neurons of each layer, ``layout`` being the bundles with their
        scales in them, and for inputs of at most ``chunk`` tokens.

        Raises P361 where the device has no memory for them, and what `load_kernels` raises.
        """
        self._launcher, self._layout, self._ffn, self._chunk = launcher, layout, ffn, chunk
        self._kernels = load_kernels(
            launcher, GpuSpec(target=launcher.facts.target, ffn=ffn), progress
        )
        self._queue = launcher.open_queue()
        self._partial_rows = max(_PARTIAL_ROWS, chunk)
        row_bytes = 4 * ffn.hidden
        sizes = {
            "inputs": chunk * row_bytes,
            "values": 4 * chunk * max(counts, default=1),
            "partials": self._partial_rows * row_bytes,
            "sums": chunk * row_bytes,
        }
        if ffn.experts:
            sizes["routes"] = 4 * chunk * ffn.experts
        self._arrays = {name: launcher.allocate(max(size, 16)) for name, size in sizes.items()}
        self._inputs = self._allocate_host(chunk, ffn.hidden)
        self._sums = self._allocate_host(chunk, ffn.hidden)
        self._routes = self._allocate_host(chunk, max(ffn.experts, 1))
        self._layers = [self._make_layer(count) for count in counts]
        self._uploaded: Event | None = None
        self._started: Event | None = None
        self._tokens = 0

    def _allocate_host(self, rows: int, length: int) -> F32:
        array: F32 = self._launcher.allocate_host(4 * rows * length).view(np.float32)
        return array.reshape(rows, length)

    def _make_layer(self, count: int) -> _Layer:
        if count == 0:
            return _Layer(0, {}, {})
        tiles = -(-count // TILE)
        sizes = count_tile_bytes(self._layout)
        weights = {name: self._launcher.allocate(tiles * size) for name, size in sizes.items()}
        arrays = self._arrays | weights
        launches = {
            name: self._launcher.bind(kernel, arrays) for name, kernel in self._kernels.items()
        }
        # In one part, partial sums are the sums.
        whole = arrays | {"partials": self._arrays["sums"]}
        launches |= {
            f"whole_{name}": self._launcher.bind(kernel, whole)
            for name, kernel in self._kernels.items()
            if name.startswith("sums_")
        }
        return _Layer(count, weights, launches)

    @property
    def resident_bytes(self) -> int:
        """What all arrays of the device take."""
        return sum(array.size for array in self._list_arrays())

    def _list_arrays(self) -> list[DeviceArray]:
        of_layers = [array for room in self._layers for array in room.arrays.values()]
        return [*self._arrays.values(), *of_layers]

    def upload(self, layer: int, first: int, bundles: U8) -> None:
        """Put ``bundles`` uint8 [n, .], which have their scales in them, in the place of the
        neurons of ``layer`` from ``first`` on: a multiple of 32, as n is but for the last."""
        room = self._layers[layer]
        assert first % TILE == 0 and first + len(bundles) <= room.neurons, (first, len(bundles))
        assert len(bundles) % TILE == 0 or first + len(bundles) == room.neurons
        sizes = count_tile_bytes(self._layout)
        # The next piece is repacked while this one is on its way, and no more than that.
        arrays = pack_neurons(bundles, self._layout).list_arrays()
        if self._uploaded is not None:
            self._uploaded.wait()
        for name, array in arrays.items():
            self._queue.upload(room.arrays[name], array, first // TILE * sizes[name])
        self._uploaded = self._queue.submit()

    def start(self, layer: int, inputs: F32, routes: F32 | None = None) -> None:
        """Begin the sum of the neurons of ``layer`` for ``inputs`` [T, hidden], and return at once;
        ``routes`` [T, experts] are the weights of a mixture's experts."""
        assert self._started is None, "finish the last one first"
        tokens, room = len(inputs), self._layers[layer]
        assert 0 < tokens <= self._chunk and (routes is not None) == bool(self._ffn.experts)
        self._tokens = tokens
        if room.neurons == 0:
            return
        self._inputs[:tokens] = inputs
        self._queue.upload(self._arrays["inputs"], self._inputs[:tokens])
        if routes is not None:
            self._routes[:tokens] = routes
            self._queue.upload(self._arrays["routes"], self._routes[:tokens])
        size = 1 if tokens == 1 else 4 if tokens <= _FEW_TOKENS else 64
        parts = self._choose_parts(room.neurons, tokens, size)
        numbers = {"first_tile": 0, "count": room.neurons, "tokens": tokens, "parts": parts}
        self._queue.launch(room.launches[f"values_{size}"], numbers)
        if parts == 1:
            self._queue.launch(room.launches[f"whole_sums_{size}"], numbers)
        else:
            self._queue.launch(room.launches[f"sums_{size}"], numbers)
            self._queue.launch(room.launches["join"], numbers)
        self._queue.download(self._arrays["sums"], self._sums[:tokens])
        self._started = self._queue.submit()

    def _choose_parts(self, neurons: int, tokens: int, size: int) -> int:
        """Parts of the neurons that are added up at the same time, so that the device is busy."""
        wanted = _GROUPS_PER_UNIT * (self._launcher.facts.compute_units or _UNKNOWN_UNITS)
        groups = -(-self._ffn.hidden // _COLUMNS[size]) * -(-tokens // size)
        most = min(self._partial_rows // tokens, -(-neurons // TILE))
        return max(1, min(-(-wanted // groups), most))

    def finish(self) -> F32:
        """Wait for the sum float32 [T, hidden] of the last `start`; valid until the next one."""
        if self._started is None:
            self._sums[: self._tokens] = 0
        else:
            self._started.wait()
            self._started = None
        return self._sums[: self._tokens]

    def close(self) -> None:
        """Give the device's memory back."""
        for array in self._list_arrays():
            self._launcher.release(array)
        self._layers = []
