"""The simulated time of every layer, for comparing plans layer by layer."""

from __future__ import annotations

import numpy as np

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.simulate.decode import COLUMNS, add_layers, compute_attention_s, draw_work
from pi2.simulate.inputs import SimulationInput
from pi2.simulate.layer import LayerSimulation


def simulate_layers(
    resolved: ResolvedPlan,
    inputs: SimulationInput,
    *,
    prompt_tokens: int = 64,
    tokens: int = 64,
    seed: int = 0,
) -> tuple[float, ...]:
    """Mean time of a token in each layer, in seconds: attention and FFN.

    ``inputs`` are those of ``resolved``.  Layers with the same settings have the same time.
    """
    random = np.random.default_rng(seed)
    shifts = random.standard_normal(tokens) * inputs.constants.token_variation
    shifts = np.clip(shifts, *(np.array([-4.0, 4.0]) * inputs.constants.token_variation))
    positions = prompt_tokens + np.arange(tokens, dtype=np.float64)
    attention_s = float(compute_attention_s(inputs, positions).mean())
    simulation = LayerSimulation(inputs)
    times: dict[tuple[float, float], float] = {}
    for choice in inputs.choices.layers:
        names = (*COLUMNS, "read_bytes", "active_neurons", "missing_neurons")
        total = {name: np.zeros(tokens) for name in names}
        work = draw_work(inputs, choice, shifts, random)
        add_layers(total, simulation, work, attention_s)
        ffn_s = float(total["token_s"].mean()) / choice.count
        times[choice.dense, choice.hot] = attention_s + ffn_s
    batch = resolved.plan.decode.batch
    return tuple(times[layer.find_dense_share(batch), layer.hot] for layer in resolved.layers)
