"""What predictions take to be otherwise than pi2's engine does it, where several units compute."""

from __future__ import annotations

from pi2.plan.arithmetic.resolved import ResolvedPlan


def list_dense_units(resolved: ResolvedPlan) -> list[str]:
    """Units that compute neurons densely in steps of ``decode.batch`` sequences, as they come in
    the layers."""
    batch = resolved.plan.decode.batch
    return list(
        dict.fromkeys(
            layer.dense.unit
            for layer in resolved.layers
            if layer.dense is not None and layer.find_dense_share(batch) > 0.0
        )
    )


def list_used_units(resolved: ResolvedPlan) -> list[str]:
    """Units beside the processor that compute anything: neurons, rows of projections, prompts."""
    rows, prompts = resolved.divided_rows, resolved.plan.prefill.unit
    others = [] if rows is None else [rows.unit]
    others += [] if prompts in (None, resolved.sparse_unit) else [str(prompts)]
    return list(dict.fromkeys((*list_dense_units(resolved), *others)))


def list_assumptions(resolved: ResolvedPlan, known: str | None) -> tuple[str, ...]:
    """A sentence for each difference between predictions and the engine; ``known``: the unit beside
    the processor whose rates are known."""
    sparse, prompts = resolved.sparse_unit, resolved.plan.prefill.unit
    units = list_dense_units(resolved)
    found = []
    if prompts not in (None, sparse, known):
        found.append(f"{sparse} computes prompts; {prompts} does in pi2's engine")
    rows = resolved.divided_rows
    if rows is not None and rows.unit != known:
        found.append(f"{sparse} computes all projections; {rows.unit} has rows of them in the plan")
    if units and prompts is None and not resolved.device.units[units[0]].memory:
        found.append(
            f"{sparse} computes whole prompts; in pi2's engine {units[0]} computes the neurons "
            "that it keeps"
        )
    return tuple(found)
