"""Planner and simulator work with one description, and what they make of it agrees."""

import pytest

from tests.helpers.slow import mark_slow
from tools.compare_predictions import Outcome, run_grid


@pytest.fixture(scope="module", params=[40, mark_slow(150)])
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    return list(run_grid(request.param, seed=20261122))


def test_expected_numbers_cost_what_drawn_ones_cost_over_random_grid(
    outcomes: list[Outcome],
) -> None:
    """notes/planner.md has the result of a larger grid."""
    errors = sorted(abs(item.error) for item in outcomes)
    far = [item.cell for item in outcomes if abs(item.error) > 0.10]
    assert len(far) <= 0.05 * len(outcomes), far
    assert errors[-1] <= 0.20, max(outcomes, key=lambda item: abs(item.error))
