"""What the code of a library depends on, besides its sources."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from pi2.backends.kernels.isa import Isa, choose_isa

COMMON, STEPS = "common", "steps"
"""Libraries that belong to no format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A library for a processor: the kernels of a format, `COMMON` or `STEPS`."""

    program: ClassVar[str] = "pi2.backends.blocks.program"
    library: str
    architecture: str
    features: tuple[str, ...]
    """Of the processor, sorted; those that choose the instructions."""

    @property
    def isa(self) -> Isa:
        """Instructions that the code has."""
        return choose_isa(frozenset(self.features), self.architecture)

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BlockSpec:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "features": tuple(values["features"])})
