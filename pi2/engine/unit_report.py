"""What several units have computed in a run, for the summaries of commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi2.engine.loaded_model import LoadedModel


def describe_units(model: LoadedModel) -> dict[str, dict[str, Any]]:
    """What the sparse unit, which is the first, and those beside it have done since loading; empty
    where there is one unit."""
    from pi2.engine.statistics import divide

    units, predicted = model.units, model.stats.predicted_neurons
    if not units:
        return {}
    # Without a predictor the sparse unit computes everything that is left, and counts nothing.
    counted = predicted + sum(unit.computed_neurons for unit in units) if predicted else 0
    owned = sum(unit.owned_share for unit in units)
    found: dict[str, dict[str, Any]] = {
        model.plan.sparse_unit: {
            "owned_share": round(1.0 - owned, 4),
            "computed_share": _round(divide(predicted, counted)),
            "busy_s": None,
            "lost": None,
            "padding": None,
            "emulated": False,
        }
    }
    for unit in units:
        found[unit.name] = {
            "owned_share": round(unit.owned_share, 4),
            "computed_share": _round(divide(unit.computed_neurons, counted)),
            "busy_s": round(unit.busy_s, 4),
            "lost": unit.lost,
            "padding": _round(unit.padding),
            "emulated": unit.emulated,
        }
    return found


def summarise_units(units: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What `describe_units` found, in a line, and a line for each unit that was lost."""
    if not units:
        return
    parts = []
    for name, unit in units.items():
        shown = name_unit(name, emulated=bool(unit.get("emulated")))
        text = f"{shown} owns {unit['owned_share']:.0%} of the neurons"
        if unit["computed_share"] is not None:
            text += f" and computed {unit['computed_share']:.0%} of those computed"
        if unit["busy_s"] is not None:
            text += f", busy {unit['busy_s']:.2f} s"
        if unit.get("padding") is not None:
            text += f", {unit['padding']:.0%} of its work was padding"
        parts.append(text)
    yield f"units: {' · '.join(parts)}"
    for name, unit in units.items():
        if unit["lost"] is not None:
            yield f"note: the unit {name} was lost, the run went on without it: {unit['lost']}"


def name_unit(name: str, *, emulated: bool) -> str:
    """A unit's name as summaries show it."""
    return f"{name} (emulated)" if emulated else name


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
