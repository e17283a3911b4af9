"""Instructions of a program as steps of a device: a kernel with its arrays and numbers.

Each instruction is a launch; neighbouring rows of a matrix, and heads that turn alike, are one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi2.backends.blocks.contract import PIECE, TYPES
from pi2.backends.gpu.arrays import TILE
from pi2.backends.gpu.kernels.specification import (
    CACHES,
    FIXED,
    GpuSpec,
    Number,
    ProductKernels,
    SelectKernels,
    StepKernel,
    Target,
)

if TYPE_CHECKING:
    from pi2.backends.blocks.instructions import Instruction
    from pi2.backends.blocks.operands import Matrix
    from pi2.backends.gpu.launchers.interface import DeviceArray
    from pi2.backends.gpu.model_arrays import ModelArrays, ModelUse

_VECTOR = 4
"""Elements that products read together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An instruction on the device."""

    kernel: StepKernel | ProductKernels
    arrays: Mapping[str, DeviceArray]
    numbers: dict[str, Number]
    each: int = 1
    """Vectors of a token."""


@dataclass(frozen=True, slots=True)
class ProgramSteps:
    """A program on a device."""

    steps: Sequence[Step | None]
    """Of its instructions; None for those that are no launch."""
    adders: Sequence[DeviceArray | None]
    """By layer, the array to which neurons add at once, if their sum is only added to it."""

    def describe(self, use: ModelUse, target: Target) -> GpuSpec:
        """Return all kernels that steps and chunks of a model take."""
        ffn, kernels = use.ffn, [own.kernel for own in self.steps if own]
        select = SelectKernels(
            scored=use.predictor != "router",
            experts=ffn.experts,
            expert_neurons=use.model.shape.ffn if ffn.experts else 0,
        )
        products = [own for own in kernels if isinstance(own, ProductKernels)]
        return GpuSpec(
            target=target,
            ffn=ffn,
            gathered=ffn if use.is_sparse else None,
            gates=ffn if use.predictor == "gate" else None,
            select=select if use.is_sparse else None,
            spreads=ffn if use.has_expert_biases else None,
            products=tuple(dict.fromkeys([*products, *use.predictors.values()])),
            steps=tuple(dict.fromkeys(own for own in kernels if isinstance(own, StepKernel))),
        )


class Translator:
    """Makes steps of a program's instructions."""

    def __init__(self, use: ModelUse, arrays: ModelArrays) -> None:
        self._use, self._arrays = use, arrays
        self._instructions = arrays.program.builder.instructions
        self._matrices: dict[int, Matrix] = {}
        self._others: set[int] = set()
        """Instructions whose rows another one computes."""
        for matrix in arrays.program.builder.matrices:
            first, *others = matrix.instructions
            self._matrices[first] = matrix
            self._others |= set(others)
        self._quantized: dict[int, tuple[int, int]] = {}
        """Vectors that quantised ones are made of, by the address of these: address and stride."""
        self._last: tuple[Instruction, Step] | None = None

    def translate(self) -> ProgramSteps:
        found = [self._translate(number, own) for number, own in enumerate(self._instructions)]
        adders = []
        for own in self._arrays.exchange.layers:
            adders.append(self._find_adder(self._instructions[own.gap]))
            if adders[-1] is not None:
                found[own.gap] = None
        return ProgramSteps(found, adders)

    def _find_adder(self, own: Instruction) -> DeviceArray | None:
        """Return the array to which an instruction adds the sum of neurons, if it does no more."""
        given, values = self._arrays.exchange.given, own.values
        if own.kernel != "term" or values["has_weights"]:
            return None
        is_alike = values["y_stride"] == self._use.model.stored_neuron_width
        if values["x"] != given.address or not is_alike:
            return None
        return self._arrays.find_array(values["y"])

    def _translate(self, number: int, own: Instruction) -> Step | None:
        values, matrix = own.values, self._matrices.get(number)
        if own.kernel.startswith("quantize"):
            # Products read what was not rounded.
            self._quantized[values["y"]] = values["x"], values["x_stride"]
            return None
        is_idle = own.kernel == "turn" and not (values["rotated"] or values["norm_place"])
        # Queries and keys that are spread alike have the same products.
        if number in self._others or is_idle or own.kernel == "spread_heads":
            return None
        if self._join(own, matrix):
            return None
        if own.kernel == "multiply" and matrix is not None and matrix.weight.format != "f32":
            step = self._multiply(own, matrix)
        else:
            step = self._translate_any(own, matrix)
        self._last = own, step
        return step

    def _join(self, own: Instruction, matrix: Matrix | None) -> bool:
        """Let the step before compute an instruction too, if it goes on where that one ends."""
        if self._last is None or self._last[0].kernel != own.kernel:
            return False
        before, step = self._last[0].values, self._last[1]
        if isinstance(step.kernel, ProductKernels) and matrix is not None:
            row = matrix.weight.row_bytes
            count, sizes = "rows", {"weights": row, "y": 4, "bias": 4 * int(before["bias"] > 0)}
        elif own.kernel == "turn" and not before["norm_place"]:
            count, sizes = "heads", {"x": 4 * before["head_dim"]}
        else:
            return False
        wanted = {name: before[name] + before[count] * size for name, size in sizes.items()}
        if own.values != before | wanted | {count: own.values[count]}:
            return False
        before[count] += own.values[count]
        step.numbers[count] += own.values[count]
        return True

    def _multiply(self, own: Instruction, matrix: Matrix) -> Step:
        """Return a product with a packed matrix, of which heads may have equal parts."""
        values, weight, blocks = own.values, matrix.weight, len(matrix.instructions)
        packed, skip = self._arrays.need(values["weights"])
        first = skip // weight.row_bytes
        x, each = self._quantized.get(values["x"], (values["x"], values["x_stride"] // 4 // blocks))
        inputs, inputs_at = self._need(x)
        assert inputs_at % _VECTOR == 0 == each % _VECTOR, matrix.key
        outputs, outputs_at = self._need(values["y"])
        arrays = {**packed.arrays, "inputs": inputs, "outputs": outputs}
        numbers: dict[str, Number] = {
            "inputs_at": inputs_at,
            "inputs_stride": each * blocks,
            "inputs_each": each,
            "tile": first // TILE,
            "begin": first % TILE,
            "rows": first % TILE + blocks * values["rows"],
            "outputs_at": outputs_at,
            "outputs_stride": values["y_stride"],
            "outputs_each": values["y_stride"] // blocks,
            "factor": _read_float(values["factor"]),
        }
        if values["bias"]:
            arrays["biases"], numbers["biases_at"] = self._need(values["bias"])
        kernel = ProductKernels(
            length=weight.length,
            precision=packed.shape.precision,
            bias=bool(values["bias"]),
            adds=bool(values["added"]),
            blocks=blocks,
        )
        return Step(kernel=kernel, arrays=arrays, numbers=numbers)

    def _translate_any(self, own: Instruction, matrix: Matrix | None) -> Step:
        values, format, arrays = own.values, "", dict(self._arrays.spans)
        if own.kernel in ("keep", "attend"):
            format = self._use.kv
        if own.kernel == "multiply":
            # Strides of inputs are bytes elsewhere.
            values = {**values, "x_stride": values["x_stride"] // 4}
        elif matrix is not None:
            packed, _ = self._arrays.need(values["weights"])
            format = packed.shape.precision
            arrays |= packed.arrays
        return make_step(own.kernel, values, format, arrays, self._find, _count_each(own))

    def _need(self, address: int) -> tuple[DeviceArray, int]:
        found = self._find(address)
        assert found is not None, address
        return found

    def _find(self, address: int) -> tuple[DeviceArray, int] | None:
        """See `Find`."""
        found = self._arrays.find(address)
        if found is None or "values" not in found[0].arrays:
            return None
        own, skip = found
        return own.arrays["values"], skip // own.item_bytes


Find = Callable[[int], "tuple[DeviceArray, int] | None"]
"""Return the array at an address, and how many elements of it come before; None of what only
processors need."""


def make_step(
    kernel: str,
    values: Mapping[str, int],
    format: str,
    arrays: Mapping[str, DeviceArray],
    find: Find,
    each: int = 1,
) -> Step:
    """Return the step of an instruction; ``arrays``: more than it names."""
    types, fixed = TYPES[kernel], FIXED.get(kernel, frozenset())
    numbers: dict[str, Number] = {}
    named: dict[str, DeviceArray] = {}
    shared: list[tuple[str, str]] = []
    for name, value in values.items():
        if types.get(name) == "float":
            numbers[name] = _read_float(value)
        elif name not in types and name not in CACHES:
            numbers[name] = value
        elif (placed := find(value)) is not None:
            same = (key for key, array in named.items() if array is placed[0])
            shared += [(name, key) for key in same][:1]
            named[name], numbers[f"{name}_at"] = placed
    known = tuple(
        (name, value) for name, value in values.items() if name in fixed or name.startswith("has_")
    )
    own = StepKernel(kernel=kernel, fixed=known, shared=tuple(shared), format=format)
    return Step(kernel=own, arrays={**arrays, **named}, numbers=numbers, each=each)


def _read_float(value: int) -> float:
    """Return the float32 that is the low half of a number."""
    return float(struct.unpack("<f", struct.pack("<I", value & 0xFFFFFFFF))[0])


def _count_each(own: Instruction) -> int:
    """Return how many vectors of a token an instruction takes by themselves."""
    if own.kernel == "cap":
        return own.ways[0].each // -(-own.values["length"] // PIECE)
    return own.ways[0].each if own.kernel == "normalize" else 1
