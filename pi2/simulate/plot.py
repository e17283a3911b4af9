"""Pictures of a simulated run; needs matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

import numpy as np

from pi2.pictures import add_legend, make_figure, save_figure
from pi2.plan.documents.quantities import approximate_number
from pi2.simulate.report import PERCENTILES, SimulationResult


def draw_run(result: SimulationResult, file_format: str) -> bytes:
    """Draw times between tokens in order and sorted; UserError P632 without matplotlib."""
    milliseconds = result.decode.token_s * 1e3
    figure = make_figure(10, 4)
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(milliseconds) + 1), milliseconds, linewidth=0.8)
    left.set_xlabel("token")
    left.set_ylim(bottom=0.0)
    left.set_ylabel("ms per token")
    ordered = np.sort(milliseconds)
    right.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    for percent, line in zip(PERCENTILES, (":", "--", "-."), strict=True):
        place = result.find_percentile_s(percent) * 1e3
        label = f"P{percent:g}: {approximate_number(place, 4)} ms"
        right.axvline(place, linestyle=line, linewidth=1.0, color="gray", label=label)
    add_legend(right)
    right.set_xlabel("ms per token")
    right.set_ylabel("share of tokens that take no longer")
    figure.suptitle(f"Simulated, not measured: {result.inputs.name}")
    return save_figure(figure, file_format)
