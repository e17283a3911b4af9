"""What machine the compiler writes code for."""

from __future__ import annotations

from typing import Protocol

import tvm


class Processor(Protocol):
    """What LLVM must know of a processor."""

    @property
    def mcpu(self) -> str | None:
        """A processor by LLVM's name; None for the least that its architecture has."""

    @property
    def mattr(self) -> tuple[str, ...]:
        """Instructions that it has besides, such as ``+dotprod``."""


def make_target(processor: Processor | None = None, triple: str | None = None) -> tvm.target.Target:
    """Return the compiler's target for a processor, by default for the least one of this machine's
    architecture; ``triple`` for another machine than this."""
    options: dict[str, object] = {"kind": "llvm"}
    if processor is not None and processor.mcpu is not None:
        options["mcpu"] = processor.mcpu
    if processor is not None and processor.mattr:
        options["mattr"] = list(processor.mattr)
    if triple is not None:
        options["mtriple"] = triple
    return tvm.target.Target(options)
