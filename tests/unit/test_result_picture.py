"""The pictures of the documents are those of the figures that are checked in."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tools import draw_results

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
