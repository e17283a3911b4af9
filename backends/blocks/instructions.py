"""Programs: tables of instructions and of their arguments, made once and changed in place."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from pi2.arrays import I64, Raw
from pi2.backends.blocks.contract import FIELDS

_KERNEL, _ARGUMENTS, _ITEMS, _GRAIN, _NEXT, _WAITS, _FIRST = range(7)
_WORDS = 8


@dataclass(slots=True)
class Instruction:
    """A kernel with its arguments, while a program is made."""

    kernel: str
    address: int
    few_address: int
    """The kernel where there are several tokens; 0 where it is the same."""
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

    def __init__(self, instructions: list[Instruction], head: int) -> None:
        """``head``: the first instruction that computes only tokens whose logits are wanted."""
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
        self._parts = [
            _Part(self.code, self.values, instructions, begin, end)
            for begin, end in ((0, head), (head, len(instructions)))
        ]

    def set_tokens(self, count: int) -> None:
        """Let instructions before the head compute ``count`` tokens."""
        self._parts[0].set_tokens(count)

    def set_head_tokens(self, count: int) -> None:
        """Let the head compute ``count`` tokens."""
        self._parts[1].set_tokens(count)

    def set_items(self, number: int, first: int, end: int) -> None:
        """Let an instruction compute items ``first`` to ``end``."""
        self.code[number, _FIRST] = first
        self.code[number, _ITEMS] = end

    def set_value(self, number: int, name: str, value: int) -> None:
        """Change an argument of an instruction."""
        self.values[number][FIELDS[self.instructions[number].kernel].index(name)] = value


class _Part:
    """Instructions that compute the same number of tokens."""

    def __init__(
        self,
        code: I64,
        values: list[I64],
        instructions: list[Instruction],
        begin: int,
        end: int,
    ) -> None:
        self._code = code
        numbers = range(begin, end)
        self._of_tokens = np.array([n for n in numbers if instructions[n].scaled], np.int64)
        self._each = np.array([instructions[n].scaled for n in self._of_tokens], np.int64)
        self._several = np.array([n for n in numbers if instructions[n].few_address], np.int64)
        self._kernels = [
            np.array([kernel(instructions[n]) for n in self._several], np.int64)
            for kernel in (lambda own: own.address, lambda own: own.few_address)
        ]
        self._counts = [
            values[n][FIELDS[instructions[n].kernel].index("tokens") :][:1]
            for n in numbers
            if "tokens" in FIELDS[instructions[n].kernel]
        ]
        self._count = 0

    def set_tokens(self, count: int) -> None:
        if count == self._count:
            return
        self._count = count
        self._code[self._of_tokens, _ITEMS] = self._each * count
        self._code[self._several, _KERNEL] = self._kernels[int(count > 1)]
        for value in self._counts:
            value[0] = count


def _align(words: int) -> I64:
    """Return zeros that begin at a cache line."""
    raw: Raw = np.zeros(words + _WORDS, np.int64)
    skip = -raw.ctypes.data // 8 % _WORDS
    return np.asarray(raw[skip : skip + words])
