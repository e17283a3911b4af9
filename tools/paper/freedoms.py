"""What was chosen to fit published figures, and what comparisons are without each choice.

Without a constant: a step that takes no time, a unit that loses nothing, or the published figure
that the fitted one stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

from paper import scenarios
from paper.points import Point, list_held_out, list_points
from paper.scenarios import MIXTRAL, Scenario, read_scenario
from pi2.costs.activations import Hotness
from pi2.costs.constants import Constants
from pi2.costs.description import Description
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.planning.cost import cost_description


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """A fitted or chosen figure, and its errors without it."""

    name: str
    value: str
    without: str
    mean: float
    worst: float
    worst_point: str


LAYER_SHARE = 0.03
"""Neurons of a layer of TurboSparse-Mixtral-47B that fire, of those of all experts."""
CONSTANTS: Mapping[str, tuple[float, str]] = {
    "barrier_s": (0.0, "0"),
    "dense_launch_s": (0.0, "0"),
    "gather_efficiency": (1.0, "1: as fast as streaming"),
    "reader_wake_s": (0.0, "0"),
    "place_s": (0.0, "0"),
    "named_margin": (1e-9, "0: what fires is named"),
    "default_spread": (0.775, "0.775: what PowerInfer publishes of other models"),
    "page_fault_s": (0.0, "0"),
    "page_cache_share": (1.0, "1"),
    "streaming_compute_share": (1.0, "1"),
    "copy_bytes_s": (1e18, "no copy"),
}
SHARES: Mapping[str, tuple[float, str]] = {
    "COLD_SHARE": (0.1, "0.1"),
    "ABLATION_READERS": (1, "1"),
    "LLMFLASH_READERS": (8, "8"),
}


def list_freedoms() -> Iterator[Freedom]:
    """Each figure with the errors without it; the first row is with all of them."""
    usual = Constants()
    yield _measure("all as they are", "", "", usual)
    for name, (value, text) in CONSTANTS.items():
        own = f"{getattr(usual, name):g}"
        yield _measure(f"`{name}`", own, text, replace(usual, **{name: value}))
    for name, (value, text) in SHARES.items():
        own = f"{getattr(scenarios, name):g}"
        with patch.object(scenarios, name, value):
            yield _measure(f"`{name}` of the scenarios", own, text, usual)
    for fired, text in (
        (0.15, "0.15 of an expert fire (published), more are named"),
        (None, "0.12 are named: 3 % of a layer's (published)"),
    ):
        with patch.object(scenarios, "read_inputs", partial(_forget_predictor, fired=fired)):
            yield _measure("`predictor.active` of the 47B", "0.08", text, usual)


def _forget_predictor(
    resolved: ResolvedPlan, constants: Constants | None = None, *, fired: float | None
) -> Description:
    """The 47B with a published share: of an expert's neurons, of which predictors name more; or,
    None, of the whole layer's, all of it the two experts that compute."""
    from pi2.costs.activity import name_more
    from pi2.simulate import read_inputs

    found = read_inputs(resolved, constants=constants)
    if found.chosen >= 1.0 or not found.settings.is_predicted:
        return found
    chosen = constants or Constants()
    active = LAYER_SHARE / found.chosen if fired is None else name_more(fired, chosen)
    named = Hotness(active=active, spread=chosen.default_spread)
    kinds = (replace(kind, activity=replace(kind.activity, named=named)) for kind in found.kinds)
    return replace(found, kinds=tuple(kinds))


def _measure(name: str, value: str, without: str, constants: Constants) -> Freedom:
    errors = {}
    for point in (*list_points(), *list_held_out()):
        if point.scored and point.measure in ("decode tokens/s", "prefill tokens/s"):
            errors[_name(point)] = abs(_predict(point, constants) / point.published - 1.0)
    worst = max(errors, key=lambda key: errors[key])
    return Freedom(
        name=name,
        value=value,
        without=without,
        mean=sum(errors.values()) / len(errors),
        worst=errors[worst],
        worst_point=worst,
    )


def _name(point: Point) -> str:
    scenario = point.scenario
    memory = f" {scenario.memory:g} GB" if isinstance(scenario.memory, float) else ""
    measure = point.measure.split()[0]
    model = "the 47B" if scenario.model == MIXTRAL else scenario.model
    return f"{scenario.system}, {model}{memory}, {scenario.device}, {measure}"


def _predict(point: Point, constants: Constants) -> float:
    found = cost_description(_describe(point.scenario, constants), point.prompt)
    if point.measure == "prefill tokens/s":
        assert found.prefill_tokens_s is not None
        return found.prefill_tokens_s
    return found.tokens_s


def _describe(scenario: Scenario, constants: Constants) -> Description:
    return read_scenario(scenario, constants)


def write_freedoms() -> Iterator[str]:
    """The rows of a table."""
    yield "| chosen | value | without it | mean error | worst | which |"
    yield "| --- | ---: | --- | ---: | ---: | --- |"
    for item in list_freedoms():
        yield (
            f"| {item.name} | {item.value} | {item.without} | {item.mean:.1%} | {item.worst:.0%} | "
            f"{item.worst_point} |"
        )
