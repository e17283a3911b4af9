"""Simulation inputs for the settings of the paper: its plans and their variants.

Nothing here is a rate or a time: only what runs where, and how much memory it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pi2.costs.activity import LayerActivity, unite_activity
from pi2.costs.constants import Constants
from pi2.costs.cost import Description
from pi2.costs.hotness import Hotness
from pi2.fitting.check import load_plan
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.simulate import read_inputs

PLANS = (Path(__file__).parent / "plans", Path(__file__).resolve().parents[2] / "plans")
"""Plans of the paper's settings, and shipped ones for settings that have no other plan."""
GIGA = 10**9

COLD_SHARE = 0.05
"""Cache for cold neurons, as a share of all neurons, where memory is counted as the paper does."""
LARGEST_DENSE_SHARE = 0.5
"""Share of a layer that the NPU computes at one sequence (7168 of 14336 neurons)."""

SAME_SHAPE = {"mistral-7b": "bamboo-7b"}
"""SiLU models run with the plan of a ReLU model of their shape."""
SILU_ACTIVE = 0.5
"""Neurons of a SiLU model that matter (PowerInfer-2, Table 6, after CATS and CHESS)."""

MIXTRAL = "turbosparse-mixtral-47b"
# The memory of TurboSparse-Mixtral-47B in the paper's text (sec 7.2.2), in bytes.
PAPER_FIXED = {"not FFN": 1.0e9, "predictors": 2.6e9, "scales": 2.7e9, "runtime": 0.3e9}
PAPER_NEURON_BYTES = 6144
"""A cached neuron: three rows of 2 KB, their scales being always in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A system on a phone with a model."""

    system: str
    device: str
    model: str
    memory: str | float = "half"
    """``half`` or ``full``: FFN neurons in memory; a number: the whole budget in 1e9 bytes."""
    batch: int = 1
    """Sequences that generate at the same time."""


def read_scenario(scenario: Scenario, constants: Constants | None = None) -> Description:
    """Describe a scenario; ``UserError`` names what the device lacks."""
    found = SYSTEMS[scenario.system](scenario, constants or Constants())
    if scenario.batch > 1:
        kinds = tuple(
            replace(
                kind,
                activity=unite_activity(kind.activity, scenario.batch),
                settings=replace(kind.settings, batch=scenario.batch),
            )
            for kind in found.kinds
        )
        found = replace(found, kinds=kinds)
    return replace(found, name=f"{scenario.system}: {found.name}")


@lru_cache(maxsize=128)
def load_shipped(device: str, model: str, memory: str) -> ResolvedPlan:
    """The plan of a model on a phone."""
    names = {
        "half": (f"{model}-half.plan.toml", f"{model}.plan.toml"),
        "full": (f"{model}.plan.toml",),
    }[memory]
    paths = (folder / device / name for name in names for folder in PLANS)
    return load_plan(next(path for path in paths if path.exists()))


def _read(scenario: Scenario, constants: Constants) -> Description:
    memory = "half" if scenario.memory == "half" else "full"
    model = SAME_SHAPE.get(scenario.model, scenario.model)
    found = read_inputs(load_shipped(scenario.device, model, memory), constants=constants)
    if model == scenario.model:
        return found
    found = replace(found, name=f"{scenario.model} as {found.name}", is_smooth=True)
    return _activate(found, Hotness(active=SILU_ACTIVE, spread=constants.smooth_spread))


def _activate(found: Description, named: Hotness) -> Description:
    """The same with other neurons that a token computes."""
    kinds = (
        replace(kind, activity=replace(kind.activity, named=named, opened=1.0, fired=1.0))
        for kind in found.kinds
    )
    return replace(found, kinds=tuple(kinds))


def _use_cpu_only(found: Description) -> Description:
    rates = replace(found.rates, dense=None)
    kinds = tuple(
        replace(
            kind,
            dense=0.0,
            rates=rates,
            settings=replace(kind.settings, attention_share=0.0, head_share=0.0),
        )
        for kind in found.kinds
    )
    return replace(found, kinds=kinds)


def _keep(found: Description, *, dense: float, hot: float, cold: float) -> Description:
    kinds = (replace(kind, dense=dense, hot=hot, cold=cold) for kind in found.kinds)
    return replace(found, kinds=tuple(kinds))


def _find_activity(found: Description) -> LayerActivity:
    (kind,) = found.kinds
    return kind.activity


def _count_neurons(found: Description) -> float:
    return float(found.layers * _find_activity(found).neurons)


def make_powerinfer2(scenario: Scenario, constants: Constants) -> Description:
    """PowerInfer-2: the shipped plan; with a budget, memory as the paper counts it."""
    found = _read(scenario, constants)
    budget = _find_budget(scenario, found)
    if budget is None:
        return found
    free = budget - sum(PAPER_FIXED.values())
    return _keep_share(found, max(free, 0.0) / PAPER_NEURON_BYTES / _count_neurons(found))


def _find_budget(scenario: Scenario, found: Description) -> float | None:
    """Bytes of memory where they are counted as the paper does; None where the plan says it.

    With half of the FFN in memory, scales included, the 47B takes 16.6 GB in all; Ace 2 has a
    quarter.
    """
    if not isinstance(scenario.memory, str):
        return scenario.memory * GIGA
    if scenario.memory == "full" or scenario.model != MIXTRAL:
        return None
    share = 0.25 if scenario.device == "oneplus-ace-2" else 0.5
    fixed = sum(PAPER_FIXED.values()) - PAPER_FIXED["scales"]
    return fixed + share * _count_neurons(found) * found.settings.sizes.bundle.neuron_bytes


def _keep_share(found: Description, share: float) -> Description:
    """Keep a share of all neurons: hot ones, and a small cache for the cold."""
    share = min(share, 1.0)
    hot = max(share - COLD_SHARE, share / 2)
    return _keep(found, dense=min(hot, LARGEST_DENSE_SHARE), hot=hot, cold=share - hot)


def make_powerinfer2_cpu(scenario: Scenario, constants: Constants) -> Description:
    """PowerInfer-2 without the NPU: version 1 of the paper, and the ablation's third step."""
    return _use_cpu_only(make_powerinfer2(scenario, constants))


SYSTEMS: Mapping[str, Callable[[Scenario, Constants], Description]] = {
    "PowerInfer-2": make_powerinfer2,
    "PowerInfer-2, CPU only": make_powerinfer2_cpu,
}
