"""Pictures of a simulated run; needs matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

import io

import numpy as np

from pi2.diagnostics import UserError
from pi2.simulate.report import PERCENTILES, SimulationResult

NO_MATPLOTLIB = "P632"


def draw_run(result: SimulationResult, file_format: str) -> bytes:
    """Draw times between tokens in order and sorted; UserError P632 without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError.of(
            NO_MATPLOTLIB,
            "pictures need matplotlib, which is not installed",
            help="install it with `pip install 'pi2[plot]'`",
        ) from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    milliseconds = result.decode.token_s * 1e3
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(np.arange(1, len(milliseconds) + 1), milliseconds, linewidth=0.8)
    left.set_xlabel("token")
    left.set_ylabel("ms per token")
    ordered = np.sort(milliseconds)
    right.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    for percent in PERCENTILES:
        right.axvline(result.find_percentile_s(percent) * 1e3, linestyle=":", linewidth=0.8)
    right.set_xlabel("ms per token")
    right.set_ylabel("share of tokens that take no longer")
    figure.suptitle(f"Simulated, not measured: {result.inputs.name}")
    data = io.BytesIO()
    try:
        figure.savefig(data, format=file_format)
    except ValueError as error:
        raise UserError.of(
            "P633", f"cannot draw a picture of type {file_format!r}: {error}", help="use .png"
        ) from None
    return data.getvalue()
