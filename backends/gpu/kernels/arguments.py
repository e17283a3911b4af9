"""Arguments of an instruction, as its kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import FIELDS, TYPES
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.specification import CACHES, StepKernel

_OF_LAUNCHES = ("tokens", "spans", "runs", "steps")
"""Numbers of launches that instructions need not have."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Elements of an array, from one on."""

    buffer: c.Buffer
    at: c.Expr

    def __getitem__(self, index: c.Expr) -> c.Expr:
        return self.buffer[self.at + index]

    def put(self, index: c.Expr, value: c.Expr) -> None:
        c.store(self.buffer, self.at + index, value)

    def skip(self, elements: c.Expr) -> Vector:
        """Return what begins so many elements later."""
        return Vector(self.buffer, c.let(self.at + elements))


class Arguments:
    """All arguments of an instruction by name (``own.x``): known values, arrays, and numbers.
    Compiled kernels have only the parameters that their code uses."""

    def __init__(self, kernel: c.Kernel, step: StepKernel, fp16: bool) -> None:
        """``fp16``: whether kernels may have fp16 values."""
        self.kernel, self.step, self.fp16 = kernel, step, fp16
        self._values: dict[str, Any] = dict(step.fixed)
        fields, same = FIELDS[step.kernel], dict(step.shared)
        for name in dict.fromkeys((*fields, *_OF_LAUNCHES)):
            if name in self._values:
                continue
            kind = CACHES.get(name) or TYPES[step.kernel].get(name)
            if kind is None:
                self._values[name] = kernel.take_number(name)
            elif kind == "float":
                self._values[name] = kernel.take_number(name, "float32")
            else:
                self._values[name] = self._take(name, same.get(name), kind)

    def _take(self, name: str, other: str | None, kind: str) -> Vector:
        """Declare an array, which another argument may share, and where in it this begins."""
        if other is not None:
            buffer = self._values[other].buffer
        else:
            # What processors have in blocks of a format is packed, or float32.
            buffer = self.kernel.take_array(name, "float32" if kind == "uint8" else kind)
        return Vector(buffer, self.kernel.take_number(f"{name}_at"))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


def divide(value: c.Expr, by: c.Expr | int) -> c.Expr:
    """Return a whole number of times, named."""
    return c.let(T.floordiv(value, by))
