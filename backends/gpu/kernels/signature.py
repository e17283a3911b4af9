"""What compiled GPU kernels are, for programs that run them: no compiler is needed to read this.

An *image* holds the kernels of a specification for one API and one kind of device: their code, and
for each kernel its arrays, numbers and launch shape.  It is one JSON document.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        """Work groups for these numbers."""
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
        """Work groups by axis for these numbers."""
        first, second = self.grid
        return first.count(numbers), second.count(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelImage:
    """Compiled kernels."""

    api: Api
    codes: tuple[bytes, ...]
    """OpenCL C sources, WGSL sources, or cubins."""
    kernels: Mapping[str, Signature]

    def to_json(self) -> str:
        """Return the document."""
        return json.dumps(
            {
                "api": self.api,
                "codes": [base64.b64encode(code).decode() for code in self.codes],
                "kernels": [dataclasses.asdict(item) for item in self.kernels.values()],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> KernelImage:
        """Read what `to_json` wrote."""
        document = json.loads(text)
        signatures = [_read_signature(item) for item in document["kernels"]]
        return cls(
            api=document["api"],
            codes=tuple(base64.b64decode(code) for code in document["codes"]),
            kernels={signature.name: signature for signature in signatures},
        )


def _read_signature(item: dict[str, Any]) -> Signature:
    first, second = (Axis(**axis) for axis in item["grid"])
    x, y, z = item["block"]
    return Signature(
        name=item["name"],
        arrays=tuple(item["arrays"]),
        numbers=tuple((name, kind) for name, kind in item["numbers"]),
        block=(x, y, z),
        grid=(first, second),
        code=item["code"],
    )
