"""Where a thread mixes for a chunk of tokens: parts of three arrays (`kernels.mixing_layout`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.parameters import Parameters
from pi2.backends.kernels.mixing_layout import MixingLayout, count, lay_out_mixing
from pi2.backends.kernels.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an array."""

    buffer: v.Buffer
    base: v.Expr

    def load(self, place: v.Expr | int, lanes: int) -> v.Expr:
        """Return elements from ``place`` on."""
        return v.load(self.buffer, self.base + place, lanes)

    def store(self, place: v.Expr | int, value: v.Expr, lanes: int) -> None:
        """Set elements from ``place`` on."""
        v.store(self.buffer, self.base + place, value, lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingRoom:
    """A thread's room; sizes are those of `MixingLayout`.

    Each of a task's queries has float32 ``totals`` [slots, 16] (of its shares, still to be added
    up), ``tops`` [slots] (largest score) and ``query_scales`` [slots], and int32 ``query_places``,
    ``result_places`` and ``query_offsets`` [slots].  The others belong to a block or a tile.
    """

    layout: MixingLayout
    floats: Mapping[str, Region]
    integers: Mapping[str, Region]
    codes: Mapping[str, Region]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The rooms of all threads: float32, int32 and int8 [threads, size]."""

    layout: MixingLayout
    floats: v.Buffer
    integers: v.Buffer
    codes: v.Buffer

    def take_thread(self, thread: v.Expr) -> MixingRoom:
        """Return the room of a thread."""
        layout = self.layout
        return MixingRoom(
            layout=layout,
            floats=_divide(self.floats, thread, layout.float_sizes),
            integers=_divide(self.integers, thread, layout.integer_sizes),
            codes=_divide(self.codes, thread, layout.byte_sizes),
        )


def _divide(buffer: v.Buffer, thread: v.Expr, sizes: Mapping[str, int]) -> dict[str, Region]:
    start = v.let(thread * count(sizes))
    regions, done = {}, 0
    for name, size in sizes.items():
        regions[name] = Region(buffer, start + done)
        done += size
    return regions


def take_room(take: Parameters, spec: KernelSpec) -> Room:
    """Declare the arrays."""
    layout = lay_out_mixing(spec)

    def take_array(name: str, dtype: str, sizes: Mapping[str, int]) -> v.Buffer:
        return take.take_array(name, dtype, "threads", count(sizes))

    return Room(
        layout=layout,
        floats=take_array("mixing_floats", "float32", layout.float_sizes),
        integers=take_array("mixing_integers", "int32", layout.integer_sizes),
        codes=take_array("mixing_codes", "int8", layout.byte_sizes),
    )
