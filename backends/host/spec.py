"""What the code of the host loops depends on, besides its sources."""

from __future__ import annotations

import json
import platform
from collections.abc import Set
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Literal

CheckInstruction = Literal["pclmulqdq", "crc32x"]
"""Instruction that CRC-32 is computed with (`pi2.backends.host.checks`)."""
CHECKED_BYTES = 64
"""Bytes that it is computed of at a time."""

FOUND = 8
"""Most numbers that a loop returns."""
MASSES = 3
"""Sums of scores that a look-up returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The loops are scalar code, but for that of checks: any machine of this one's architecture and
    system that has its instruction runs them."""

    program: ClassVar[str] = "pi2.backends.host.program"
    architecture: str = field(default_factory=platform.machine)
    system: str = field(default_factory=platform.system)
    checks: CheckInstruction | None = None
    """None where the processor has none: zlib is as fast then."""

    @property
    def mcpu(self) -> str | None:
        """The least processor of the architecture."""
        return None

    @property
    def mattr(self) -> tuple[str, ...]:
        """What LLVM calls the instruction for checks."""
        if self.checks is None:
            return ()
        return ("+pclmul",) if self.checks == "pclmulqdq" else ("+crc",)

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> HostSpec:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def choose_checks(features: Set[str]) -> CheckInstruction | None:
    """Return the instruction that a processor with ``features`` has for sure.

    Every processor with AVX2 has ``pclmulqdq``, every one with ``dotprod`` (ARMv8.2) ``crc32x``:
    both came before.
    """
    if "avx2" in features:
        return "pclmulqdq"
    return "crc32x" if "dotprod" in features else None
