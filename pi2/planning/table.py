"""A plan's cost as a table per layer, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pi2.costs.cost import Cost
from pi2.costs.cost_layer import LayerCost
from pi2.pictures import add_legend, make_figure, save_figure
from pi2.plan.documents.quantities import approximate_bytes, approximate_number
from pi2.planning.text import describe_cost

_TERMS = {
    "attention": "attention_s",
    "norm": "norm_s",
    "predict": "predict_s",
    "look up": "look_up_s",
    "python": "python_s",
    "compute": "compute_s",
    "dense": "dense_s",
    "read": "read_s",
    "wait": "wait_s",
    "total": "total_s",
}
_SEEN = 1e-3
"""Part of a layer's time below which a term cannot be seen in a picture."""
_STACKED = ("attention_s", "norm_s", "predict_s", "look_up_s", "python_s", "busy_s", "wait_s")


def write_cost(cost: Cost) -> Iterator[str]:
    """Microseconds of every term, layers with the same settings together, and their sources."""
    yield from describe_cost(cost)
    yield ""
    yield "Microseconds of a token in a layer; read is hidden behind the others, all but wait:"
    yield ""
    names = ["layers", "hot", "used", "missing", *_TERMS]
    yield "| " + " | ".join(names) + " |"
    yield "|" + " --- |" * len(names)
    for key, group in groupby(enumerate(cost.layers), key=lambda item: item[1]):
        numbers = [number for number, _ in group]
        yield _write_row(numbers, key)
    total = [sum(getattr(layer, name) for layer in cost.layers) * 1e3 for name in _TERMS.values()]
    shown = ", ".join(f"{name} {ms:.1f}" for name, ms in zip(_TERMS, total, strict=True))
    yield ""
    shown += f", head {cost.head_s * 1e3:.1f}"
    if cost.embedding_s:
        shown += f", embedding {cost.embedding_s * 1e3:.1f}"
    yield f"Milliseconds of a token: {shown}."
    yield from (f"Assumed: {text}." for text in cost.assumptions)
    yield "Sources of the rates:"
    for name, source in sorted(cost.sources.items()):
        yield f"  {name}: {source}"


def _write_row(numbers: list[int], layer: LayerCost) -> str:
    name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    cells = [name, approximate_bytes(layer.hot_bytes), f"{layer.used:.0f}", f"{layer.missing:.1f}"]
    cells += [f"{getattr(layer, field) * 1e6:.0f}" for field in _TERMS.values()]
    return "| " + " | ".join(cells) + " |"


def draw_cost(cost: Cost, form: str, title: str = "") -> bytes:
    """Terms of every layer on top of each other, those that take any time; UserError P632 without
    matplotlib, P633 for a type of picture that it does not draw."""
    figure = make_figure(9.0, 4.0)
    axes = figure.add_subplot()
    places = range(len(cost.layers))
    base = [0.0] * len(cost.layers)
    most_ms = max((layer.total_s for layer in cost.layers), default=0.0) * 1e3
    for number, name in enumerate(_STACKED):
        values = [_read_term(layer, name) * 1e3 for layer in cost.layers]
        if max(values, default=0.0) < _SEEN * most_ms:
            continue
        label = {"busy_s": "compute", "wait_s": "wait for flash"}.get(
            name, name.removesuffix("_s").replace("_", " ")
        )
        axes.bar(places, values, bottom=base, label=label, color=f"C{number}")
        base = [a + b for a, b in zip(base, values, strict=True)]
    axes.set_xlabel("layer")
    axes.set_ylabel("milliseconds of a token, predicted")
    speed = f"{approximate_number(cost.tokens_s)} tokens/s, predicted"
    axes.set_title(f"{title}: {speed}".removeprefix(": "))
    axes.set_xlim(-0.7, len(cost.layers) - 0.3)
    add_legend(axes, reverse=True)  # in the order of the bars
    return save_figure(figure, form)


def _read_term(layer: LayerCost, name: str) -> float:
    return float(getattr(layer, name))
