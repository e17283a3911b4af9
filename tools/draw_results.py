"""Draw the pictures of docs/images from the measured figures in tools/results.

``python tools/draw_results.py`` writes them; ``--check`` writes nothing and fails if a picture is
not that of the figures.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from real.results import Results, read_results

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "tools" / "results" / "speed-by-memory.toml"
PICTURE = ROOT / "docs" / "images" / "speed-by-memory.svg"
REAL_PICTURE = ROOT / "docs" / "images" / "real-models.svg"

WIDTH, HEIGHT = 760, 400
LEFT, TOP, BASE = 48, 96, 330
BAR, BAR_GAP, GROUP_GAP = 46, 6, 44
COLOURS = ("#8a8f98", "#9ec5e8", "#4a90c8", "#1f5a8c")


@dataclass(frozen=True)
class Limit:
    """The speeds of each engine, in order, of one group of bars."""

    name: str
    tokens_s: tuple[float, ...]


@dataclass(frozen=True)
class Figures:
    """Figures of the picture, with its texts."""

    title: str
    subtitle: str
    source: str
    engines: tuple[str, ...]
    limits: tuple[Limit, ...]


def read_figures(path: Path) -> Figures:
    """Read the data file."""
    values: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    limits = tuple(Limit(item["name"], tuple(item["tokens_s"])) for item in values["limits"])
    engines = tuple(values["engines"])
    assert len(engines) == len(COLOURS) and all(len(x.tokens_s) <= len(engines) for x in limits)
    return Figures(values["title"], values["subtitle"], values["source"], engines, limits)


def take_real_figures(results: Results) -> Figures:
    """Speeds of real models in memory, llama.cpp first, each engine where it was measured."""
    measured = {row.engine for model in results.models for row in model.rows}
    engines = tuple(name for name in ("llama.cpp", "ik_llama.cpp", "pi2") if name in measured)
    models = []
    for model in results.models:
        speeds = {row.engine: row.figures for row in model.rows if row.share >= 1}
        rates = tuple(speeds[name].get("decode_tokens_s", 0.0) for name in engines)
        models.append(Limit(model.file.removesuffix(".gguf").replace("-instruct", ""), rates))
    return Figures(
        "Decode speed of real models in memory",
        "The same GGUF file for all; tokens/s, and times llama.cpp",
        f"Measured on {results.machine.processor}, {results.date}",
        engines,
        tuple(models),
    )


def list_pictures() -> dict[Path, str]:
    """SVG text of every picture, by its file."""
    return {
        PICTURE: draw_bars(read_figures(FIGURES)),
        REAL_PICTURE: draw_bars(take_real_figures(read_results())),
    }


def draw_bars(figures: Figures) -> str:
    """SVG text of a bar chart: a group of bars for each memory limit, a colour for each engine."""
    return "\n".join([*_begin(figures), *_draw_axis(figures), *_draw_groups(figures), "</svg>", ""])


def _begin(figures: Figures) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    yield f"<title>{escape(figures.title)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _write_text(LEFT, 26, figures.title, size=17, weight="bold")
    yield _write_text(LEFT, 46, figures.subtitle, colour="#555")
    yield _write_text(LEFT, HEIGHT - 14, figures.source, size=11, colour="#777")
    x = LEFT
    for name, colour in zip(figures.engines, COLOURS, strict=False):
        yield f'<rect x="{x}" y="60" width="12" height="12" fill="{colour}"/>'
        yield _write_text(x + 17, 71, name)
        x += 42 + 7 * len(name)


def _draw_axis(figures: Figures) -> Iterator[str]:
    tokens_s, highest = 0, max(max(limit.tokens_s) for limit in figures.limits)
    while tokens_s <= highest:
        y = _place(figures, tokens_s)
        yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - 20}" y2="{y}" stroke="#ddd"/>'
        yield _write_text(LEFT - 8, y + 4, str(tokens_s), anchor="end", colour="#777")
        tokens_s += 5 if highest < 50 else 25


def _draw_groups(figures: Figures) -> Iterator[str]:
    groups = len(figures.limits)
    bars = sum(len(limit.tokens_s) for limit in figures.limits)
    # Groups of few bars stand further apart: their names are wider than they are.
    gap = max(GROUP_GAP, (WIDTH - LEFT - 20 - bars * (BAR + BAR_GAP)) / groups)
    x = LEFT + gap / 2
    for limit in figures.limits:
        width = len(limit.tokens_s) * (BAR + BAR_GAP) - BAR_GAP
        yield _write_text(x + width / 2, BASE + 20, limit.name, anchor="middle", weight="bold")
        for index, tokens_s in enumerate(limit.tokens_s):
            colour = COLOURS[index]
            y = _place(figures, tokens_s)
            yield (
                f'<rect x="{x:g}" y="{y:g}" width="{BAR}" height="{BASE - y:g}" fill="{colour}"/>'
            )
            speed = f"{tokens_s:.2g}" if tokens_s < 1 else f"{tokens_s:.3g}"
            yield _write_text(x + BAR / 2, y - 5, speed, anchor="middle")
            if index > 0:
                ratio = tokens_s / limit.tokens_s[0] if limit.tokens_s[0] else 0.0
                text = f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio else ""
                ink = "white" if colour in COLOURS[2:] else "#333"
                yield _write_text(x + BAR / 2, BASE - 6, text, anchor="middle", colour=ink)
            x += BAR + BAR_GAP
        x += gap


def _place(figures: Figures, tokens_s: float) -> float:
    highest = max(max(limit.tokens_s) for limit in figures.limits)
    return round(BASE - (BASE - TOP) * tokens_s / highest, 1)


def _write_text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
    )


def main() -> int:
    """Draw or check; the exit code is 1 if the check finds another picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    options = parser.parse_args()
    pictures = list_pictures()
    if options.check:
        return int(any(path.read_text("utf-8") != text for path, text in pictures.items()))
    for path, text in pictures.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
