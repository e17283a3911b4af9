"""A model of which text comes out, and no logits: another program computes and samples.

A backend that drives such a program has ``open_text`` (`pi2.backends.protocol.TextBackend`).  Only
`pi2 run` can use it: scores, predictors, statistics and shared steps need logits or layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pi2.plan.documents.device import Unit
from pi2.plan.documents.model import Model
from pi2.plan.documents.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a program is started with."""

    folder: Path
    """Weights, in the program's own layout: the plan's ``store``."""
    model: Model
    """The model that they must be of."""
    unit: Unit | None
    """What the device says of the unit; None leaves the choice to the program."""
    context: int
    """Tokens of a sequence."""
    chunk: int
    """Tokens of a prompt that are computed together."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a text ended."""

    reason: str
    prompt_tokens: int | None
    tokens: int | None


class TextModel(Protocol):
    """A program that has a model.  One calling thread."""

    load_s: float
    """Seconds that loading has taken."""
    finished: Finished | None
    """How the last text ended, once all of its pieces were taken."""

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Iterator[str]:
        """Yield the pieces of a text after ``prompt``, a text or the messages of a conversation;
        UserError for sampling that the program does not have, or where it fails."""

    def close(self) -> None:
        """End the program.  Never fails, and may be called twice."""
