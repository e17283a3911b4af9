"""Settings of a single unit are given to a unit that heeds them.

Why: the sparse unit computes in pi2's own process, cannot be lost alone, and has the segments of
``[memory.segments]``; ``process``, ``on_failure`` and ``[memory.units.NAME]`` are for the units
beside it.  A GPU that has the whole model has memory of its own, and nobody else to go on.

Example: ``[memory.units.cpu]`` in a plan whose sparse unit is ``cpu``.

Fix: take the setting out, or give it to the unit that keeps hot neurons.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.checking.findings import Facts, Finding
from pi2.plan.toml.paths import KeyPath

CODE = "P414"
SEVERITY = "warning"
NEEDS = ("resolved",)


def check(facts: Facts) -> Iterator[Finding]:
    """Look for settings of the sparse unit that only units beside it have."""
    plan, name = facts.resolved.plan, facts.resolved.sparse_unit
    ignored: list[KeyPath] = []
    settings = plan.units.get(name)
    if settings is not None:
        named = settings.model_fields_set & {"process", "on_failure"}
        ignored += [("units", name, key) for key in sorted(named)]
    if name in plan.memory.units and not facts.resolved.has_whole_unit:
        ignored.append(("memory", "units", name))
    for path in ignored:
        yield Finding(
            path=path,
            at="key",
            message=f"does nothing: `{name}` is the sparse unit, which has no such setting",
            help="take it out"
            if path[0] == "units"
            else "take it out: memory.segments are what the sparse unit has",
        )
