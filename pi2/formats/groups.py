"""Blocks of 32 with one fp16 scale, and a minimum in Q4_1 and Q5_1; IQ4_NL looks its codes up."""

from __future__ import annotations

from pi2.formats.format import Activations, Format


def _make(name: str, number: int, block_bytes: int, *halves: int) -> Format:
    activations: Activations = "q8_0"
    return Format(
        name=name,
        number=number,
        block=32,
        block_bytes=block_bytes,
        activations=activations,
        halves=halves,
    )


FORMATS = (
    _make("q4_0", 2, 18, 0),
    _make("q4_1", 3, 20, 0, 2),
    _make("q5_0", 6, 22, 0),
    _make("q5_1", 7, 24, 0, 2),
    _make("q8_0", 8, 34, 0),
    _make("iq4_nl", 20, 18, 0),
)
