"""Programs: tables of instructions and of their arguments, made once and changed in place."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from pi2.arrays import I64, Raw
from pi2.backends.blocks.contract import FIELDS

_KERNEL, _ARGUMENTS, _ITEMS, _GRAIN, _NEXT, _WAITS = range(6)
_WORDS = 8


@dataclass(slots=True)
class Instruction:
    """A kernel with its arguments, while a program is made."""

    kernel: str
    address: int
    values: dict[str, int]
    layer: int | None
    grain: int = 1
    waits: bool = True
    scaled: int = 1
    """Items of a token, for instructions whose items are of tokens; 0: items stay the same."""
    items: int = 0
    label: str = ""


def put_float(value: float) -> int:
    """Return the number whose low half is a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


class Program:
    """Instructions in the memory where compiled code reads them."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        sizes = [-(-len(FIELDS[own.kernel]) // _WORDS) * _WORDS for own in instructions]
        self._code = _align(len(instructions) * _WORDS)
        self._values = _align(sum(sizes))
        self.code = self._code.reshape(-1, _WORDS)
        self.values: list[I64] = []
        place = 0
        for number, (own, size) in enumerate(zip(instructions, sizes, strict=True)):
            fields = FIELDS[own.kernel]
            assert set(own.values) == set(fields), set(own.values) ^ set(fields)
            row = self._values[place : place + len(fields)]
            row[:] = [own.values[name] for name in fields]
            self.values.append(row)
            self.code[number, _KERNEL] = own.address
            self.code[number, _ARGUMENTS] = row.ctypes.data
            self.code[number, _GRAIN] = own.grain
            self.code[number, _WAITS] = int(own.waits)
            self.code[number, _ITEMS] = own.items
            place += size
        self.address: int = self._code.ctypes.data
        self._per_token = np.array([own.scaled for own in instructions], np.int64)
        self._of_tokens = np.flatnonzero(self._per_token)
        with_tokens = [n for n, own in enumerate(instructions) if "tokens" in FIELDS[own.kernel]]
        self._counts = [
            self.values[n][FIELDS[instructions[n].kernel].index("tokens") :][:1]
            for n in with_tokens
        ]
        self._count = 0

    def set_tokens(self, count: int) -> None:
        """Let all instructions compute ``count`` tokens."""
        if count == self._count:
            return
        self._count = count
        chosen = self._of_tokens
        self.code[chosen, _ITEMS] = self._per_token[chosen] * count
        for value in self._counts:
            value[0] = count

    def set_value(self, number: int, name: str, value: int) -> None:
        """Change an argument of an instruction."""
        self.values[number][FIELDS[self.instructions[number].kernel].index(name)] = value


def _align(words: int) -> I64:
    """Return zeros that begin at a cache line."""
    raw: Raw = np.zeros(words + _WORDS, np.int64)
    skip = -raw.ctypes.data // 8 % _WORDS
    return np.asarray(raw[skip : skip + words])
