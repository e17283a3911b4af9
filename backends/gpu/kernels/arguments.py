"""Arguments of an instruction, as its kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.tirx.script import builder as T

from pi2.backends.blocks.contract import TYPES
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.specification import StepKernel


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


@dataclass
class Arguments:
    """Arrays, numbers and known values by name; arrays are declared first."""

    kernel: c.Kernel
    step: StepKernel
    fp16: bool
    """Whether kernels may have fp16 values."""
    _buffers: dict[str, c.Buffer] = field(default_factory=dict)

    def __getattr__(self, name: str) -> int:
        """Return a value that is known: code depends on it."""
        for own, value in self.step.fixed:
            if own == name:
                return value
        raise AttributeError(name)

    def take(self, *names: str) -> list[Vector]:
        """Declare arrays, and where in them the arguments begin."""
        buffers = [self.take_buffer(name) for name in names]
        starts = [self.kernel.take_number(f"{name}_at") for name in names]
        return [Vector(*pair) for pair in zip(buffers, starts, strict=True)]

    def take_buffer(self, name: str, dtype: str | None = None) -> c.Buffer:
        """Declare an array; arguments that have the same array share it."""
        name = dict(self.step.shared).get(name, name)
        if name not in self._buffers:
            own = dtype or TYPES[self.step.kernel].get(name, "uint32")
            self._buffers[name] = self.kernel.take_array(name, own)
        return self._buffers[name]

    def take_some(self, *names: str) -> dict[str, Vector]:
        """Declare arrays without those that the instruction has not (``has_NAME``)."""
        fixed = dict(self.step.fixed)
        found = [name for name in names if fixed.get(f"has_{name}", 1)]
        return dict(zip(found, self.take(*found), strict=True))

    def number(self, *names: str) -> list[c.Expr]:
        return [self.kernel.take_number(name) for name in names]

    def real(self, *names: str) -> list[c.Expr]:
        return [self.kernel.take_number(name, "float32") for name in names]


def divide(value: c.Expr, by: c.Expr | int) -> c.Expr:
    """Return a whole number of times, named."""
    return c.let(T.floordiv(value, by))
