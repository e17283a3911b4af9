"""What a whole model on a GPU takes, and what cannot be done there: for rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.backends.gpu.alone.sizes import count_host_bytes, list_arrays, list_kept
from pi2.backends.gpu.alone.use import ModelUse
from pi2.backends.limits import list_unknown_weights
from pi2.plan.arithmetic.needs import Need
from pi2.plan.arithmetic.sizes import count_chunk_tokens
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.projections import list_kept_vectors

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan
    from pi2.plan.documents.model import Model


def describe_use(resolved: ResolvedPlan) -> ModelUse:
    """What the plan wants of the model."""
    plan, bundle = resolved.plan, resolved.bundle
    return ModelUse(
        model=resolved.model,
        layout=bundle.inline if bundle.scales == "resident" else bundle,
        chunk=count_chunk_tokens(plan),
        sequences=plan.decode.batch,
        context=plan.kv.context,
        kv=plan.kv.type,
        predictor=plan.decode.predictor,
    )


def need_whole_memory(resolved: ResolvedPlan) -> Need:
    """Bytes of all weights, keys and values, what is computed with, and pieces on their way."""
    use = describe_use(resolved)
    total = sum(list_arrays(use))
    layers = range(use.model.shape.layers)
    kept = sum(size for layer in layers for size in list_kept(use, layer).values())
    return Need(
        total + count_host_bytes(use),
        f"the whole model with its keys, values and states ({approximate_bytes(kept)}), and pieces "
        "of weights on their way to it",
    )


def find_alone_limits(resolved: ResolvedPlan) -> list[str]:
    """What the backend cannot compute alone, each as the end of a sentence."""
    plan, model = resolved.plan, resolved.model
    limits = []
    if resolved.dense_units:
        limits.append(
            f"has a whole model alone, and no unit beside it, such as `{resolved.dense_units[0]}`"
        )
    if plan.decode.predictor == "gate" and model.is_smooth:
        limits.append("knows no thresholds of smooth activations")
    if plan.memory.embedding == "flash" and not model.tied_head:
        limits.append("keeps the embedding in its memory: memory.embedding must not be `flash`")
    limits += list_unknown_weights(model)
    if not limits and resolved.bundle.scales == "resident":
        limits.append("takes no neurons whose scales lie apart: bundle.scales must be `inline`")
    if model.uneven_layers:
        limits.append("computes one mixer for each layer, not two and not none")
    if model.ffn.absent_layers:
        limits.append("computes an FFN in every layer")
    limits += _list_unknown_layers(model)
    each = 4 if plan.kv.type == "int8" else 2
    if list_kept_vectors(model)[2] % each:
        limits.append(f"keeps no {plan.kv.type} heads whose width is not a multiple of {each}")
    return limits


def _list_unknown_layers(model: Model) -> list[str]:
    """What the kernels do not have of norms, attention and routing."""
    attention, moe = model.attention, model.moe
    named = {
        "norm.inputs = false": not model.norm.inputs,
        "norm.embedding": model.norm.embedding,
        "attention.clip": attention.clip is not None,
        "attention.growth with latent attention": attention.growth > 0
        and attention.latent is not None,
        "attention.output_gate with latent attention": attention.output_gate
        and attention.latent is not None,
        "attention.output_gate_function": attention.output_gate_function != "sigmoid",
        'attention.head_norm_of = "all"': attention.head_norm_of == "all",
        "attention.value_norm": attention.value_norm,
        "attention.value_scale": attention.value_scale != 1.0,
        "attention.sub_norm": attention.sub_norm,
        "other_heads": model.other_heads is not None,
        "layers of the kind mamba1": model.state_kind == "mamba1",
        "recurrence.decay_of": model.recurrence is not None and model.recurrence.decay_of == "key",
        "recurrence.gate": model.recurrence is not None and model.recurrence.gate != "silu",
        "layer_scale": model.layer_scale,
        "layer_embedding": model.layer_embedding is not None,
        "altup": model.altup is not None,
        "attention.kv_shared_layers": attention.kv_shared_layers > 0,
        'rope.kind = "proportional"': any(
            rope.kind == "proportional" for rope in model.list_turns().values()
        ),
    }
    if moe is not None:
        named[f'moe.router = "{moe.router}"'] = moe.router in ("mixer", "none")
        named['moe.router_input = "stream"'] = moe.router_input == "stream"
        named["moe.expert_scale"] = moe.expert_scale
        named["moe.choice_bias_of"] = moe.choice_bias_of == "score"
        named["moe.shared_factor"] = moe.shared_factor != 1.0
        named["moe.latent"] = moe.latent is not None
        named["side_ffn"] = model.side_ffn is not None
    return [f"does not know {name}" for name, is_there in named.items() if is_there]
