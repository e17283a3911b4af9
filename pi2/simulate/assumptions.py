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


def list_assumptions(resolved: ResolvedPlan) -> tuple[str, ...]:
    """A sentence for each difference between predictions and the engine."""
    sparse, prompts = resolved.sparse_unit, resolved.plan.prefill.unit
    units = list_dense_units(resolved)
    if not units or resolved.device.units[units[0]].memory is not None:
        # A unit with memory of its own is predicted to compute its neurons in steps, and no more.
        if prompts in (None, sparse):
            return ()
        return (f"{sparse} computes prompts; {prompts} does in pi2's engine",)
    (name, *_) = units
    found = [f"{sparse} and {name} divide projections; pi2's engine leaves them to {sparse}"]
    if resolved.divided_rows is not None:
        found = [
            f"{sparse} and {name} divide projections by their speed, not as [projections] says"
        ]
    if prompts != name:
        found.append(
            f"{name} computes whole prompts; pi2's engine gives it only neurons that it keeps "
            f'unless prefill.unit = "{name}"'
        )
    return tuple(found)
