"""Programs: tables of instructions and of their arguments, made once and changed in place."""

from __future__ import annotations

import numpy as np

from pi2.arrays import I32, I64, Raw
from pi2.backends.blocks.contract import FIELDS
from pi2.backends.blocks.instructions import MANY, Instruction, Planes

_ORDERS = ("order", "together", "parts")
_KERNEL, _ARGUMENTS, _ITEMS, _GRAIN, _NEXT, _WAITS, _FIRST, _ALONE = range(8)
_WORDS = 8


_PLACES = {
    kernel: {name: place for place, name in enumerate(names)} for kernel, names in FIELDS.items()
}


class Program:
    """Instructions in the memory where compiled code reads them."""

    def __init__(
        self,
        instructions: list[Instruction],
        head: int,
        planes: Planes,
        *,
        keeps_bits: bool = False,
    ) -> None:
        """``head``: the first instruction that computes only tokens whose logits are wanted;
        ``keeps_bits``: a token has the same bits in every step."""
        self.instructions = instructions
        self._head, self._planes, self._now = head, planes, planes.one
        sizes = [-(-len(FIELDS[own.kernel]) // _WORDS) * _WORDS for own in instructions]
        self._code = _align(len(instructions) * _WORDS)
        self._values = _align(sum(sizes))
        self.code = self._code.reshape(-1, _WORDS)
        self.values: list[I64] = []
        place = 0
        for own, size in zip(instructions, sizes, strict=True):
            fields = FIELDS[own.kernel]
            assert set(own.values) == set(fields), set(own.values) ^ set(fields)
            row = self._values[place : place + len(fields)]
            row[:] = [own.values[name] for name in fields]
            self.values.append(row)
            place += size
        places = np.cumsum([0, *sizes])[:-1]
        self.code[:, _ARGUMENTS] = self._values.ctypes.data + places * self._values.itemsize
        self.code[:, _WAITS] = [int(own.waits) for own in instructions]
        self.address: int = self._code.ctypes.data
        self._parts = [
            _Part(self.code, self.values, instructions, begin, end, keeps_bits)
            for begin, end in ((0, head), (head, len(instructions)))
        ]

    def set_tokens(self, count: int, *, is_chunk: bool) -> None:
        """Let instructions before the head compute ``count`` tokens, which may be a chunk."""
        own = self._planes
        self._now = own.chunk if is_chunk else own.one if count == 1 else own.several
        self._parts[0].set_planes(self._now)
        self._parts[0].set_tokens(count, is_chunk)

    def set_head_tokens(self, count: int) -> None:
        """Let the head compute ``count`` tokens of the layers' output."""
        self._parts[1].set_planes(self._now)
        self._parts[1].set_tokens(count, False)

    def set_rows(self, number: int, first: int, end: int) -> None:
        """Let an instruction compute rows ``first``, which begins a panel, to ``end``."""
        each = self.instructions[number].ways[self._parts[int(number >= self._head)].way].rows
        assert first % each == 0, "pieces begin with a panel"
        self.set_items(number, first // each, -(-end // each))

    def set_items(self, number: int, first: int, end: int) -> None:
        """Let an instruction compute items ``first`` to ``end``."""
        self.code[number, _FIRST], self.code[number, _ITEMS] = first, end

    def read_value(self, number: int, name: str) -> int:
        return int(self.values[number][_PLACES[self.instructions[number].kernel][name]])

    def set_value(self, number: int, name: str, value: int) -> None:
        self.values[number][_PLACES[self.instructions[number].kernel][name]] = value


class _Part:
    def __init__(
        self,
        code: I64,
        values: list[I64],
        instructions: list[Instruction],
        begin: int,
        end: int,
        keeps_bits: bool,
    ) -> None:
        self._keeps_bits = keeps_bits
        self._code = code[begin:end]
        own = instructions[begin:end]
        self._ways = [
            np.array([(w.address, w.grain, w.items, w.each, w.tokens) for w in ways], np.int64).T
            for ways in zip(
                *((*each.ways, each.apart or each.ways[2]) for each in own), strict=True
            )
        ]
        fields = [FIELDS[instruction.kernel] for instruction in own]
        rows = values[begin:end]

        def find(*wanted: str) -> list[tuple[I64, Instruction]]:
            return [
                (row[place : place + 1], instruction)
                for row, instruction in zip(rows, own, strict=True)
                for name in wanted
                if (place := _PLACES[instruction.kernel].get(name)) is not None
            ]

        self._counts = [(place, each.pairs) for place, each in find("tokens")]
        self._orders = [
            (place, each.orders) for place, each in find(*_ORDERS) if each.orders is not None
        ]
        # Without experts, all tokens belong to the only one.
        self._starts: I32 = np.zeros(2, np.int32)
        for row, names in zip(rows, fields, strict=True):
            if "starts" in names and not row[names.index("starts")]:
                row[names.index("starts")] = self._starts.ctypes.data
        self._made = np.array([instruction.plane for instruction in own], np.int64)
        self._planes = 0
        """Number of planes; arguments that depend on it: those read, and whether there are more."""
        self._read = [place for place, each in find("planes") if each.values["plane_stride"]]
        self._rests = [(place, each.plane) for place, each in find("has_rest")]
        self._little = np.array([int(instruction.is_little) for instruction in own], np.int64)
        self._way = -1
        self._count = 0

    @property
    def way(self) -> int:
        """The number of the instructions' way."""
        return max(0, min(self._way, 2))

    def set_planes(self, planes: int) -> None:
        """Let activations have so many planes."""
        if planes == self._planes:
            return
        self._planes, self._count = planes, 0
        for place in self._read:
            place[0] = planes
        for place, plane in self._rests:
            place[0] = int(plane + 1 < planes)

    def set_tokens(self, count: int, is_chunk: bool) -> None:
        is_many = count >= MANY and (is_chunk or not self._keeps_bits)
        way = int(count > 1) if not is_many else 2 if is_chunk else 3
        if count == self._count and way == self._way:
            return
        self._count = count
        kernels, grains, items, each, tokens = self._ways[way]
        if way != self._way:
            self._code[:, _KERNEL], self._code[:, _GRAIN] = kernels, grains
            self._code[:, _ALONE] = self._little if way == 0 else 0
            for place, orders in self._orders:
                place[0] = orders[int(is_many)]
            self._way = way
        own = items + each * -(-count // tokens)
        self._code[:, _ITEMS] = np.where(self._made < self._planes, own, 0)
        for value, pairs in self._counts:
            value[0] = count * pairs
        self._starts[1] = count


def _align(words: int) -> I64:
    raw: Raw = np.zeros(words + _WORDS, np.int64)
    skip = -raw.ctypes.data // 8 % _WORDS
    return np.asarray(raw[skip : skip + words])
