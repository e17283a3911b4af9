"""Programs of `pi2.backends.blocks`, run in numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

from pi2.backends.blocks.contract import FIELDS
from pi2.backends.reference.instructions import attention, elements, products, states
from pi2.backends.reference.instructions.arguments import Arguments
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType

INSTRUCTIONS: Mapping[str, Callable[[Arguments], None]] = {
    name: next(
        getattr(module, name)
        for module in (attention, elements, products, states)
        if hasattr(module, name)
    )
    for name in FIELDS
}
"""Definitions of kernels by their names."""


class NumpyInterpreter:
    """See `pi2.backends.blocks.interpreter.Interpreter`: one thread, and nothing is compiled."""

    def __init__(
        self, model: Model | None, formats: list[str], kv: KvType, *, lanes: int = 4
    ) -> None:
        """``lanes``: of the registers for which inputs of products are ordered."""
        self.lanes, self._kv = lanes, kv
        self._found: list[tuple[str, str | None]] = []

    def find(self, kernel: str, own: str | None = None) -> int:
        """See `Interpreter`."""
        if (kernel, own) not in self._found:
            self._found.append((kernel, own))
        return self._found.index((kernel, own))

    def run(self, program: int, begin: int, end: int, most: int) -> None:
        """See `Interpreter`."""
        words = (ctypes.c_int64 * (8 * end)).from_address(program)
        for place in range(8 * begin, 8 * end, 8):
            number, arguments, items, *_, first, _ = words[place : place + 8]
            if first < items:
                self.compute(*self._found[number], arguments, (first, items))

    def compute(self, kernel: str, own: str | None, address: int, items: tuple[int, int]) -> None:
        """Compute items ``items`` of a kernel, whose arguments are at an address."""
        given = Arguments(kernel, address, items, format=own, kv=self._kv, lanes=self.lanes)
        INSTRUCTIONS[kernel](given)

    def close(self) -> None:
        """Do nothing: it has nothing."""
