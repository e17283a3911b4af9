"""Rules about decoding: predictors, looking ahead and reads."""

from collections.abc import Iterator

from pi2.plan.arithmetic.sizes import count_gate_read_bytes, find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin, rule


@rule("P234", "error", "plan", "model")
def check_gate_is_exact(facts: Facts) -> Iterator[Finding]:
    plan, smooth = facts.plan, facts.model.is_smooth
    if plan.decode.predictor != "gate" or not smooth:
        return
    if plan.sparsity is not None:
        computes = {*plan.backends.values(), *(unit.backend for unit in plan.units.values())}
        counted = computes <= {"null", None} and plan.sparsity.target is not None
        if plan.sparsity.thresholds is None and not counted:
            yield Finding(
                ("sparsity",),
                "no thresholds: nothing says which neurons are inactive",
                "make them with `pi2 sparsity calibrate`; only plans with the backend "
                '"null" for every unit, and a target, go without',
                at="key",
            )
        return
    if facts.model.cut_layers:
        return
    name = facts.model.ffn.activation
    exact = "none" if facts.model.moe is None else "router"
    yield Finding(
        ("decode", "predictor"),
        f"the gate does not show which neurons are inactive: the activation is {name}",
        f'write predictor = "{exact}", or add thresholds: `pi2 sparsity calibrate`',
        origins=(Origin("model", ("ffn", "activation"), f'activation = "{name}"'),),
    )


@rule("P222", "warning", "resolved")
def check_phases_save_reads(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    plan, bundle, model = resolved.plan, resolved.bundle, resolved.model
    if plan.pipeline.phases == 1 or count_gate_read_bytes(resolved):
        return
    if not model.ffn.gated:
        reason = "the model's neurons have no gate"
    elif model.is_smooth:
        reason = f"no gate of {model.ffn.activation} is ever closed"
    elif bundle.biases:
        reason = "a gate's bias comes with the end of the bundle"
    elif plan.decode.predictor != "low-rank":
        return
    else:
        block = find_block_bytes(resolved.device)
        reason = f"gate and bundle end in the same block of {block} bytes"
    yield Finding(
        ("pipeline", "phases"),
        f"two phases read no less than one: {reason}",
        "write phases = 1",
        origins=(Origin("plan", ("bundle", "stride"), f"{bundle.used_bytes} bytes used"),),
    )
