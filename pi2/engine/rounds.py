"""What a scheduler has done for all requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of as many sequences."""

    steps: int = 0
    tokens: int = 0
    """Tokens that they made."""
    seconds: float = 0.0

    def __sub__(self, other: Phase) -> Phase:
        return Phase(
            self.steps - other.steps, self.tokens - other.tokens, self.seconds - other.seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What was done for all requests so far."""

    phases: Mapping[int, Phase] = field(default_factory=lambda: MappingProxyType({}))
    """Steps, by the number of sequences that went on in each."""
    prompt_tokens: int = 0
    """Tokens of prompts that were read."""
    prefill_s: float = 0.0
    """Seconds in them."""

    @property
    def steps(self) -> int:
        """Steps, each of the sequences that were under way."""
        return sum(phase.steps for phase in self.phases.values())

    @property
    def stepped_sequences(self) -> int:
        """Sequences of each step, summed up."""
        return sum(sequences * phase.steps for sequences, phase in self.phases.items())

    @property
    def stepped_tokens(self) -> int:
        """Tokens that steps made."""
        return sum(phase.tokens for phase in self.phases.values())

    @property
    def steps_s(self) -> float:
        """Seconds in steps."""
        return sum(phase.seconds for phase in self.phases.values())

    def add_step(self, sequences: int, tokens: int, seconds: float) -> Rounds:
        """The same and a step more."""
        before = self.phases.get(sequences, Phase())
        phase = Phase(before.steps + 1, before.tokens + tokens, before.seconds + seconds)
        return replace(self, phases=MappingProxyType({**self.phases, sequences: phase}))

    def add_prompt(self, tokens: int, seconds: float) -> Rounds:
        """The same and a piece of a prompt more."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + tokens,
            prefill_s=self.prefill_s + seconds,
        )

    def __sub__(self, other: Rounds) -> Rounds:
        phases = {
            sequences: phase - other.phases.get(sequences, Phase())
            for sequences, phase in sorted(self.phases.items())
        }
        return Rounds(
            phases=MappingProxyType({key: phase for key, phase in phases.items() if phase.steps}),
            prompt_tokens=self.prompt_tokens - other.prompt_tokens,
            prefill_s=self.prefill_s - other.prefill_s,
        )

    def describe(self) -> dict[str, float]:
        """Everything as numbers."""
        return {
            "steps": self.steps,
            "stepped_sequences": self.stepped_sequences,
            "stepped_tokens": self.stepped_tokens,
            "steps_s": self.steps_s,
            "prompt_tokens": self.prompt_tokens,
            "prefill_s": self.prefill_s,
        }
