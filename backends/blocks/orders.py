"""In which order the weights of a block of 256 lie in registers, 16 by 16.

Plain Python: activations are put into that order when they are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

CHUNK = 16


@dataclass(frozen=True, slots=True)
class Order:
    """Fields of 16 bytes each: ``place`` says which 16 elements field f of load b has."""

    loads: int
    fields: int
    place: Callable[[int, int], int]

    def list_parts(self, width: int) -> list[tuple[int, ...]]:
        """Return what registers of ``width`` bytes have, in the order in which kernels take
        them."""
        each = width // CHUNK
        return [
            tuple(self.place(load, field) for load in range(first, first + each))
            for first in range(0, self.loads, each)
            for field in range(self.fields)
        ]


NATURAL = Order(16, 1, lambda b, f: b)
NIBBLES = Order(8, 2, lambda b, f: 4 * (b // 2) + b % 2 + 2 * f)
PAIRS = Order(4, 4, lambda b, f: 8 * (b // 2) + b % 2 + 2 * f)
SIXES = Order(8, 2, lambda b, f: 8 * (b // 4) + b % 4 + 4 * f)
HALVES = Order(8, 2, lambda b, f: 2 * b + f)

_ORDERS: Mapping[str, Order] = {
    "q2_k": PAIRS,
    "q3_k": PAIRS,
    "q4_k": NIBBLES,
    "q5_k": NIBBLES,
    "q6_k": SIXES,
    "tq2_0": PAIRS,
    "iq4_xs": HALVES,
}


def find_order(name: str) -> Order:
    """Return the order of a format."""
    return _ORDERS.get(name, NATURAL)


def list_offsets(name: str, width: int) -> tuple[int, ...]:
    """Return where each 16 elements of a block are put, in bytes from its beginning."""
    flat = [chunk for part in find_order(name).list_parts(width) for chunk in part]
    return tuple(CHUNK * flat.index(chunk) for chunk in range(256 // CHUNK))


_BUNDLED = frozenset({"q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"})
"""Formats of nibbles, whose groups of 32 are computed several at once: the first halves of all of
them, then the second ones."""


def count_together(name: str, width: int) -> int:
    """Return the groups of 32 of a format whose halves lie together in activations."""
    return width // CHUNK if name in _BUNDLED and width >= 2 * CHUNK else 1
