"""The residual stream: inputs of operators, and sums of their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pi2.backends.blocks.building import Builder
from pi2.backends.blocks.operands import Area
from pi2.backends.blocks.streams import Streams
from pi2.plan.documents.model import Model


@dataclass(slots=True)
class Sum:
    """Vectors that terms are added to."""

    area: Area
    factor: float = 1.0
    """Factor of all terms."""
    has_terms: bool = False
    """Whether there is something that is added to."""

    def take(self, factor: float = 1.0) -> dict[str, Any]:
        """Return what a product needs that gives one more term, times ``factor``."""
        added, self.has_terms = self.has_terms, True
        return {"y": self.area, "added": added, "factor": self.factor * factor}


class Residual:
    """Instructions that read the residual stream and add to it."""

    def __init__(self, model: Model, builder: Builder) -> None:
        self._model, self._builder = model, builder
        self._hidden = model.shape.hidden
        altup = model.altup
        self.streams = None if altup is None else Streams(model, builder, altup)
        """All streams of a token, if there are several."""
        if self.streams is None:
            self.x = builder.take_area("x", self._hidden)
        else:
            self.x = self.streams.x

    def normalize(self, key: str, target: Area) -> Area:
        """Return what an operator reads: normalised, or as it is."""
        norm = self._model.norm
        if not norm.inputs:
            return self.x
        self._builder.add_norm(key, self.x, target, self._hidden)
        return target

    def begin(self) -> Sum:
        """Return what an operator's output is added to until `end`."""
        if self._model.norm.outputs:
            return Sum(self._builder.take_area("given", self._hidden))
        return Sum(self.x, self._model.multipliers.residual, True)

    def end(self, norm: str, given: Area | None = None) -> None:
        """Add the sum of `begin`, or another one, to the residual stream, normalised if outputs
        are."""
        if self._model.norm.outputs:
            given = given or self._builder.take_area("given", self._hidden)
            factor = self._model.multipliers.residual
            self._builder.add_norm(norm, given, self.x, self._hidden, added=True, factor=factor)
