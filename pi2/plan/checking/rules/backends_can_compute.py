"""A unit's backend can compute what the plan gives it.

Why: backends differ in what they compute: not every one serves a unit beside the sparse one, or
computes a whole model, and some know no mixtures, or not every activation or precision.  Asking
them first is better than failing when the model has been loaded.

Example: ``units.second.backend = "cpu"`` for a dense share.

Fix: name another backend for the unit, or give its share to another unit.  ``null`` computes
nothing, and is for all units of a plan or for none.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.units import describe_unit
from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.documents.backends import (
    find_backend,
    find_executor_backend,
    find_unit_backend,
    list_backend_names,
)
from pi2.plan.toml.paths import KeyPath

CODE = "P265"
SEVERITY = "error"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Ask the backend of every unit that computes something."""
    resolved = facts.resolved
    names = (resolved.sparse_unit, *resolved.dense_units)
    backends = {unit: resolved.name_backend(unit) for unit in names if resolved.has_backend(unit)}
    idle = [unit for unit, name in backends.items() if not find_backend(name).COMPUTES]
    if idle and len(idle) < len(backends):
        busy = next(unit for unit in backends if unit not in idle)
        yield Finding(
            path=_find_path(facts, idle[0]),
            message=f"backend `{backends[idle[0]]}` of `{idle[0]}` computes nothing, and "
            f"`{backends[busy]}` of `{busy}` does",
            help=f"run the plan dry with `{backends[idle[0]]}` for all units, or name another "
            f"backend for `{idle[0]}`",
        )
        return
    for unit, name in backends.items():
        backend = find_backend(name)
        is_sparse = unit == resolved.sparse_unit
        is_whole = is_sparse and resolved.has_whole_unit
        find = find_executor_backend if is_sparse else find_unit_backend
        if find(name) is None and not is_whole and facts.resolved.file is None:
            able = [other for other in list_backend_names() if find(other)]
            lack = (
                f"computes no whole model, and `{unit}` computes what no other unit does"
                if is_sparse
                else f"serves no unit beside `{resolved.sparse_unit}`, such as `{unit}`"
            )
            yield Finding(
                path=_find_path(facts, unit),
                message=f"backend `{name}` {lack}",
                help=f"backends that do: {', '.join(f'`{other}`' for other in able)}",
            )
            continue
        for limit in backend.find_limits(describe_unit(resolved, unit)):
            yield Finding(
                path=_find_path(facts, unit),
                message=f"backend `{name}` of `{unit}` {limit}",
                help=f"name another backend for `{unit}`, or give its share to another unit",
            )


def _find_path(facts: Facts, unit: str) -> KeyPath:
    """The key that names the unit's backend."""
    settings = facts.resolved.plan.units.get(unit)
    if settings is not None and settings.backend is not None:
        return ("units", unit, "backend")
    return ("backends", facts.resolved.device.units[unit].kind)
