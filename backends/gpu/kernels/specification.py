"""Which kernels are wanted, and for what device: everything that the generated code depends on.

Plain Python: no TVM.  Two programs with equal specifications share one compiled image."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from zlib import crc32

from pi2.plan.documents.model_parts import SMOOTH_ACTIVATIONS, Ffn
from pi2.plan.weights.layout import GROUP, Precision

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.weights.layout import BundleLayout

Api = Literal["opencl", "webgpu", "cuda"]
NumberType = Literal["int32", "float32"]
Number = int | float

ENTRY_SUFFIX = "_kernel"
"""What TVM adds to a kernel's name in its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Work groups along one axis: ``times`` for each ``per`` of a number, rounded up, or ``times``
    without a number."""

    times: int = 1
    number: str | None = None
    per: int = 1

    def count(self, numbers: Mapping[str, Number]) -> int:
        if self.number is None:
            return self.times
        return self.times * -(-int(numbers[self.number]) // self.per)


ONCE = Axis()
"""An axis with a single work group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How a kernel is launched."""

    name: str
    arrays: tuple[str, ...]
    """In the order of the code's parameters."""
    numbers: tuple[tuple[str, NumberType], ...]
    """They follow the arrays, in the order of the code's parameters."""
    block: tuple[int, int, int]
    """Threads of a work group by axis."""
    grid: tuple[Axis, Axis]
    """The first two axes: WebGPU needs the third itself."""
    code: int
    """Which of the image's codes holds it."""

    def count_groups(self, numbers: Mapping[str, Number]) -> tuple[int, int]:
        first, second = self.grid
        return first.count(numbers), second.count(numbers)


class _Written:
    """Data that other processes read as JSON."""

    def to_json(self) -> str:
        from pydantic import TypeAdapter

        return TypeAdapter(type(self)).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        from pydantic import TypeAdapter

        return TypeAdapter(cls).validate_json(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage(_Written):
    """Compiled kernels."""

    __pydantic_config__: ClassVar = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    api: Api
    codes: tuple[bytes, ...]
    """OpenCL C sources, WGSL sources, or cubins."""
    kernels: Mapping[str, Signature]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the compiler must know of a device."""

    api: Api
    fp16: bool
    """Whether kernels may have fp16 values; otherwise they take them out of words of 32 bits."""
    arch: str | None = None
    """Architecture of a CUDA device, such as ``sm_80``; None for the other APIs."""

    def __post_init__(self) -> None:
        assert (self.arch is not None) == (self.api == "cuda"), self


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnKernels:
    """The FFN over a range of a layer's neurons (`pi2.backends.gpu.kernels.ffn`)."""

    hidden: int
    precision: Precision
    options: Ffn
    experts: int = 0
    """Experts of an MoE model, shared ones included; 0 for a model without experts."""
    weighs_input: bool = False
    """Whether experts' weights multiply gates and ups, not what neurons compute of them."""
    in_rows: bool = False
    """Whether gates and up rows are in rows, as neurons in slots are, instead of in tiles."""

    def __post_init__(self) -> None:
        assert self.hidden % GROUP == 0, self

    @classmethod
    def of(cls, layout: BundleLayout, model: Model, *, in_rows: bool = False) -> FfnKernels:
        """Return the kernels for a model's neurons of ``layout``."""
        return cls(
            hidden=layout.hidden,
            precision=layout.precision,
            options=model.ffn.model_copy(update={"absent_layers": (), "gate_sparsity": ()}),
            experts=0 if model.moe is None else model.expert_count,
            weighs_input=model.moe is not None and model.moe.weighs == "input",
            in_rows=in_rows,
        )

    @property
    def parts(self) -> int:
        """Vectors of a neuron that are multiplied with the input."""
        return 2 if self.options.gated else 1

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.options.activation in SMOOTH_ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernels:
    """Products of inputs with a matrix whose rows have ``length`` elements."""

    length: int
    precision: Precision
    bias: bool = False
    relu: bool = False
    """Whether negative values become 0."""
    adds: bool = False
    """Whether products are added to what the outputs hold."""
    blocks: int = 1
    """Parts of the rows that have inputs of their own, such as the predictors of experts."""

    def __post_init__(self) -> None:
        assert self.length % GROUP == 0, self

    @property
    def name(self) -> str:
        parts = [f"product_{self.precision}_{self.length}"]
        parts += [name for name in ("bias", "relu", "adds") if getattr(self, name)]
        parts += [f"blocks_{self.blocks}"] if self.blocks > 1 else []
        return "_".join(parts)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FIXED: Mapping[str, frozenset[str]] = {
    kernel: frozenset(names.split()) for kernel, names in _TABLES["fixed"].items()
}
"""Arguments of instructions that code depends on, by kernel; so do those named ``has_``."""


CACHES: Mapping[str, str] = {
    **dict.fromkeys(("key_cache", "value_cache"), "uint32"),
    **dict.fromkeys(("key_scales", "value_scales"), "float32"),
}
"""Arrays of instructions whose elements a plan chooses: words of them, or their scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKernel:
    """An instruction of a program (`pi2.backends.blocks.contract`)."""

    kernel: str
    fixed: tuple[tuple[str, int], ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    """Arrays that are the array of another argument, which stands before them."""
    format: str = ""
    """Of its weights, or of the KV cache."""

    @property
    def name(self) -> str:
        return f"{self.kernel}_{crc32(repr((self.fixed, self.shared, self.format)).encode()):x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectKernels:
    """The selection of neurons (`pi2.backends.gpu.kernels.gathered`)."""

    scored: bool = True
    """Whether neurons have scores."""
    experts: int = 0
    """Of an MoE model, shared ones too; 0 without."""
    expert_neurons: int = 0

    def __post_init__(self) -> None:
        assert self.scored or self.experts, self


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec(_Written):
    """Kernels for a device."""

    program: ClassVar[str] = "pi2.backends.gpu.kernels.compile"
    """The module that makes the kernels; all files in its folder are their sources."""
    target: Target
    ffn: FfnKernels | None = None
    gathered: FfnKernels | None = None
    """Neurons in slots (`pi2.backends.gpu.kernels.gathered`)."""
    gates: FfnKernels | None = None
    """All gates of neurons in slots."""
    select: SelectKernels | None = None
    spreads: FfnKernels | None = None
    """Experts whose biases the sum of neurons begins with."""
    products: tuple[ProductKernels, ...] = ()
    steps: tuple[StepKernel, ...] = ()
    reads: bool = False
    """Whether the device's read rate is to be measured."""
