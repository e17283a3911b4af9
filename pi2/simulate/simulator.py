"""Simulate a whole run: a prompt, then a generation."""

from __future__ import annotations

from pi2.costs.description import Description
from pi2.simulate.decode import Progress, simulate_decode
from pi2.simulate.prefill import simulate_prefill
from pi2.simulate.report import SimulationResult


def simulate(
    description: Description,
    *,
    prompt_tokens: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    progress: Progress | None = None,
) -> SimulationResult:
    """Simulate a prompt and a generation; the same seed gives the same result."""
    return SimulationResult(
        inputs=description,
        seed=seed,
        prompt_tokens=prompt_tokens,
        prefill=simulate_prefill(description, prompt_tokens),
        decode=simulate_decode(
            description, prompt_tokens=prompt_tokens, tokens=tokens, seed=seed, progress=progress
        ),
    )
