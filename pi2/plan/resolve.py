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

from pi2.diagnostics import UserError
from pi2.plan.arithmetic.resolved import ResolvedLayer, ResolvedPlan
from pi2.plan.checking.check import Report, check_plan
from pi2.plan.reading.references import Resolver
from pi2.plan.toml.source import CANNOT_READ

if TYPE_CHECKING:
    from pi2.plan.reading.thresholds import GivenThresholds

__all__ = ["ResolvedLayer", "ResolvedPlan", "load_plan"]


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
        raise make_error(report)
    return report.resolved


def make_error(report: Report) -> UserError:
    """The exception for a report with errors."""
    unread = any(item.code in CANNOT_READ for item in report.diagnostics)
    return UserError(report.diagnostics, exit_code=2 if unread else 1, sources=report.sources)
