"""Pictures of plans, runs and results."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from pi2.cli.main import run
from pi2.measuring import activations
from pi2.measuring.activations import LayerStatistics, Statistics
from pi2.planning import sweep
from pi2.planning.sweep import Outcome
from pi2.tracing import pick_styles
from tools import draw_results

figure_module = pytest.importorskip("matplotlib.figure")
ROOT = Path(__file__).parents[2]
SERIES = 12


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figures: list[Any] = []
    save = figure_module.Figure.savefig

    def record(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", record)
    return figures


def check_legends(figure: Any, wanted: int) -> None:
    """No legend overlaps the area of any axes, nor leaves the picture."""
    figure.draw_without_rendering()
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    assert len(legends) == wanted
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0
        assert box.y1 <= figure.bbox.y1


def make_outcomes() -> list[Outcome]:
    """Twelve models on two devices within five memories."""
    return [
        Outcome(
            key="", device=device, model=f"model-with-a-long-name-{number}",
            memory_bytes=memory * 2**30, code=None, reason=None,
            simulated_tokens_s=float(memory * (number + 1)),
        )
        for device in ("first", "second")
        for number in range(SERIES)
        for memory in range(1, 6)
    ]  # fmt: skip


def test_twelve_series_differ_in_their_marks_and_lines() -> None:
    styles = pick_styles(SERIES)
    assert len({style["marker"] for style in styles}) == SERIES
    assert len({(style["color"], style["linestyle"]) for style in styles}) == SERIES


def test_a_sweep_of_twelve_models_is_readable(drawn: list[Any]) -> None:
    sweep.draw_summary(make_outcomes(), "png")
    (figure,) = drawn
    check_legends(figure, wanted=2)
    for axes in figure.axes:
        lines = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
        assert len(lines) == len(axes.lines) == SERIES
    first, second = (
        {line.get_label(): line.get_color() for line in axes.lines} for axes in figure.axes
    )
    assert first == second


def test_a_matrix_of_long_names_keeps_room_for_its_figures(drawn: list[Any]) -> None:
    named = [replace(item, model=f"{item.model}-{'x' * 40}") for item in make_outcomes()]
    sweep.draw_matrix(named, "png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [text.get_window_extent() for text in axes.texts]
    assert len(texts) == 2 * SERIES
    assert not any(a.overlaps(b) for a, b in itertools.combinations(texts, 2))


PLAN = str(ROOT / "plans/oneplus-12/bamboo-7b-half.plan.toml")


@pytest.mark.parametrize(
    "arguments",
    [["simulate", PLAN, "--tokens", "64"], ["explain", PLAN, "--cost"]],
    ids=["percentiles of a simulated run", "terms of a cost"],
)
def test_what_is_drawn_of_a_plan_is_named_beside_it(
    arguments: list[str], drawn: list[Any], tmp_path: Path
) -> None:
    assert run([*arguments, "--plot", str(tmp_path / "picture.png")]) == 0
    check_legends(drawn[0], wanted=1)
    assert not any(axes.texts for axes in drawn[0].axes)


def test_activations_have_their_legends_beside_them(
    drawn: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers = SERIES
    counts = np.linspace(99, 0, 100) * np.ones((layers, 1))
    monkeypatch.setattr(activations, "read_counts", lambda *arguments: (counts, {}))
    layer = LayerStatistics(active=0.1, skew=0.2, never=0.0, batches=(0.1, 0.2, 0.3, 0.4))
    statistics = Statistics(
        model="m", job="", tokens=100, active=0.1, skew=0.2, layers=(layer,) * layers
    )
    activations.draw_activations(tmp_path, statistics, "png")
    check_legends(drawn[0], wanted=2)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "performance.md"


def test_the_pictures_are_drawn_from_the_figures() -> None:
    for path, text in draw_results.list_pictures().items():
        message = "run `python tools/draw_results.py` and commit docs/images"
        assert path.read_text("utf-8") == text, message
        assert len(text) < 60_000


def test_bars_are_as_high_as_the_figures() -> None:
    figures = draw_results.read_figures(draw_results.FIGURES)
    root = ElementTree.fromstring(draw_results.draw_bars(figures))
    rectangles = [item.attrib for item in root if item.tag.endswith("rect")]
    heights = [float(x["height"]) for x in rectangles if x["width"] == str(draw_results.BAR)]
    speeds = [speed for limit in figures.limits for speed in limit.tokens_s]
    assert len(heights) == len(speeds)
    for height, speed in zip(heights, speeds, strict=True):
        assert abs(height / max(heights) - speed / max(speeds)) < 0.001


def test_the_page_of_results_has_the_same_figures() -> None:
    """A cell of the page's tables for every speed of pi2."""
    cells = set(re.findall(r"[\d.]+", PAGE.read_text("utf-8")))
    for limit in draw_results.read_figures(draw_results.FIGURES).limits:
        assert {f"{speed:g}" for speed in limit.tokens_s[1:]} <= cells
