"""What deviating from a mixture's routing costs, and what it saves: perplexity against bytes read.

    python tools/measure_dials.py mixture.gguf --text heldout.txt --memory 8GiB --plot dials.svg

Runs the file over the text token by token within a budget, once for every setting of the table
``[experts]`` below.  Prints a table and draws it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pi2
from pi2.measuring.texts import Passages, score_windows
from pi2.tracing import add_legend, make_figure, pick_styles, save_figure

DIALS: Mapping[str, list[Mapping[str, Any]]] = {
    "prefer_cached": [{"prefer_cached": value} for value in (0.05, 0.1, 0.2, 0.3, 0.5)],
    "prefer_cached, keep_best 2": [
        {"prefer_cached": value, "keep_best": 2} for value in (0.1, 0.2, 0.3, 0.5)
    ],
    "least_weight": [{"least_weight": value} for value in (0.1, 0.15, 0.2, 0.25)],
    "least_weight, not renormalised": [
        {"least_weight": value, "renormalise": False} for value in (0.1, 0.15, 0.2, 0.25)
    ],
    "read_best": [{"read_best": value} for value in (3, 2, 1)],
    "most_reads": [{"most_reads": value} for value in (2, 1)],
}
"""Settings by the name of their dial."""

MOST_DRAWN = 2.0
"""Per cent; points above are out of the picture, which says how far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one setting gave."""

    dial: str
    settings: dict[str, Any]
    perplexity: float
    loss_change: float
    """Mean loss less that of exact routing, in nats."""
    loss_change_error: float
    """Its standard error, token by token."""
    memory_bytes: int
    """Of cached experts."""
    read_bytes_token: float
    replaced: float
    left_out: float


def measure(
    file: Path,
    texts: list[str],
    memory: str,
    context: int,
    windows: int,
    dials: Mapping[str, list[Mapping[str, Any]]],
) -> list[Point]:
    """Run exact routing and all settings of ``dials``."""
    points: list[Point] = []
    exact = np.zeros(0)
    settings: list[tuple[str, dict[str, Any]]] = [("exact", {})]
    settings += [(dial, dict(some)) for dial, all_of in dials.items() for some in all_of]
    for dial, some in settings:
        own = {f"experts.{name}": value for name, value in some.items()}
        with pi2.load(file, memory=memory, set={"kv.context": context, **own}) as loaded:
            chosen = Passages(texts, context, windows).cut(loaded)
            before = loaded.stats
            losses = score_windows(loaded, chosen, "decode").losses
            done = loaded.stats - before
        if dial == "exact":
            exact = losses
        change = losses - exact
        points.append(
            Point(
                dial=dial,
                settings=some,
                perplexity=float(np.exp(losses.mean())),
                loss_change=float(change.mean()),
                loss_change_error=float(change.std() / np.sqrt(len(change))),
                memory_bytes=loaded.plan.plan.memory.segments.cold,
                read_bytes_token=done.flash_read_bytes / sum(len(w.tokens) - 1 for w in chosen),
                replaced=done.replaced_share or 0.0,
                left_out=done.left_out_share or 0.0,
            )
        )
        print(write_row(points[-1], points[0]), flush=True)
    return points


def write_row(point: Point, exact: Point) -> str:
    """A row of the table."""
    names = ", ".join(f"{name} = {json.dumps(value)}" for name, value in point.settings.items())
    return (
        f"| {names or 'exact'} | {point.perplexity:.3f} "
        f"| {100 * (point.perplexity / exact.perplexity - 1):+.2f} % "
        f"| {point.loss_change:+.4f} ± {point.loss_change_error:.4f} "
        f"| {point.memory_bytes / 1e6:.1f} | {point.read_bytes_token / 1e3:.0f} "
        f"| {point.read_bytes_token / exact.read_bytes_token:.2f} "
        f"| {point.replaced:.1%} | {point.left_out:.1%} |"
    )


def read_points(path: Path) -> list[Point]:
    """Read the figures of a run but those of exact routing, which every run has."""
    points = [Point(**point) for point in json.loads(path.read_text("utf-8"))]
    return [point for point in points if point.dial != "exact"]


def draw(points: list[Point], form: str) -> bytes:
    """Perplexity over bytes read, a line for each dial."""
    figure = make_figure(8, 4.6)
    axes, exact = figure.subplots(), points[0]
    dials = list(dict.fromkeys(point.dial for point in points[1:]))
    for dial, style in zip(dials, pick_styles(len(dials)), strict=True):
        row = [exact, *(point for point in points if point.dial == dial)]
        axes.plot(
            [100 * point.read_bytes_token / exact.read_bytes_token for point in row],
            [100 * (point.perplexity / exact.perplexity - 1) for point in row],
            label=dial,
            **style,
        )
    axes.axhline(1.0, color="gray", linewidth=0.8, linestyle=":")
    for point in points:
        change = 100 * (point.perplexity / exact.perplexity - 1)
        if change > MOST_DRAWN:
            place = (100 * point.read_bytes_token / exact.read_bytes_token, MOST_DRAWN)
            beside = {"xytext": (24, -3), "textcoords": "offset points", "va": "top"}
            axes.annotate(f"to {change:.1f}", place, fontsize=8, **beside)
    axes.set_ylim(top=min(MOST_DRAWN, axes.get_ylim()[1]))
    axes.set_xlabel("bytes read per token, % of exact routing")
    axes.set_ylabel("perplexity, change in %")
    add_legend(axes)
    return save_figure(figure, form)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description="Quality against reads, for mixtures.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", required=True, help="budget, such as 8GiB")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--dials", default="", help="measure those whose names have this")
    parser.add_argument("--plot", type=Path, help="write a picture")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--beside", type=Path, help="figures of another run, which are drawn, too")
    arguments = parser.parse_args()
    titles = "setting | perplexity | change | nats | MB of experts | kB read per token | of exact"
    print(f"| {titles} | replaced | left out |")
    print("|---|---|---|---|---|---|---|---|---|")
    dials = dict(DIALS)
    texts = [arguments.text.read_text("utf-8")]
    points = measure(
        arguments.file,
        texts,
        arguments.memory,
        arguments.context,
        arguments.windows,
        {name: some for name, some in dials.items() if arguments.dials in name},
    )
    if arguments.plot is not None:
        others = [] if arguments.beside is None else read_points(arguments.beside)
        arguments.plot.write_bytes(draw([*points, *others], arguments.plot.suffix.lstrip(".")))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([asdict(point) for point in points], indent=1))


if __name__ == "__main__":
    main()
