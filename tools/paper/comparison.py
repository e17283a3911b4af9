"""Simulate the published figures and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from paper.points import Measure, Point
from paper.scenarios import Scenario, read_scenario
from pi2.costs.constants import Constants
from pi2.diagnostics import UserError
from pi2.simulate import SimulationResult, simulate

SHORT_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A published figure and what the simulator says; None where it can say nothing."""

    point: Point
    simulated: float | None
    reason: str = ""
    """Reason why there is no simulated figure."""

    @property
    def error(self) -> float | None:
        """Relative error of the simulated figure."""
        return None if self.simulated is None else self.simulated / self.point.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors over the scored points."""

    count: int
    mean: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated speed without a published one beside it."""

    scenario: Scenario
    tokens_s: float


def compare(
    points: Iterable[Point], *, tokens: int = 1024, constants: Constants | None = None
) -> list[Comparison]:
    """Simulate every point with ``tokens`` generated tokens."""
    chosen = constants or Constants()
    return [_compare_point(point, tokens, chosen) for point in points]


def predict(
    scenarios: Iterable[Scenario], *, tokens: int = 1024, constants: Constants | None = None
) -> list[Prediction]:
    """Simulate settings that are held against nothing."""
    chosen = constants or Constants()
    return [
        Prediction(scenario=item, tokens_s=_simulate(item, 64, tokens, chosen).tokens_s)
        for item in scenarios
    ]


def summarise(rows: Iterable[Comparison]) -> Summary | None:
    """Mean and worst absolute error of the scored points; None if there are none."""
    errors = [abs(row.error) for row in rows if row.point.scored and row.error is not None]
    if not errors:
        return None
    return Summary(count=len(errors), mean=sum(errors) / len(errors), worst=max(errors))


def _compare_point(point: Point, tokens: int, constants: Constants) -> Comparison:
    if point.rival:
        return Comparison(point=point, simulated=_find_speed_up(point, tokens, constants))
    if point.measure == "prefill tokens/s":
        tokens = 1
    try:
        result = _simulate(point.scenario, point.prompt, tokens, constants)
    except UserError as error:
        return Comparison(point=point, simulated=None, reason=error.diagnostics[0].message)
    simulated = MEASURES[point.measure](result)
    reason = "" if simulated is not None else "the device states no arithmetic rate"
    return Comparison(point=point, simulated=simulated, reason=reason)


def _find_speed_up(point: Point, tokens: int, constants: Constants) -> float:
    """Speed of a system divided by another's."""
    systems = (point.scenario, replace(point.scenario, system=point.rival))
    ours, theirs = (_simulate(item, point.prompt, tokens, constants).tokens_s for item in systems)
    return ours / theirs


@lru_cache(maxsize=512)
def _simulate(
    scenario: Scenario, prompt: int, tokens: int, constants: Constants
) -> SimulationResult:
    return simulate(read_scenario(scenario, constants), prompt_tokens=prompt, tokens=tokens)


MEASURES: Mapping[Measure, Callable[[SimulationResult], float | None]] = {
    "decode tokens/s": lambda result: result.tokens_s,
    "prefill tokens/s": lambda result: result.prefill.tokens_s if result.prefill else None,
    "mean ms": lambda result: 1e3 / result.tokens_s,
    "P50 ms": lambda result: result.find_percentile_s(50) * 1e3,
    "P90 ms": lambda result: result.find_percentile_s(90) * 1e3,
    "P99 ms": lambda result: result.find_percentile_s(99) * 1e3,
    "J per token": lambda result: result.energy.token_j if result.energy else None,
    "miss rate": lambda result: result.miss_rate,
    "P99 miss rate": lambda result: result.describe()["decode"]["miss_rate_p99"],
    "I/O share": lambda result: result.waiting_share,
}
