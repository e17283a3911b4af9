"""Pictures: matplotlib, which is optional (the extra ``plot``) and loaded late."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from pi2.diagnostics import UserError


def make_figure(width: float, height: float) -> Any:
    """An empty picture, in inches; UserError P632 without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError.of(
            "P632",
            "pictures need matplotlib, which is not installed",
            help="install it with `pip install 'pi2[plot]'`",
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def check_form(form: str) -> None:
    """UserError P632 or P633 if there will be no picture of type ``form``: before a long run."""
    if form not in make_figure(1, 1).canvas.get_supported_filetypes():
        raise _refuse(form, "matplotlib does not know it")


def save_figure(figure: Any, form: str) -> bytes:
    """Its bytes; UserError P633 for a type of picture that it does not draw."""
    stream = BytesIO()
    try:
        figure.savefig(stream, format=form)
    except ValueError as error:
        raise _refuse(form, str(error)) from None
    return stream.getvalue()


def _refuse(form: str, problem: str) -> UserError:
    return UserError.of(
        "P633", f"cannot draw a picture of type {form!r}: {problem}", help="use .png"
    )


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Told apart with any kind of colour vision.  Source: M. Okabe and K. Ito, Color Universal Design;
the last one, for their yellow, which is hardly seen on white, from P. Tol's muted scheme."""
_MARKERS = "os^Dv*PX<>hp"
_LINES = ("-", "--", ":", "-.")


def pick_styles(count: int) -> list[dict[str, str]]:
    """Arguments of ``plot`` for ``count`` series: no two of the first 12 have the same mark, and no
    two of the first 32 the same colour and kind of line."""
    return [
        {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)],
            "marker": _MARKERS[number % len(_MARKERS)],
        }
        for number in range(count)
    ]


def add_legend(axes: Any, *, title: str | None = None, reverse: bool = False) -> None:
    """Put the legend beside the axes, where it covers no data."""
    axes.legend(
        title=title,
        reverse=reverse,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize="small",
    )


def pick_colours(count: int) -> Any:
    """Colours [count, 4] from dark to light, for things in an order; after `make_figure`."""
    from matplotlib import colormaps

    return colormaps["viridis"]([0.9 * place / max(1, count - 1) for place in range(count)])
