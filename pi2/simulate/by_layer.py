"""The simulated time of every layer, for comparing plans layer by layer."""

from __future__ import annotations

import numpy as np

from pi2.costs.activations import draw_shifts
from pi2.costs.description import Description
from pi2.simulate.decode import RESULTS, add_layers, draw_work, time_before
from pi2.simulate.layer import LayerSimulation


def simulate_layers(
    description: Description, *, prompt_tokens: int = 64, tokens: int = 64, seed: int = 0
) -> tuple[float, ...]:
    """Mean time of a token in each layer, in seconds: attention and FFN.

    Layers of one kind have the same time.
    """
    random = np.random.default_rng(seed)
    shifts = draw_shifts(tokens, description.rates.constants.token_variation, random)
    positions = prompt_tokens + np.arange(tokens, dtype=np.float64)
    times: dict[int, float] = {}
    for kind in description.kinds:
        total = {name: np.zeros(tokens) for name in RESULTS}
        simulation = LayerSimulation(description, kind)
        add_layers(total, simulation, draw_work(description, kind, simulation, shifts, random))
        ffn_s = float(total["token_s"].mean()) / kind.count
        before_s = float(time_before(simulation, positions).mean())
        times |= dict.fromkeys(kind.layers, before_s + ffn_s)
    return tuple(times[number] for number in range(description.layers))
