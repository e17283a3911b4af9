"""Statistics that the routing of a synthetic mixture shall have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pi2.costs.activity import average_chances, find_routing_law
from pi2.costs.hotness import Hotness, measure_skew
from pi2.diagnostics import UserError
from pi2.measuring.routing import measure_locality, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Statistics of a mixture's routing."""

    popular: tuple[float, ...]
    """Share of a layer's experts that make up 80 % of its uses, of each layer, or one for all."""
    reuse: float
    """Share of a token's experts that the token before it chose, mean over layers."""

    def find_popular(self, layer: int) -> float:
        """The share of ``layer``."""
        return self.popular[min(layer, len(self.popular) - 1)]


def publish_routing(experts: int, chosen: int) -> Routing:
    """Routing with which caches hit as often as was published of such mixtures."""
    popular, reuse = describe_law(experts, chosen / experts)
    return Routing(popular=(round(popular, 3),), reuse=round(reuse, 3))


def describe_law(experts: int, active: float) -> tuple[float, float]:
    """Of a token that chooses the share ``active``: the share of a layer's experts that make 80 %
    of the choices, and the share of its experts that the token before chose."""
    spread, repeat = find_routing_law(experts)
    hotness = Hotness(active=active, spread=spread)
    chances = average_chances(hotness)
    usual = float((chances**2).sum() / chances.sum())
    return measure_skew(hotness), usual + repeat * (1.0 - usual)


def read_routing(name: str, experts: int, chosen: int) -> Routing | None:
    """The routing that ``name`` stands for: ``uniform`` (None), ``published``, a trace of `pi2
    activations --routing`, or a JSON file with the keys of `Routing`; `UserError` P550 if it is
    none of these."""
    if name in ("uniform", "published"):
        return None if name == "uniform" else publish_routing(experts, chosen)
    path = Path(name)
    if path.suffix == ".parquet":
        trace = read_trace(path)
        layers = range(trace.chosen.shape[1])
        popular = tuple(measure_locality(trace, layer).popular for layer in layers)
        return Routing(popular=popular, reuse=measure_locality(trace).reuse[1])
    try:
        values = json.loads(path.read_text("utf-8"))
        popular = values["popular"]
        shares = tuple(map(float, popular if isinstance(popular, list) else [popular]))
        found = Routing(popular=shares, reuse=float(values["reuse"]))
        if not shares or not all(0.0 < share <= 0.8 for share in (*shares, found.reuse)):
            raise ValueError("shares lie between 0 and 0.8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError.of(
            "P550",
            f"{name} has no statistics of routing: {error}",
            help='for example {"popular": 0.206, "reuse": 0.379}',
        ) from None
    return found
