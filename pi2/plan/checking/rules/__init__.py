"""Whole-plan rules: one module each, found by being here.

A rule module has ``CODE``, ``SEVERITY``, ``NEEDS`` (the facts that it reads), ``check(facts)``,
which yields findings, and a docstring, which is its documentation: what, why, example, fix.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache

from pi2.plan.checking.findings import Rule


@cache
def load_rules() -> tuple[Rule, ...]:
    """All rules, in the order of their codes."""
    return tuple(sorted(_import_rules(), key=lambda rule: rule.code))


def _import_rules() -> Iterator[Rule]:
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        yield Rule(
            code=module.CODE,
            severity=module.SEVERITY,
            needs=module.NEEDS,
            check=module.check,
            documentation=module.__doc__ or "",
        )
