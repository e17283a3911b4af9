"""Which kernels are wanted, and for what device: everything that the generated code depends on.

Plain Python: no TVM.  Two programs with equal specifications share one compiled image.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from pi2.backends.gpu.kernels.signature import Api
from pi2.plan.documents.model import SMOOTH_ACTIVATIONS, Activation
from pi2.plan.weights.layout import GROUP, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the compiler must know of a device."""

    api: Api
    fp16: bool
    """Whether kernels may have fp16 values; otherwise they take them out of words of 32 bits."""
    arch: str | None = None
    """Of CUDA: ``sm_80``."""

    def __post_init__(self) -> None:
        assert (self.arch is not None) == (self.api == "cuda"), self


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnKernels:
    """The FFN over a range of a layer's neurons (`pi2.backends.gpu.kernels.ffn`)."""

    hidden: int
    precision: Precision
    activation: Activation
    threshold: float = 0.0
    """Of ``fatrelu``."""
    gated: bool = True
    bias: bool = False
    experts: int = 0
    """Of a mixture, shared ones too; 0 without."""

    def __post_init__(self) -> None:
        assert self.hidden % GROUP == 0, self

    @property
    def parts(self) -> int:
        """Vectors of a neuron that are multiplied with the input."""
        return 2 if self.gated else 1

    @property
    def is_smooth(self) -> bool:
        """Whether no neuron is ever exactly inactive."""
        return self.activation in SMOOTH_ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernels:
    """Products of inputs with a matrix whose rows have ``length`` elements."""

    length: int
    precision: Precision
    bias: bool = False

    def __post_init__(self) -> None:
        assert self.length % GROUP == 0, self

    @property
    def name(self) -> str:
        """What its kernels' names begin with."""
        return f"product_{self.precision}_{self.length}" + ("_bias" if self.bias else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Kernels for a device."""

    target: Target
    ffn: FfnKernels | None = None
    products: tuple[ProductKernels, ...] = ()

    @property
    def program(self) -> str:
        """The module that makes the kernels; all files beside it are their sources."""
        return "pi2.backends.gpu.kernels.program"

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GpuSpec:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(
            target=Target(**values["target"]),
            ffn=None if values["ffn"] is None else FfnKernels(**values["ffn"]),
            products=tuple(ProductKernels(**item) for item in values["products"]),
        )
