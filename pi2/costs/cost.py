"""Time of a generated token and of a prompt, as a sum of terms that can be looked at.

Every term names its source; notes/planner.md explains them. A layer of a token:

    attention  weights of the projections, and the KV cache of the context
    norm       beginning and end of the FFN, and an MoE model's router
    predict    finding the active neurons
    look up    the neuron cache: a fixed part, and one for every missing neuron
    python     the engine's work between these steps
    compute    active neurons in memory, then the read ones
    dense      neurons that an NPU or GPU computes at the same time
    read       missing neurons from flash
    wait       the part of ``read`` that no computation hides

Once a token there are the head, and the row of an embedding that is read from flash. A layer takes
attention + norm + predict + look up + python + max(compute, dense) + wait. Expected values replace
figures that vary from token to token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pi2.costs.constants import Range
from pi2.costs.cost_layer import LayerCost, cost_layer
from pi2.costs.description import Description, describe_plan, describe_range
from pi2.costs.kernel_times import Rates
from pi2.costs.prompts import PROMPT, PromptCost, cost_prompt
from pi2.costs.settings import POSITION, Settings
from pi2.diagnostics import UserError
from pi2.memory.arena import count_lent_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan


def count_memory(resolved: ResolvedPlan, tokens: int = POSITION) -> int:
    """Resident bytes after ``tokens`` of context: segments' needs, used KV cache, neuron cache."""
    return resolved.source.count_memory(resolved, tokens, count_lent_bytes(resolved, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Predicted time, memory and energy of a plan."""

    inputs: Description
    layers: tuple[LayerCost, ...]
    prefill: PromptCost | None
    """None where no arithmetic rate is known."""
    prompt: int = PROMPT
    """Tokens of the prompt."""
    memory_bytes: int
    """Expected peak: everything that is resident once the caches are full."""
    ends: tuple[Cost, Cost] | None = None
    """The same with all rates low, and high, as they are on devices of the kind; None if not asked
    for."""

    @property
    def settings(self) -> Settings:
        return self.inputs.settings

    @property
    def embedding_s(self) -> float:
        """Seconds to read the rows of the tokens' embeddings, if they do not stay in memory."""
        return self.settings.batch * self.inputs.embedding_s

    @property
    def grain(self) -> int:
        """Neurons that are read together, such as an expert's."""
        return max(kind.activity.grain for kind in self.inputs.kinds)

    @property
    def range_tokens_s(self) -> Range:
        """Tokens per second that a plan promises, that are expected, and at most."""
        return self._find_range(self.tokens_s, *(x.tokens_s for x in self.ends or ()))

    @property
    def prefill_tokens_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.tokens_s

    @property
    def range_prefill_tokens_s(self) -> Range | None:
        own = self.prefill_tokens_s
        if own is None:
            return None
        return self._find_range(own, *(x.prefill_tokens_s or own for x in self.ends or ()))

    @staticmethod
    def _find_range(expected: float, *ends: float) -> Range:
        every = (expected, *ends)
        return Range(low=min(every), expected=expected, high=max(every))

    @property
    def token_s(self) -> float:
        once_s = self.inputs.head_s + self.embedding_s
        return sum(layer.total_s for layer in self.layers) + once_s

    @property
    def tokens_s(self) -> float:
        return self.settings.batch / self.token_s

    @property
    def token_j(self) -> float | None:
        """Joules per token; the processor always draws power, the other unit while it computes."""
        rates, power_w = self.inputs.rates, self.inputs.rates.power_w
        if power_w is None:
            return None
        both_w = rates.both_w if self.inputs.uses_dense else None
        dense_s = sum(layer.dense_s for layer in self.layers)
        added = ((both_w or power_w) - power_w) * min(dense_s, self.token_s)
        return (power_w * self.token_s + added) / self.settings.batch

    @property
    def hit_rate(self) -> float:
        used = sum(layer.used for layer in self.layers)
        return 1.0 - sum(layer.missing for layer in self.layers) / used if used else 1.0


def cost_plan(
    resolved: ResolvedPlan,
    rates: Rates | None = None,
    *,
    position: int = POSITION,
    prompt: int = PROMPT,
) -> Cost:
    """Cost of a token after ``position`` tokens, and of a prompt, with ranges; UserError P351."""
    return cost_range(resolved, rates, store=resolved.store_path, position=position, prompt=prompt)


def describe_speed(resolved: ResolvedPlan) -> str | None:
    """The predicted speed with its range; None if the device lacks a figure."""
    try:
        return f"{cost_plan(resolved).range_tokens_s.write()} tokens/s, predicted"
    except UserError:
        return None


def cost_resolved(
    resolved: ResolvedPlan, rates: Rates | None = None, *, prompt: int = PROMPT, **known: Any
) -> Cost:
    """Cost of a plan without a file; ``known`` as for `describe_plan`."""
    described = describe_plan(resolved, rates, **known)
    return cost_description(described, prompt, memory_bytes=count_memory(resolved))


def cost_range(
    resolved: ResolvedPlan, rates: Rates | None = None, *, prompt: int = PROMPT, **known: Any
) -> Cost:
    """The same with its ends."""
    described = describe_range(resolved, rates, **known)
    return cost_description(described, prompt, memory_bytes=count_memory(resolved))


def cost_description(
    description: Description, prompt: int = PROMPT, *, memory_bytes: int = 0
) -> Cost:
    costs: dict[int, LayerCost] = {}
    for kind in description.kinds:
        costs |= dict.fromkeys(kind.layers, cost_layer(kind))
    ends = description.ends
    return Cost(
        inputs=description,
        layers=tuple(costs[number] for number in range(description.layers)),
        prefill=cost_prompt(description, prompt),
        prompt=prompt,
        memory_bytes=memory_bytes,
        ends=ends and (cost_description(ends[0], prompt), cost_description(ends[1], prompt)),
    )
