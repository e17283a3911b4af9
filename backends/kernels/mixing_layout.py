"""Sizes of the room in which a thread mixes for a chunk of tokens (`kernels.chunk_attention`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pi2.backends.kernels.spec import KernelSpec
from pi2.plan.weights.layout import round_up

MIXED_QUERIES = 128
"""Queries of several tokens that go through the KV cache together, or more heads."""
LANES = 16
"""Numbers of a vector; registers may be narrower."""
PLANES = 2
"""Bytes of an integer: one would lose shares that are small, of which there may be thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingLayout:
    """Parts of a task of `kernels.chunk_attention`, and the room that it needs."""

    rounds: bool
    """Whether elements of queries, and shares, are rounded to integers of `PLANES` bytes."""
    rows: int
    """Queries that are multiplied together: their sums fill the registers."""
    columns: int
    """Vectors of `LANES` keys, or elements of values, that are multiplied together."""
    block: int
    """Tokens of the KV cache that are prepared together: they fill the first-level cache."""
    tokens: int
    """Most tokens of a task."""
    slots: int
    """Queries that a task has room for."""
    width: int
    """Length of a head's vectors."""

    @property
    def float_sizes(self) -> Mapping[str, int]:
        """Numbers of float32 by their use."""
        return _fill_lines(
            {
                "totals": self.slots * LANES,
                "tops": self.slots,
                "query_scales": self.slots,
                "scores": self.rows * self.block,
                "block_totals": self.rows * LANES,
                "block_tops": self.rows,
                "factors": self.rows,
                "own_factors": self.rows,
                "units": self.rows,
                "unit_factors": self.rows,
                "key_scales": self.block,
                "value_scales": self.block,
            },
            LANES,
        )

    @property
    def integer_sizes(self) -> Mapping[str, int]:
        """Numbers of int32 by their use."""
        names = ("query_places", "result_places", "query_offsets")
        return _fill_lines(dict.fromkeys(names, self.slots), LANES)

    @property
    def byte_sizes(self) -> Mapping[str, int]:
        if not self.rounds:
            return {}
        kept = self.block * self.width
        sizes = {"keys": kept, "values": kept, "shares": self.rows * PLANES * self.block}
        return _fill_lines(sizes, 4 * LANES)

    @property
    def room_bytes(self) -> int:
        numbers = count(self.float_sizes) + count(self.integer_sizes)
        return 4 * numbers + count(self.byte_sizes)


def _fill_lines(sizes: Mapping[str, int], line: int) -> dict[str, int]:
    return {name: round_up(size, line) for name, size in sizes.items()}


def count(sizes: Mapping[str, int]) -> int:
    """Return the sum of sizes; never 0, as arrays are not empty."""
    return max(sum(sizes.values()), 4 * LANES)


def lay_out_mixing(spec: KernelSpec) -> MixingLayout:
    isa = spec.isa
    # Codes of int8 keys and values are multiplied as they are, unless the plan rounds nothing.
    rounds = (
        isa.dot == "vnni"
        and spec.kv == "int8"
        and spec.chunk_planes < 4
        and spec.most_planes >= PLANES
        and spec.attention.head_dim % LANES == 0
    )
    group = spec.attention.heads // spec.attention.kv_heads
    return _lay_out(group, spec.attention.head_dim, rounds=rounds, is_wide=isa.lanes == LANES)


def _lay_out(group: int, head_dim: int, *, rounds: bool, is_wide: bool) -> MixingLayout:
    """Return the layout if ``group`` heads share a KV cache."""
    rows, columns = (8, 2) if is_wide else (4, 1)
    tokens = max(MIXED_QUERIES // group, 1)
    return MixingLayout(
        rounds=rounds,
        rows=rows,
        columns=columns,
        # Wide heads have few of them: prepared, they fit the cache, and the room of a dense FFN.
        block=max(min(64, 8192 // head_dim // LANES * LANES), LANES),
        tokens=tokens,
        slots=round_up(tokens * group, rows),
        width=head_dim,
    )


def count_most_room(group: int, head_dim: int) -> int:
    """Return the bytes that a thread needs with any schedule and any types."""
    layouts = (_lay_out(group, head_dim, rounds=rounds, is_wide=True) for rounds in (False, True))
    return max(layout.room_bytes for layout in layouts)
