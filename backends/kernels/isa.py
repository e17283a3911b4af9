"""Instruction sets: the dot-product schedule that a CPU's features allow; plain Python."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal

from pi2.plan.weights.layout import split_lanes

DotKind = Literal["vnni", "sdot", "maddubs", "multiply"]
"""How int8 products are summed: ``vnni`` (vpdpbusd) and ``sdot`` add 4 products to an int32;
``maddubs`` (vpmaddubsw) adds 2 to an int16; ``multiply`` is plain int16 arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isa:
    """A schedule: primitive, register width and what LLVM must know to compile it."""

    name: str
    dot: DotKind
    lanes: int
    """int32 lanes of a register; wider vectors are cut into pieces of this size."""
    mcpu: str | None
    mattr: tuple[str, ...] = ()
    tile_rows: int = 4
    """Rows that are multiplied together with several tokens: accumulators fit the registers."""
    tile_tokens: int = 2
    """Tokens of that tile, in two planes: 4096 elements of each fit the first-level cache."""
    unrolls: bool = False
    """Whether a block of several rows and tokens is written out without a loop, if it gains
    something: unpacked weights fit the registers next to sums."""
    blocks: bool = False
    """Whether many tokens are multiplied sixteen by sixteen rows (`amx`)."""
    prefetch_level: int = 1
    """First cache that takes what memory is asked for: more requests are under way where the second
    has more buffers than the first."""


BLOCK_TOKENS = 16
"""Tokens of a tile."""
BLOCKED_ROWS = 64
"""Rows that are unpacked together for tiles: the more of them there are, the less often the tokens
come from beyond the second-level cache."""
BLOCKED_GROUP_BYTES = 32 * 16 + 4 * 16
"""Bytes of a group of 16 of them unpacked: weights and scales."""
BLOCKED_SUM_BYTES = (4 + 5) * 4 * 16 * 16
"""Bytes in which a thread keeps sums of tiles: int32 of two groups, in two planes, and float32 of
some of the lanes."""


def count_places(length: int) -> int:
    """Return the groups that vectors of ``length`` have room for in the order of tiles: as many for
    each lane of the widest block (`pi2.plan.weights.layout.split_lanes`)."""
    blocks = split_lanes(length)
    return blocks[0] * len(blocks)


def count_tile_bytes(length: int) -> int:
    """Return the bytes in which a thread unpacks rows of ``length`` for tiles, and keeps sums."""
    rows = BLOCKED_ROWS // 16 * count_places(length) * BLOCKED_GROUP_BYTES
    return rows + BLOCKED_SUM_BYTES


def count_block_bytes(planes: int) -> int:
    """Return the bytes of a group of 16 tokens in the order of tiles: codes and scales."""
    return BLOCK_TOKENS * (32 * planes + 4)


def count_blocks_bytes(length: int, planes: int) -> int:
    """Return the bytes of vectors of ``length`` of 16 tokens in that order."""
    return count_places(length) * count_block_bytes(planes)


_X86 = (
    (
        {"avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-int8"},
        Isa(
            name="amx",
            dot="vnni",
            lanes=16,
            mcpu="cascadelake",
            mattr=("+amx-tile", "+amx-int8"),
            unrolls=True,
            blocks=True,
        ),
    ),
    (
        {"avx512f", "avx512bw", "avx512vl", "avx512vnni"},
        Isa(name="avx512vnni", dot="vnni", lanes=16, mcpu="cascadelake", unrolls=True),
    ),
    (
        {"avx512f", "avx512bw", "avx512vl"},
        Isa(name="avx512bw", dot="maddubs", lanes=16, mcpu="skylake-avx512"),
    ),
    (
        {"avx2", "fma", "f16c"},
        Isa(name="avx2", dot="maddubs", lanes=8, mcpu="x86-64-v3", tile_rows=2, unrolls=True),
    ),
    ({"sse4.2"}, Isa(name="sse4.2", dot="maddubs", lanes=4, mcpu="x86-64-v2", tile_rows=2)),
    (set[str](), Isa(name="x86-64", dot="multiply", lanes=4, mcpu="x86-64", tile_rows=2)),
)

_ARM = (
    (
        {"neon", "dotprod", "fp16"},
        Isa(
            name="dotprod", dot="sdot", lanes=4, mcpu=None, mattr=("+neon", "+dotprod", "+fullfp16")
        ),
    ),
    ({"neon", "dotprod"}, Isa(name="dotprod", dot="sdot", lanes=4, mcpu=None, mattr=("+dotprod",))),
    (set[str](), Isa(name="neon", dot="multiply", lanes=4, mcpu=None, mattr=("+neon",))),
)

ARCHITECTURES = ("x86-64", "aarch64")


def list_newest(architecture: str) -> list[Set[str]]:
    """Features of the newest processors of ``architecture``: without tiles of AMX, and with."""
    return [_X86[1][0], _X86[0][0]] if architecture == "x86-64" else [_ARM[0][0]]


def choose_isa(features: Set[str], architecture: str) -> Isa:
    """Return the fastest schedule that ``features`` allow on ``architecture``."""
    level = 2 if "l2-prefetch" in features else 1
    return replace(_choose(features, architecture)[1], prefetch_level=level)


def choose_features(features: Set[str], architecture: str, *, prefetches: bool) -> tuple[str, ...]:
    """Return the ones of ``features`` that this schedule needs, sorted: no others matter to it.
    ``prefetches``: whether it matters which cache prefetches fill."""
    own = _choose(features, architecture)[0]
    return tuple(sorted(own | features & {"l2-prefetch"} if prefetches else own))


def _choose(features: Set[str], architecture: str) -> tuple[Set[str], Isa]:
    assert architecture in ARCHITECTURES, architecture
    table = _X86 if architecture == "x86-64" else _ARM
    return next(entry for entry in table if entry[0] <= features)
