"""Arrays of a device, which the same lines count or allocate: plain Python.

A layer's last tile of 32 neurons is filled up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pi2.backends.gpu.launchers.interface import VECTOR_BYTES, DeviceArray
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.arithmetic.units import name_head
from pi2.plan.weights.layout import BundleLayout, Precision, round_up, scale_bytes, weight_bytes

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.gpu.launchers.interface import Event, Launcher
    from pi2.plan.arithmetic.units import UnitShare

TILE = 32
"""Rows of a tile."""
PIECE_ROWS = 1024
"""Rows of a matrix that are rearranged at a time."""
_STAGING_BUFFERS = 2
"""One range of added neurons is uploaded while another is computed."""
_PACKING_COPIES = 3
"""Copies of a range in main memory while it is rearranged for the device."""
_PARTIAL_ROWS = 64
"""Sums of parts of the neurons, of a token each, that there is room for, at least."""


class Memory:
    """A device's memory and main memory next to it: arrays are counted, and made if there is a
    launcher."""

    def __init__(self, launcher: Launcher | None = None) -> None:
        self._launcher = launcher
        self._arrays: list[DeviceArray] = []
        self.host_bytes = 0

    def take(self, sizes: Mapping[str, int]) -> dict[str, DeviceArray]:
        """Return arrays of so many bytes by name, none for 0; raises P361."""
        found: dict[str, DeviceArray] = {}
        for name, own in sizes.items():
            if own:
                size, launcher = round_up(own, VECTOR_BYTES), self._launcher
                found[name] = (
                    DeviceArray(None, size) if launcher is None else launcher.allocate(size)
                )
                self._arrays.append(found[name])
        return found

    def take_host(self, sizes: Mapping[str, int]) -> dict[str, U8]:
        """Return main memory of the same sizes, from and to which copies are fastest."""
        kept = {name: round_up(size, VECTOR_BYTES) for name, size in sizes.items() if size}
        self.host_bytes += sum(kept.values())
        if self._launcher is None:
            return {}
        return {name: self._launcher.allocate_host(size) for name, size in kept.items()}

    def pass_on(self, size: int) -> None:
        """Count copies of a piece that is rearranged, and of the one before on its way."""
        self.host_bytes += (_PACKING_COPIES + 1) * size

    @property
    def sizes(self) -> list[int]:
        return [array.size for array in self._arrays]

    @property
    def device_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    def release(self) -> None:
        arrays, self._arrays = self._arrays, []
        for array in arrays:
            assert self._launcher is not None
            self._launcher.release(array)


def count_tile_bytes(layout: BundleLayout) -> dict[str, int]:
    """Bytes of a tile of neurons in each array of `pi2.backends.gpu.packing.pack_neurons`."""
    inputs = len(layout.parts) - 1
    weights = TILE * weight_bytes(layout.hidden, layout.precision)
    scales = TILE * scale_bytes(layout.hidden, layout.precision)
    sizes = {
        "gate_up_weights": inputs * weights,
        "gate_up_scales": inputs * scales,
        "down_weights": weights,
        "down_scales": scales,
        "biases": TILE * 4 * len(layout.biases),
        "experts": 0 if layout.expert_offset is None else TILE * 4,
    }
    return {name: size for name, size in sizes.items() if size}


def count_neurons(layout: BundleLayout, count: int) -> dict[str, int]:
    """Bytes of ``count`` neurons in each of these arrays."""
    tiles = -(-count // TILE)
    return {name: tiles * size for name, size in count_tile_bytes(layout).items()}


def count_matrix(rows: int, length: int, precision: Precision) -> dict[str, int]:
    """Bytes of a matrix in tiles, by the names of kernels' parameters."""
    whole = round_up(rows, TILE)
    return {
        "matrix_weights": whole * weight_bytes(length, precision),
        "matrix_scales": whole * scale_bytes(length, precision),
    }


def count_partial_rows(chunk: int) -> int:
    """Sums of parts of the neurons, of a token each, that there is room for."""
    return max(_PARTIAL_ROWS, chunk)


@dataclass(slots=True)
class Room:
    """Neurons on the device."""

    neurons: int
    arrays: Mapping[str, DeviceArray]
    host: Mapping[str, U8] = field(default_factory=dict)
    """Main memory that added neurons come from: copies from it are the fastest."""
    used: list[Event] = field(default_factory=list)
    """What must be over before other neurons come here."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a job reads and gives, on the device and in main memory."""

    arrays: Mapping[str, DeviceArray]
    host: Mapping[str, U8]


class UnitArrays:
    """Arrays of a unit next to an executor."""

    def __init__(self, memory: Memory, share: UnitShare) -> None:
        layout, chunk, matrices = share.layout, share.chunk, share.matrices
        hidden, most = layout.hidden, max(*share.neurons, share.stretch, 1)
        self.partial_rows = count_partial_rows(chunk)
        self.common = memory.take(
            {"values": 4 * chunk * most, "partials": 4 * self.partial_rows * hidden}
        )
        head = name_head(share.model)
        widths = [(chunk * hidden, chunk * hidden)]
        for name, (rows, length, _) in matrices.items():
            tokens = min(chunk, LOGIT_ROWS) if name == head else chunk
            widths.append((tokens * length, tokens * rows))
        experts = 0 if layout.expert_offset is None else share.model.expert_count
        job = {
            "inputs": 4 * max(read for read, _ in widths),
            "sums": 4 * max(given for _, given in widths),
            "routes": 4 * chunk * experts,
        }
        self.places = [Place(memory.take(job), memory.take_host(job)) for _ in range(share.jobs)]
        added = count_neurons(layout, share.stretch)
        self.staging = [
            Room(share.stretch, memory.take(added), memory.take_host(added))
            for _ in range(_STAGING_BUFFERS)
        ]
        self.layers = [
            Room(count, memory.take(count_neurons(layout, count))) for count in share.neurons
        ]
        self.matrices = {name: memory.take(count_matrix(*own)) for name, own in matrices.items()}
        pieces = [
            count_matrix(min(rows, PIECE_ROWS), length, precision)
            for rows, length, precision in matrices.values()
        ]
        memory.pass_on(max(sum(piece.values()) for piece in (added, *pieces)))
