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


def pick_colours(count: int) -> Any:
    """Colours [count, 4] from dark to light, for things in an order; after `make_figure`."""
    from matplotlib import colormaps

    return colormaps["viridis"]([0.9 * place / max(1, count - 1) for place in range(count)])
