"""From a path to a plan that may run: read, resolve, validate.

    read      plan, then the device and model that it names: text, values, schema
    compose   each of them with the documents that it extends
    resolve   the layers one by one, the bundle
    validate  the rules of `pi2.plan.checking.rules`

Every phase reports all that it finds; a phase whose input is unsound does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.check import check_plan
from pi2.plan.reading.references import Resolver

if TYPE_CHECKING:
    from pi2.plan.reading.thresholds import GivenThresholds


def load_plan(
    path: str | Path,
    *,
    overrides: Mapping[str, object] | None = None,
    resolver: Resolver | None = None,
    thresholds: GivenThresholds = None,
) -> ResolvedPlan:
    """Load, resolve and validate the plan at ``path``.

    ``overrides`` replaces values of the plan by dotted key path, such as
    ``{"decode.predictor": "gate"}``; ``resolver`` finds references with a scheme;
    ``thresholds`` count instead of those that the plan names, ``"none"`` that there are none yet.
    Raises ``UserError`` with all findings.
    """
    report = check_plan(
        Path(path), overrides=overrides or {}, resolver=resolver, thresholds=thresholds
    )
    if report.resolved is None:
        raise report.make_error()
    return report.resolved
