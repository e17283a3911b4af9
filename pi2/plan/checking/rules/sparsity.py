"""Rules about thresholds, settings of MoE models and drafts."""

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.checking.findings import Facts, Finding, Origin, rule
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Moe
from pi2.plan.documents.plan_units import SparsityMethod
from pi2.plan.documents.quantities import approximate_bytes


@rule("P257", "error", "plan", "model")
def check_sparsity_fits_model(facts: Facts) -> Iterator[Finding]:
    sparsity, model = facts.plan.sparsity, facts.model
    if sparsity is None:
        return
    name = model.ffn.activation
    if not model.is_smooth:
        yield Finding(
            ("sparsity",),
            f"neurons with {name} are zero when inactive: thresholds only add an error",
            'remove [sparsity]: predictor = "gate" loses nothing',
            at="key",
            origins=(Origin("model", ("ffn", "activation"), f'activation = "{name}"'),),
        )
    elif (problem := explain_method(sparsity.method, model)) is not None:
        yield Finding(("sparsity", "method"), problem, 'write method = "cats"')


def explain_method(method: SparsityMethod, model: Model) -> str | None:
    """Why neurons of ``model`` cannot be cut by ``method``; None if they can."""
    if method == "cats":
        return None
    if model.moe is not None:
        return f"{method} is not for MoE models: not for `{model.id}`"
    if not model.ffn.gated or model.ffn.bias:
        return f"{method} needs gates without biases: not `{model.id}`"
    return None


@rule("P258", "error", "resolved")
def check_thresholds_fit_plan(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    sparsity, found = resolved.plan.sparsity, resolved.thresholds
    if sparsity is None or found is None or not resolved.model.is_smooth:
        return
    again = "calibrate again: `pi2 sparsity calibrate PLAN --text FILE`"
    path = ("sparsity", "thresholds")
    if not found.fits(resolved.model):
        shape = f"{len(found.layers)} layers of {found.neurons} neurons, {found.activation}"
        message = f"these thresholds are of the model `{found.model}` ({shape})"
        yield Finding(path, message, again)
    elif found.method != sparsity.method:
        message = f"these thresholds were made for method = {found.method!r}"
        yield Finding(path, message, again)
    elif found.max_perplexity_increase != sparsity.max_perplexity_increase or (
        sparsity.target is not None and found.target != sparsity.target
    ):
        wish = f"target = {found.target:g}"
        if found.max_perplexity_increase is not None:
            wish = f"max_perplexity_increase = {found.max_perplexity_increase:g}"
        message = f"these thresholds were made for {wish}"
        yield Finding(path, message, again)


@rule("P279", "error", "plan", "model")
def check_dials_need_a_router(facts: Facts) -> Iterator[Finding]:
    experts, moe = facts.plan.experts, facts.model.moe
    if not experts.is_lossy:
        return
    dial = "prefer_cached" if experts.prefer_cached else "least_weight"
    if not (experts.prefer_cached or experts.least_weight):
        dial = "most_reads" if experts.most_reads is not None else "layers"
        dial = dial if experts.read_best is None else "read_best"
    if facts.plan.decode.predictor != "router":
        yield Finding(
            ("experts", dial),
            f"{dial} does nothing with predictor = "
            f'"{facts.plan.decode.predictor}": no router chooses the reads',
            'write decode.predictor = "router", or leave the table [experts] out',
            origins=(
                Origin(
                    "plan", ("decode", "predictor"), f'predictor = "{facts.plan.decode.predictor}"'
                ),
            ),
        )
    elif moe is not None and experts.prefer_cached and (key := find_other_choice(moe)):
        yield Finding(
            ("experts", "prefer_cached"),
            f"experts cannot be preferred: the model chooses them otherwise ({key})",
            "leave prefer_cached out; least_weight, read_best and most_reads work",
            origins=(Origin("model", ("moe", key), "it is said here"),),
        )


def find_other_choice(moe: Moe) -> str | None:
    """The key by which experts are chosen by more than their scores; None if there is none."""
    others = {
        "router": moe.router == "mixer",
        "choice_bias": moe.choice_bias,
        "groups": moe.groups > 1,
    }
    return next((key for key, differs in others.items() if differs), None)


@rule("P281", "error", "resolved")
def check_speculation_is_verified(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    decode = resolved.plan.decode
    if decode.speculation is None:
        return
    if decode.speculation.drafts == "resident" and resolved.whole_layers:
        yield Finding(
            ("decode", "speculation", "drafts"),
            "drafts leave nothing out: every neuron computes"
            + (f" in {len(resolved.whole_layers)} layers" if resolved.named_layers else ""),
            'write drafts = "prompt", or choose another decode.predictor',
            origins=(Origin("plan", ("decode", "predictor"), f'predictor = "{decode.predictor}"'),),
        )
    if not resolved.has_whole_unit:
        return
    yield Finding(
        ("decode", "speculation"),
        f"{resolved.sparse_unit!r} has the whole model, and verifies no drafts",
        "remove speculation, or give some of the neurons to a CPU",
        at="key",
    )


@rule("P284", "error", "resolved")
def check_draft_plan_fits(facts: Facts) -> Iterator[Finding]:
    resolved = facts.resolved
    settings = resolved.plan.decode.speculation
    if settings is None:
        return
    if (settings.drafts == "plan") != (settings.plan is not None):
        is_unnamed = settings.plan is None
        yield Finding(
            ("decode", "speculation", "drafts" if is_unnamed else "plan"),
            "no plan is named" if is_unnamed else "no plan drafts with this one",
            'write plan = "./draft.plan.toml" and drafts = "plan", or neither',
        )
        return
    if settings.drafts == "mtp" and resolved.file is None:
        yield Finding(
            ("decode", "speculation", "drafts"),
            "the plan runs a neuron store, which has no MTP head",
            'name the plan of its head: `pi2 convert CHECKPOINT --mtp`, and drafts = "plan"',
        )
    if resolved.draft is None:
        return
    key = "drafts" if settings.plan is None else "plan"
    for message, help in _list_obstacles(resolved, resolved.draft):
        yield Finding(("decode", "speculation", key), message, help)


def _list_obstacles(resolved: ResolvedPlan, draft: ResolvedPlan) -> Iterator[tuple[str, str]]:
    own, other = resolved.model.shape.vocab, draft.model.shape.vocab
    if own != other:
        yield (
            f"its model has a vocabulary of {other} tokens, and this one of {own}",
            "name the plan of a model with the same tokenizer",
        )
    hidden, width = draft.model.shape.hidden, resolved.model.shape.hidden
    if draft.model.is_mtp and hidden != width:
        yield (
            f"it is the MTP head of a model of width {hidden}, and this model has {width}",
            "name the plan of this model's own MTP head: `pi2 convert CHECKPOINT --mtp`",
        )
    if (draft.file is None) != (resolved.file is None):
        yield "one of both runs a GGUF file, the other a store", "take two plans of the same kind"
    if draft.plan.decode.speculation is not None:
        yield "it speculates itself", "remove decode.speculation from it"
    if draft.model.state_layers:
        yield (
            "its model has layers with a state, which cannot be taken back",
            "name the plan of a model with attention in every layer",
        )
    if draft.has_whole_unit:
        yield (f"its unit {draft.sparse_unit!r} has the whole model", "give its neurons to a CPU")
    memory = resolved.plan.memory
    if resolved.file is not None and memory.segments.hot < sum(resolved.file.shared.values()):
        yield (
            "memory.segments.hot has no room for the output head, which the MTP head reads as well",
            'remove memory.segments.hot, or write drafts = "prompt"',
        )
    free = memory.budget - sum(dict(memory.segments).values())
    needed = draft.beside_bytes
    if needed > free:
        yield (
            f"it needs {approximate_bytes(needed)} in addition to this plan's segments, and "
            f"memory.budget leaves {approximate_bytes(max(0, free))}",
            "raise memory.budget, or make segments of one of both smaller",
        )
