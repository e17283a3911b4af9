"""A picture of recorded activations; needs matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pi2.diagnostics import UserError
from pi2.importing.activations import read_counts
from pi2.pictures import add_legend, make_figure, pick_colours, pick_styles, save_figure
from pi2.regular_file import check_regular
from pi2.statistics.recording import ACTIVATIONS, Statistics


def draw_activations(folder: Path, statistics: Statistics, file_format: str) -> bytes:
    """Draw hotness curves of all layers, and the neurons that make 80 % of the activations.

    Raises `UserError` P632 without matplotlib, P633 for an unknown format, P540 if the counts in
    ``folder`` were damaged.
    """
    layers = len(statistics.layers)
    rows = count_rows(folder / ACTIVATIONS)
    counts = read_counts(folder / ACTIVATIONS, layers, rows // layers)
    figure = make_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    colours = pick_colours(layers)
    for layer, fired in enumerate(counts):
        chances = np.sort(fired)[::-1] / statistics.tokens
        shares = np.arange(1, len(chances) + 1) / len(chances)
        label = str(layer) if layer in (0, layers - 1) else None
        left.plot(shares * 100, chances * 100, color=colours[layer], linewidth=0.8, label=label)
    left.set_xlabel("% of the layer's neurons, hottest first")
    left.set_ylabel("% of tokens that activate them")
    add_legend(left, title="layer")
    middle.bar(np.arange(layers), [layer.skew * 100 for layer in statistics.layers], color=colours)
    middle.set_xlabel("layer")
    middle.set_ylabel("% of neurons for 80 % of activations")
    for batch, style in enumerate(pick_styles(4)):
        shares = np.array([layer.batches[batch] * 100 for layer in statistics.layers])
        right.plot(np.arange(layers), shares, markersize=4, label=str(batch + 1), **style)
    right.set_xlabel("layer")
    right.set_ylabel("% of neurons active")
    add_legend(right, title="tokens in\na batch")
    figure.suptitle(f"{statistics.model}: {statistics.tokens} tokens")
    return save_figure(figure, file_format)


def count_rows(file: Path) -> int:
    """Rows of a Parquet file; UserError P540 if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(file)
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise UserError.of("P540", f"{file} is not a Parquet file: {error}") from None
