"""What was chosen to fit published figures, and what comparisons are without each choice.

Without a constant: a step that takes no time, a unit that loses nothing, or the published figure
that the fitted one stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from paper import scenarios
from paper.points import Point, list_held_out, list_points
from paper.scenarios import MIXTRAL, Scenario, read_scenario
from pi2.costs import activity as activities
from pi2.costs import reads
from pi2.costs.constants import Constants
from pi2.costs.cost import Description, cost_description
from pi2.costs.hotness import Hotness
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.device import Device


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
REPEATS = 0.4
"""Part of a neuron's uses that the token before decides: more than any trace of a router shows."""
ACE_2 = "oneplus-ace-2"
STANDARD_BYTES_S = 2.1e9
"""Rate of long reads that the standard UFS 3.1 gives."""
CONSTANTS: Mapping[str, tuple[float, str]] = {
    "core_barrier_s": (0.0, "0"),
    "dense_launch_s": (0.0, "0"),
    "gather_efficiency": (1.0, "1: as fast as streaming"),
    "place_s": (0.0, "0"),
    "named_margin": (1e-9, "0: what fires is named"),
    "default_spread": (0.775, "0.775: what PowerInfer publishes of other models"),
    "streaming_compute_share": (1.0, "1"),
}
SHARES: Mapping[str, tuple[float, str]] = {"COLD_SHARE": (0.1, "0.1")}


def list_names() -> set[str]:
    """Names of all that the table has a row for."""
    return {f"`{name}`" for name in CONSTANTS} | {name for name, *_ in _list_changes()}


def list_freedoms() -> Iterator[Freedom]:
    """Each figure with the errors without it; the first row is with all of them."""
    usual = Constants()
    yield _measure("all as they are", "", "", usual)
    for name, (value, text) in CONSTANTS.items():
        own = f"{getattr(usual, name):g}"
        yield _measure(f"`{name}`", own, text, Constants(**{name: value}))
    for name, own, text, changed in _list_changes():
        with changed:
            yield _measure(name, own, text, usual)


def _list_changes() -> Iterator[tuple[str, str, str, AbstractContextManager[object]]]:
    """Names, values and replacements of what is no constant, each with what replaces it."""
    variation = f"{Constants().token_variation:g}"
    yield "`token_variation`", variation, "0: all tokens are alike", _make_tokens_alike()
    worth = ", ".join(f"{share:g}" for share in reads.STRETCH_WORTH)
    yield (
        "`STRETCH_WORTH` of reads",
        worth,
        "1: where they are quicker for the mean layer, all layers read them",
        patch.object(reads, "STRETCH_WORTH", (1.0 - 1e-9, 1.0)),
    )
    for name, (value, text) in SHARES.items():
        own = f"{getattr(scenarios, name):g}"
        yield f"`{name}` of the scenarios", own, text, patch.object(scenarios, name, value)
    hot = patch.object(scenarios, "read_inputs", _halve_hot)
    yield "hot shares of shipped plans", "0.9 of what stays", "half of what stays", hot
    for name, own, text, change in (
        ("rate of the Ace 2's NPU", "4340 GOP/s", "the OnePlus 12's", _take_other_npu),
        ("rate of the Ace 2's long reads", "2.15 GB/s", "2.1: the standard's", _take_standard),
    ):
        yield name, own, text, patch.object(scenarios, "load_shipped", partial(_load, change))
    for shares, text in (
        ((0.15, 0.0), "0.15 of an expert fire (published), more are named"),
        ((None, 0.0), "0.12 are named: 3 % of a layer's (published)"),
        ((None, REPEATS), "the same, and tokens that repeat 40 % of neurons"),
    ):
        forget = patch.object(scenarios, "read_inputs", partial(_forget_predictor, shares=shares))
        yield "`predictor.active` of the 47B", "0.08", text, forget


@contextmanager
def _make_tokens_alike() -> Iterator[None]:
    def make() -> Constants:
        return Constants(token_variation=0.0)

    activities.average_chances.cache_clear()
    try:
        with patch.object(activities, "Constants", make):
            yield
    finally:
        activities.average_chances.cache_clear()


def _halve_hot(resolved: ResolvedPlan, constants: Constants | None = None) -> Description:
    """A plan with as many neurons in memory, half of them hot as where `pi2 run --memory` fits a
    plan, and half in the cache."""
    from pi2.simulate import read_inputs

    found = read_inputs(resolved, constants=constants)
    kinds = []
    for kind in found.kinds:
        hot = kind.hot if kind.hot >= 1.0 else min(kind.hot, (kind.hot + kind.cold) / 2)
        cold = kind.hot + kind.cold - hot
        kinds.append(replace(kind, hot=hot, cold=cold, dense=min(kind.dense, hot)))
    return replace(found, kinds=tuple(kinds))


def _load(change: Any, device: str, model: str, memory: str) -> ResolvedPlan:
    """A shipped plan, that of an Ace 2 with a change of the device."""
    found = _LOAD(device, model, memory)
    return replace(found, device=change(found.device)) if device == ACE_2 else found


_LOAD = scenarios.load_shipped


def _take_other_npu(device: Device) -> Device:
    other = _LOAD("oneplus-12", "bamboo-7b", "full").device.units["npu"]
    own = device.units["npu"].model_copy(update={"compute": other.compute})
    return device.model_copy(update={"units": {**device.units, "npu": own}})


def _take_standard(device: Device) -> Device:
    found = tuple(
        item.model_copy(update={"rate": STANDARD_BYTES_S})
        if item.pattern == "sequential" and item.block > 4096
        else item
        for item in device.storage.reads
    )
    storage = device.storage.model_copy(update={"reads": found})
    return device.model_copy(update={"storage": storage})


def _forget_predictor(
    resolved: ResolvedPlan,
    constants: Constants | None = None,
    *,
    shares: tuple[float | None, float],
) -> Description:
    """The 47B with a published share: of an expert's neurons, of which predictors name more; or,
    None, of the whole layer's, all of it the two experts that compute.  Then the part of neurons
    that repeats."""
    from pi2.costs.activity import name_more
    from pi2.simulate import read_inputs

    found = read_inputs(resolved, constants=constants)
    chance = found.kinds[0].activity.chosen
    if chance >= 1.0 or not found.settings.is_predicted:
        return found
    chosen = constants or Constants()
    fired, again = shares
    active = LAYER_SHARE / chance if fired is None else name_more(fired, chosen)
    named = Hotness(active=active, spread=chosen.default_spread)
    changes: dict[str, Any] = {"named": named, "again": again}
    kinds = (replace(kind, activity=replace(kind.activity, **changes)) for kind in found.kinds)
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
