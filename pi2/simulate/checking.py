"""A plan's description for the simulator, and what it cannot simulate."""

from __future__ import annotations

from dataclasses import replace

from pi2.costs.assumptions import list_dense_units
from pi2.costs.constants import Constants
from pi2.costs.description import Description, describe_plan
from pi2.costs.rates import Rates
from pi2.diagnostics import Diagnostic, Span, UserError
from pi2.plan.arithmetic.resolved import ResolvedPlan

MISSING_FIGURE = "P330"
UNSUPPORTED_SPLIT = "P331"


def read_inputs(
    resolved: ResolvedPlan, rates: Rates | None = None, constants: Constants | None = None
) -> Description:
    """Describe a plan; ``UserError`` P330, P331 names every figure that is missing.

    ``rates``: where they are not to be those of the device's document.
    """
    findings = list(_check_units(resolved))
    try:
        description = describe_plan(resolved, rates, store=resolved.store_path, constants=constants)
    except UserError as error:
        span = Span.of_file(str(resolved.path))
        found = [replace(item, code=MISSING_FIGURE, span=span) for item in error.diagnostics]
        reads = _check_reads(resolved)
        findings += [item for item in found if "storage.reads" not in item.message or not reads]
        findings += reads
    if findings:
        raise UserError(tuple(findings), exit_code=2)
    return description


def _check_reads(resolved: ResolvedPlan) -> list[Diagnostic]:
    """Kinds of reads that the device says nothing about, where anything is read."""
    if all(layer.hot >= 1.0 for layer in resolved.layers):
        return []
    device = resolved.device
    patterns = {item.pattern for item in device.storage.reads}
    names = [f"storage.reads with pattern {item!r}" for item in ("random", "sequential")]
    missing = [name for name in names if name.split("'")[1] not in patterns]
    return [
        Diagnostic(
            code=MISSING_FIGURE,
            message=f"the device {device.id!r} has no figure {name}",
            help="measure it with `pi2 probe`; random reads of 4 KiB and sequential ones of "
            "512 KiB are the least",
            span=Span.of_file(str(resolved.path)),
        )
        for name in (["storage.reads"] if len(missing) == 2 else missing)
    ]


def _check_units(resolved: ResolvedPlan) -> list[Diagnostic]:
    names = list_dense_units(resolved)
    found = []
    if len(names) > 1:
        found.append(
            (
                f"layers are given to {', '.join(names)}: the simulator knows the CPU and one "
                "other unit",
                f"give the layers of `{names[-1]}` to `{names[0]}`",
            )
        )
    if names and resolved.device.units[names[0]].emulated:
        found.append(
            (
                f"the unit {names[0]!r} is the processor itself, emulating another one",
                "give the layers to `cpu`",
            )
        )
    return [
        Diagnostic(
            code=UNSUPPORTED_SPLIT,
            message=message,
            help=text,
            span=Span.of_file(str(resolved.path)),
        )
        for message, text in found
    ]
