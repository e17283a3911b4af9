"""Rules about decoding: predictors, looking ahead and reads."""

from collections.abc import Iterator

from pi2.plan.arithmetic.sizes import count_gate_read_bytes, find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.model import Model


@rule("P233", "error", "plan", "model")
def check_predictor_exists(facts: Facts) -> Iterator[Finding]:
    if facts.plan.decode.predictor != "low-rank" or facts.model.predictor is not None:
        return
    other = "none" if facts.model.is_smooth else "gate"
    if facts.model.moe is not None:
        other = "router"
    yield Finding(
        ("decode", "predictor"),
        f"the model `{facts.model.id}` has no low-rank predictors",
        f'write predictor = "{other}"',
        origins=(Origin("model", (), "the file has no table [predictor]"),),
    )


@rule("P268", "error", "plan", "model")
def check_router_needs_experts(facts: Facts) -> Iterator[Finding]:
    model = facts.model
    is_weighed = model.moe is not None and model.moe.weighs == "input"
    if is_weighed and facts.plan.decode.predictor not in ("none", "router"):
        yield _refuse_router(("decode", "predictor"), model, 'write predictor = "router"')
    elif is_weighed and facts.plan.sparsity is not None:
        yield _refuse_router(("sparsity",), model, "leave the table [sparsity] out")
    if facts.plan.decode.predictor != "router" or model.moe is not None:
        return
    other = "none" if model.is_smooth else "gate"
    if model.predictor is not None:
        other = "low-rank"
    yield Finding(
        ("decode", "predictor"),
        f"the model `{model.id}` has no experts that a router could choose",
        f'write predictor = "{other}"',
        origins=(Origin("model", (), "the file has no table [moe]"),),
    )


def _refuse_router(path: tuple[str, ...], model: Model, remedy: str) -> Finding:
    return Finding(
        path,
        f"which neurons of an expert fire in `{model.id}` depends on the expert's weight, "
        "which neither predictors nor gates know",
        remedy,
        origins=(Origin("model", ("moe", "weighs"), 'weighs = "input"'),),
    )


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


@rule("P254", "error", "plan")
def check_look_ahead_names_neurons(facts: Facts) -> Iterator[Finding]:
    decode = facts.plan.decode
    if decode.look_ahead == "none" or decode.predictor in ("low-rank", "router"):
        return
    yield Finding(
        ("decode", "look_ahead"),
        f'look_ahead = "{decode.look_ahead}" needs predictor = "low-rank" or "router", '
        f'not "{decode.predictor}"',
        'write look_ahead = "none"',
        origins=(Origin("plan", ("decode", "predictor"), f'predictor = "{decode.predictor}"'),),
    )


@rule("P292", "error", "plan")
def check_leave_out_has_scores(facts: Facts) -> Iterator[Finding]:
    decode = facts.plan.decode
    if decode.leave_out is None:
        return
    if decode.predictor != "low-rank":
        key, value = "predictor", f'"{decode.predictor}"'
        message = f"leave_out has no effect with predictor = {value}: it leaves out scores"
    elif decode.missing_threshold is not None:
        key, value = "missing_threshold", f"{decode.missing_threshold:g}"
        message = f"leave_out and missing_threshold = {value} exclude each other"
    else:
        return
    yield Finding(
        ("decode", "leave_out"),
        message,
        'remove leave_out, or write predictor = "low-rank"'
        if key == "predictor"
        else "remove one: leave_out states a quality, missing_threshold a score",
        origins=(Origin("plan", ("decode", key), f"{key} = {value}"),),
    )


@rule("P255", "error", "plan")
def check_missing_threshold_saves_reads(facts: Facts) -> Iterator[Finding]:
    decode = facts.plan.decode
    if decode.missing_threshold is None:
        return
    if decode.predictor != "low-rank":
        key, value = "predictor", f'"{decode.predictor}"'
        message = f"missing_threshold has no effect with predictor = {value}: it compares scores"
    elif decode.missing_threshold <= decode.threshold:
        key, value = "threshold", f"{decode.threshold:g}"
        own = f"{decode.missing_threshold:g}"
        message = f"missing_threshold = {own} has no effect: it must be above threshold = {value}"
    else:
        return
    yield Finding(
        ("decode", "missing_threshold"),
        message,
        "remove missing_threshold, or "
        + ("raise it" if key == "threshold" else 'write predictor = "low-rank"'),
        origins=(Origin("plan", ("decode", key), f"{key} = {value}"),),
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


@rule("P235", "warning", "plan")
def check_chunk_within_context(facts: Facts) -> Iterator[Finding]:
    chunk, context = facts.plan.prefill.chunk, facts.plan.kv.context
    if chunk <= context:
        return
    yield Finding(
        ("prefill", "chunk"),
        f"a chunk of {chunk} tokens is longer than the context of {context}",
        f"write chunk = {context}",
        origins=(Origin("plan", ("kv", "context"), f"context = {context}"),),
    )
